"""The process that renders chat templates: a template is a program, and only a process can be held to limits.

It is run as a file, and imports nothing but jinja2 and three files beside it. Its arguments are the paths of
modules, and the limits; its standard input is lines of JSON: first the templates by name, then blocks of chats,
see `chat_block`. Each chat is answered by a line, {"shared", "text", "lost"} or {"error", "cause"}. A text begins
with as many characters of the one before it in the block as are `shared`, and `text` is what follows them; what is
lost are parts of the chat that the text does not have, see `traces`.

CPU time is the kernel's to limit: a render that takes too much ends the process, by SIGPROF.
"""

# Tests: tests/text/test_chat_template.py

from __future__ import annotations

import importlib.util
import json
import os
import resource
import signal
import sys
from collections.abc import Mapping
from functools import partial
from typing import IO, Any

FORBIDDEN, REFUSED, FAILED, TOO_LONG, TOO_LARGE = "forbidden", "refused", "failed", "too long", "too large"


def main(paths: list[str], seconds: float, max_bytes: int, max_characters: int) -> None:
    """Answer standard input to its end."""
    sys.path[:] = paths  # those of the process that asks
    said = _beside("said_arguments").SaidArguments
    render = _renderer(json.loads(sys.stdin.buffer.readline()), max_characters, said)
    answer = partial(_answer, _beside("traces").lost, render, seconds)
    # What the process that asks ignores or blocks, this one would, too.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGPROF,))
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    # macOS knows this limit, and takes no notice of it.
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes if hard < 0 else min(max_bytes, hard), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _serve(sys.stdin.buffer, sys.stdout.buffer, said, _beside("common_length").common_length, answer)


def _beside(name: str) -> Any:
    """The module in a file beside this one, without its package."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{name}.py")
    spec: Any = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _serve(asked: IO[bytes], answers: IO[bytes], said: Any, common_length: Any, answer: Any) -> None:
    while line := asked.readline():
        _answer_block(json.loads(line), answers, said, common_length, answer)


def _answer_block(block: dict[str, Any], answers: IO[bytes], said: Any, common_length: Any, answer: Any) -> None:
    """Write the answer of each chat before the next one is rendered, which may end this process."""
    messages, others = block["messages"], block["others"]
    for message in messages:
        _keep_said(message, said)
    before = ""
    for name, variables, tools, places in block["chats"]:
        chat = {"messages": [messages[place] for place in places], "tools": others[tools]}
        given = answer(name, {**others[variables], **chat})
        if (text := given.get("text")) is not None:
            given["shared"] = common_length(before, text)
            given["text"] = text[given["shared"] :]
            before = text
        answers.write(json.dumps(given).encode() + b"\n")
        answers.flush()


def _keep_said(message: dict[str, Any], said: Any) -> None:
    """Make `said` of arguments that are text."""
    for call in message.get("tool_calls") or ():
        function = call["function"]
        if isinstance(function["arguments"], str):
            function["arguments"] = said(function["arguments"])


def _answer(lost: Any, render: Any, seconds: float, name: str, variables: dict[str, Any]) -> dict[str, Any]:
    """The text of a chat, and what of it is lost, or the error: each in so many seconds of CPU time."""
    try:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        given: dict[str, Any] = render(name, variables)
        if "text" in given:
            signal.setitimer(signal.ITIMER_PROF, seconds)  # for all renders of `lost` together
            given["lost"] = lost(variables, given["text"], lambda marked: render(name, marked).get("text"))
    except MemoryError:
        given = {"error": TOO_LARGE, "cause": ""}
    signal.setitimer(signal.ITIMER_PROF, 0)
    return given


def _renderer(sources: Mapping[str, str], max_characters: int, said: type[str]) -> Any:
    """A function from the name of a template and its variables to a text or an error."""
    from jinja2.exceptions import SecurityError, TemplateError

    environment = _environment(said)
    compiled: dict[str, Any] = {}

    def render(name: str, variables: dict[str, Any]) -> dict[str, str]:
        try:
            if name not in compiled:
                compiled[name] = template = environment.from_string(sources[name])
                template.globals = dict(template.globals)  # each rendering copies them
            pieces: list[str] = []
            left = max_characters
            for piece in compiled[name].generate(**variables):
                pieces.append(piece)
                left -= len(piece)
                if left < 0:
                    return {"error": TOO_LONG, "cause": ""}
            return {"text": "".join(pieces)}
        except MemoryError:
            raise
        except Exception as error:  # a template is a program: it may raise anything
            kind = FAILED
            if isinstance(error, SecurityError):
                kind = FORBIDDEN
            elif type(error) is TemplateError:  # where it calls raise_exception
                kind = REFUSED
            return {"error": kind, "cause": str(error).strip().split("\n")[0][:1000] or type(error).__name__}

    return render


def _environment(said: type[str]) -> Any:
    """The sandbox, with what templates of checkpoints may expect: that of transformers' apply_chat_template."""
    from datetime import datetime

    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what the assistant said, which trainers want to know: here it is its body."""

        tags = {"generation"}  # noqa: RUF012 (a set in the base class)

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

        def _said(self, caller: Any) -> Any:
            return caller()

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        """Unlike jinja2's own, this leaves <, >, & and ' as they are; and arguments as they were `said`."""
        if isinstance(value, said):
            return str(value)
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
