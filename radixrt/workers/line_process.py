"""A process that answers lines with lines, and that may be held to limits or end at any time."""

from __future__ import annotations

import json
import math
import os
import select
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from radixrt.errors import RadixrtError

_READ_AT_ONCE = 1 << 16  # what a pipe holds


class LineProcess:
    """A process that runs a file without its package. It ends with this object.

    The file's arguments are the paths of modules, as JSON, and `arguments`. It reads lines from standard input,
    and answers each with lines of JSON on standard output. Ctrl-C is not for it. A fork of the process that has
    started it does not use it, and does not end it.

    Args:
        purpose: what it does, for errors.
        error: of what kind these are.
        environment: variables beside those of this process.
        is_quiet: what it writes to standard error is of no use.

    Raises:
        RadixrtError: it cannot be started; of the kind `error`.
    """

    def __init__(
        self,
        file: str,
        *arguments: float,
        purpose: str,
        error: type[RadixrtError],
        environment: Mapping[str, str] | None = None,
        is_quiet: bool = False,
    ) -> None:
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", file, json.dumps(sys.path), *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL if is_quiet else None,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
            )
        except OSError as cause:
            raise error(f"the process that {purpose} cannot be started: {cause}") from cause
        assert self._process.stdout is not None
        self._poll = select.poll()  # unlike `select` it takes every file number
        self._poll.register(self._process.stdout, select.POLLIN)
        self._lines, self._pieces = deque[bytes](), list[bytes]()  # the pieces are of the line after these
        self._owner = os.getpid()
        weakref.finalize(self, _ended, self._process, self._owner, 0.0)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it is this process's, and has not ended."""
        return self._owner == os.getpid() and self._process.poll() is None

    def ask(self, lines: bytes, num_answers: int = 1, seconds: float = math.inf) -> list[Any]:
        """The answers to lines; fewer if the process ends, or has not given all in time: then it is to be ended.

        Ctrl-C meanwhile ends it: who asks next must not get the answers of before.
        """
        answers: list[Any] = []
        deadline = time.monotonic() + seconds
        try:
            assert self._process.stdin is not None
            with suppress(BrokenPipeError):
                self._process.stdin.write(lines)
                self._process.stdin.flush()
            while len(answers) < num_answers and (line := self._line(deadline)) is not None:
                answers.append(json.loads(line))
        except BaseException:
            self.end(0.0)
            raise
        return answers

    def end(self, wait: float) -> int | None:
        """End the process; how it has ended by itself within `wait` seconds, as `subprocess` tells it, or None."""
        return _ended(self._process, self._owner, wait)

    def _line(self, deadline: float) -> bytes | None:
        """The next line; None if the process ends before, or does not write it in time."""
        assert self._process.stdout is not None
        while not self._lines:
            left = deadline - time.monotonic()
            if left <= 0 or not self._poll.poll(None if left == math.inf else left * 1000):
                return None
            if not (more := os.read(self._process.stdout.fileno(), _READ_AT_ONCE)):
                return None
            self._pieces.append(more)
            if b"\n" in more:
                *lines, rest = b"".join(self._pieces).split(b"\n")
                self._lines += lines
                self._pieces = [rest]
        return self._lines.popleft()


def _ended(process: subprocess.Popen[bytes], owner: int, wait: float) -> int | None:
    if owner != os.getpid():  # a fork of its owner
        return None
    status: int | None = None
    try:
        status = process.wait(wait)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):  # what was not read any more
            assert pipe is not None
            pipe.close()
    return status
