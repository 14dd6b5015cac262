"""`Trials`: forms are tried in a process with limits of time and memory before they are compiled here."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from radixrt.errors import FormError
from radixrt.forms import form_process
from radixrt.forms.vocabulary import Vocabulary
from radixrt.workers.process import stopped

MAX_SECONDS = 10.0  # of one form
MAX_START_SECONDS = 120.0  # to import an engine and to read a tokenizer, on a busy machine
MAX_BYTES = 2**31  # beyond what the engine takes by itself; Linux alone heeds it


@dataclass(frozen=True)
class Verdict:
    """What a trial has found.

    Attributes:
        reason: why the engine refuses the form, or None.
        size: memory that it takes, in bytes.
        is_bomb: it has passed a limit of the process: no other engine is to try it.
    """

    reason: str | None
    size: int = 0
    is_bomb: bool = False


class Trials:
    """Tries forms one by one. The process is started by the first, and ended with this object."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._loaded: set[str] = set()
        self._owner = 0  # the process that has started it: one that was forked off starts its own

    def try_form(self, engine: str, kind: str, text: str, seconds: float = MAX_SECONDS) -> Verdict:
        """Whether an engine takes a form.

        Raises FormError where the process cannot be started, or was killed by another one.
        """
        with self._lock:
            process = self._running(engine)
            answer = self._asked(process, {"engine": engine, "kind": kind, "text": text}, seconds)
            if answer is not None:
                return Verdict(answer.get("error"), answer.get("bytes", 0))
            status = self._end(process, wait=0.2)
        if status is None:
            return Verdict(f"it takes more than {seconds:g} seconds to compile", is_bomb=True)
        if status in (-signal.SIGKILL, -signal.SIGTERM):
            raise FormError(f"the process that tries forms was killed, by signal {-status}: is memory short?")
        limit = f"{MAX_BYTES // 2**30} GiB"
        return Verdict(f"it needs more than {limit} of memory, or ends its compiler ({status})", is_bomb=True)

    @property
    def process_id(self) -> int | None:
        """Of the process, while it runs."""
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """End the process."""
        with self._lock:
            if self._process is not None:
                self._end(self._process, wait=0)

    def _running(self, engine: str) -> subprocess.Popen[bytes]:
        process = self._process
        if process is None or self._owner != os.getpid() or process.poll() is not None:
            process = self._started()
        if engine not in self._loaded:
            self._checked_start(process, {"load": engine}, engine)
            self._loaded.add(engine)
        return process

    def _started(self) -> subprocess.Popen[bytes]:
        arguments = (json.dumps(sys.path), str(MAX_BYTES))
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", str(form_process.__file__), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # warnings of engines, and what aborts say
                start_new_session=True,  # Ctrl-C is not for it
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        except OSError as error:
            raise FormError(f"the process that tries forms cannot be started: {error}") from error
        self._process, self._owner, self._loaded = process, os.getpid(), set()
        weakref.finalize(self, stopped, process, self._owner, 0)
        self._checked_start(process, self._vocabulary.as_json, "the tokenizer")
        return process

    def _checked_start(self, process: subprocess.Popen[bytes], message: dict[str, Any], what: str) -> None:
        answer = self._asked(process, message, MAX_START_SECONDS)
        if answer is None or "error" in answer:
            status = self._end(process, wait=0.2)
            why = f"status {status}" if answer is None else answer["error"]
            raise FormError(f"the process that tries forms cannot load {what}: {why}")

    def _asked(self, process: subprocess.Popen[bytes], message: dict[str, Any], seconds: float) -> Any:
        """The answer to a message; None where there is none in time."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with suppress(BrokenPipeError):
                process.stdin.write(json.dumps(message).encode() + b"\n")
                process.stdin.flush()
            deadline, line = time.monotonic() + seconds, b""
            while not line.endswith(b"\n"):
                left = deadline - time.monotonic()
                if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                    return None
                if not (more := os.read(process.stdout.fileno(), 2**16)):
                    return None
                line += more
            return json.loads(line)
        except BaseException:  # Ctrl-C: the next form must not get this one's answer
            self._end(process, wait=0)
            raise

    def _end(self, process: subprocess.Popen[bytes], wait: float) -> int | None:
        """End the process; how it has ended by itself, or None."""
        self._process = None
        return stopped(process, self._owner, wait)
