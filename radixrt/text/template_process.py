"""The process that renders chat templates: a template is a program, and only a process can be held to limits.

It is run as a file, and imports nothing but jinja2. Its arguments are the paths of modules, and the limits; its
standard input is lines of JSON: first the templates by name, then lists of {"template": name, "variables": {...}}.
Each list is answered by a line, a list of {"text"} or {"error", "cause"}.

CPU time is the kernel's to limit: a render that takes too much ends the process, by SIGPROF.
"""

# Tests: tests/text/test_chat_template.py

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Mapping
from typing import IO, Any

FORBIDDEN, REFUSED, FAILED, TOO_LONG, TOO_LARGE = "forbidden", "refused", "failed", "too long", "too large"


def main(paths: list[str], seconds: float, max_bytes: int, max_characters: int) -> None:
    """Answer standard input to its end."""
    sys.path[:] = paths  # those of the process that asks
    render = _renderer(json.loads(sys.stdin.buffer.readline()), max_characters)
    # macOS knows this limit, and takes no notice of it.
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _serve(sys.stdin.buffer, sys.stdout.buffer, render, seconds)


def _serve(asked: IO[bytes], answers: IO[bytes], render: Any, seconds: float) -> None:
    while line := asked.readline():
        given = []
        for one in json.loads(line):
            signal.setitimer(signal.ITIMER_PROF, seconds)
            try:
                given.append(render(one))
            except MemoryError:
                given.append({"error": TOO_LARGE, "cause": ""})
            signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(json.dumps(given).encode() + b"\n")
        answers.flush()


def _renderer(sources: Mapping[str, str], max_characters: int) -> Any:
    """A function from a question to its answer."""
    from jinja2.exceptions import SecurityError, TemplateError

    environment = _environment()
    compiled: dict[str, Any] = {}

    def render(asked: dict[str, Any]) -> dict[str, str]:
        name = asked["template"]
        try:
            if name not in compiled:
                compiled[name] = environment.from_string(sources[name])
            pieces: list[str] = []
            left = max_characters
            for piece in compiled[name].generate(**asked["variables"]):
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


def _environment() -> Any:
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
        """Unlike jinja2's own, this leaves <, >, & and ' as they are."""
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
