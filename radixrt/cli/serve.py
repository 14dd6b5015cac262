"""`radixrt serve`: a server that OpenAI's clients talk to."""

from __future__ import annotations

import argparse
import importlib.util
import ipaddress
import sys
from contextlib import nullcontext
from typing import Any

from radixrt.builtin import MODEL_PATH
from radixrt.checks import check_int
from radixrt.cli.exit_status import DONE, SIGNALLED
from radixrt.cli.kept_cache import model_place, runtime_places, runtime_with_cache
from radixrt.cli.options import add_command, add_runtime_options, file_path, runtime_options
from radixrt.engine.signals import DRAIN_SECONDS, Interrupted
from radixrt.errors import ParameterError
from radixrt.files.path_roles import PathRole, check_apart
from radixrt.parsers.names import AUTO, NONE, REASONING_PARSERS, TOOL_PARSERS
from radixrt.sampling_params import MAX_NEW_TOKENS

INSTALL = "pip install 'radixrt[server]'"

_BOUNDS = (  # of options
    ("port", 0, 65535),
    ("max_pending", 1, 10**9),
    ("drain_seconds", 0, 86_400),
    ("stream_writers", 0, 64),
)

_EXAMPLES = """\
examples:
  radixrt serve --model FOLDER_OR_ID
  radixrt serve --model FOLDER_OR_ID --host 0.0.0.0 --port 8080 --api-key-file keys.txt

  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
      -d '{"model": "any", "messages": [{"role": "user", "content": "Hello!"}]}'

  radixrt serve --model FOLDER_OR_ID --admin-socket admin.sock
  curl --unix-socket admin.sock -X POST http://localhost/flush
  curl --unix-socket admin.sock http://localhost/save -d '{"path": "kept-cache"}'

  radixrt serve --model FOLDER_OR_ID --files-dir kept
  curl http://127.0.0.1:8000/v1/files -F purpose=batch -F file=@requests.jsonl
  curl http://127.0.0.1:8000/v1/batches -H 'Content-Type: application/json' \\
      -d '{"input_file_id": "file-...", "endpoint": "/v1/chat/completions", "completion_window": "24h"}'

http://127.0.0.1:8000/ is a page that shows the tree of cached prefixes as it lives.

A file of API keys has a key of at least 16 characters a line. Each key is a tenant with a cache of its own, so
that nobody can time what others have asked. Without keys the server listens to this machine alone.

Batches run in the background, after what clients wait for, and go on when the server is started again.

SIGTERM, Ctrl-C and SIGHUP refuse new connections, let requests that run end, and end the server; then
--save-cache saves. A second one cuts them, and saves nothing.

exit status: 2 the options, the model or a file cannot be used, or the port is taken; 75 the device was lost, and
the cache with it; 130 ended by Ctrl-C, 143 by SIGTERM, 129 by SIGHUP.
"""


def add_serve_command(commands: Any) -> None:
    """Add `serve` to the subparsers of `radixrt`."""
    parser = add_command(
        commands,
        "serve",
        usage="[options]",
        help="answer OpenAI's clients over HTTP",
        description="A server with OpenAI's endpoints for completions and chats, over one Runtime.",
        epilog=_EXAMPLES,
        run=_serve,
    )
    option = parser.add_argument_group("server").add_argument
    option("--host", default="127.0.0.1", metavar="ADDRESS", help="to listen at (127.0.0.1)")
    option("--port", type=int, default=8000, metavar="N", help="0: any that is free (8000)")
    option("--api-key-file", type=file_path, metavar="FILE", help="keys of the clients that may ask, a line each")
    option("--model-name", metavar="NAME", help="as clients see it (the folder's, or the hub id)")
    option(
        "--tool-parser",
        choices=(AUTO, NONE, *TOOL_PARSERS),
        default=AUTO,
        help="that finds calls; auto: the one that reads what the chat template writes of a call (auto)",
    )
    option(
        "--reasoning-parser",
        choices=(AUTO, NONE, *REASONING_PARSERS),
        default=AUTO,
        help="that finds thoughts; auto: by what the chat template names (auto)",
    )
    option(
        "--default-max-tokens",
        type=int,
        metavar="N",
        help="of chats that give no maximum (all that the context leaves)",
    )
    option(
        "--max-pending",
        type=int,
        default=16_384,
        metavar="N",
        help="answers that run or wait; requests for more are told 429 (16384)",
    )
    option(
        "--drain-seconds", type=int, default=60, metavar="N", help="for what runs, once the server is to end (60)"
    )
    option(
        "--stream-writers",
        type=int,
        metavar="N",
        help="processes that write streams beside the server (2, with fewer than 8 cores 0)",
    )
    option(
        "--admin-socket",
        type=file_path,
        metavar="PATH",
        help="a Unix socket, for this user alone, that takes POST /flush and POST /save",
    )
    option(
        "--files-dir",
        type=file_path,
        metavar="FOLDER",
        help="keep clients' files and batches there, and serve /v1/files and /v1/batches",
    )
    add_runtime_options(parser)


def _serve(arguments: argparse.Namespace) -> int:
    for package in ("starlette", "uvicorn", "uvloop", "httptools", "prometheus_client", "python_multipart"):
        if importlib.util.find_spec(package) is None:
            raise ParameterError(f"a server needs packages that are not installed: {INSTALL}")
    from radixrt.parsers.choosing import chosen
    from radixrt.server.admin import Admin
    from radixrt.server.app import Server
    from radixrt.server.batches.service import Batches
    from radixrt.server.files.folder import files_folder
    from radixrt.server.hosts import LOOPBACK
    from radixrt.server.limits import Limits
    from radixrt.server.local_socket import local_socket
    from radixrt.server.run import Listener, listening_socket, switching_soon
    from radixrt.server.tenants import Tenants
    from radixrt.server.writers.writers import StreamWriters

    if arguments.stream_writers is None:
        arguments.stream_writers = StreamWriters.usual_count()
    for name, least, most in _BOUNDS:
        if not least <= (value := getattr(arguments, name)) <= most:
            raise ParameterError(f"{name} is {value}; it must be {least} to {most}")
    if (most := arguments.default_max_tokens) is not None:
        check_int("default_max_tokens", most, 1, MAX_NEW_TOKENS)
    if arguments.model_name == "":
        raise ParameterError("model_name is empty; leave it out for the name of the folder or the hub id")
    keys = arguments.api_key_file
    tenants = Tenants() if keys is None else Tenants.of_file(keys)
    if not tenants and not _is_loopback(arguments.host):
        raise ParameterError(
            f"host is {arguments.host!r}, where others can ask: that needs --api-key-file; 127.0.0.1 is for this "
            "machine alone"
        )
    model = runtime_options(arguments).get("model", MODEL_PATH)
    name = arguments.model_name or ("built-in" if model == MODEL_PATH else str(model).rstrip("/"))
    path, kept_in, limits = arguments.admin_socket, arguments.files_dir, Limits(pending=arguments.max_pending)
    drain_seconds = min(DRAIN_SECONDS, arguments.drain_seconds)
    kept = [] if kept_in is None else [PathRole("the folder of --files-dir", kept_in, True)]
    if kept:
        check_apart([*runtime_places(arguments), *kept])
    with (
        listening_socket(arguments.host, arguments.port) as socket,  # all before the model is loaded
        nullcontext() if path is None else local_socket(path) as admin_socket,
        nullcontext() if kept_in is None else files_folder(kept_in) as folder,
        runtime_with_cache(arguments) as runtime,
        nullcontext()
        if folder is None
        else Batches(runtime, folder, tenants.names, limits=limits, drain_seconds=drain_seconds) as batches,
        switching_soon(),
        StreamWriters(runtime.tokenizer, arguments.stream_writers, limits.idle_seconds) as writers,
    ):
        runtime.capture_graphs()  # else the first requests would wait for them
        host, port = socket.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
        parsers = chosen(runtime.tokenizer, arguments.tool_parser, arguments.reasoning_parser)
        found = {"calls": parsers.tools, "thoughts": parsers.reasoning}
        told = "".join(f", {what} by {parser}" for what, parser in found.items() if parser is not None)
        server = Server(
            runtime,
            name,
            parsers=parsers,
            chat_max_tokens=arguments.default_max_tokens,
            tenants=tenants,
            hosts=None if tenants else (*LOOPBACK, arguments.host),
            limits=limits,
            batches=batches,
            writers=writers,
        )
        places = [*model_place(arguments), *kept]
        listener = Listener(
            server,
            arguments.drain_seconds,
            on_start=lambda: print(f"radixrt serves {name}{told} at {url}", file=sys.stderr, flush=True),
            admin=None if admin_socket is None else (Admin(runtime, places), admin_socket),
        )
        listener.run(sockets=[socket])
        ended_by = listener.signal
        if listener.force_exit and ended_by is not None:
            raise Interrupted("ended at once", ended_by)  # without what is left to do, such as saving the cache
    return DONE if ended_by is None else SIGNALLED + ended_by


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
