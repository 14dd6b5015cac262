"""`Trials`: forms are tried in a process with limits of time and memory before they are compiled here."""

from __future__ import annotations

import json
import signal
import threading
from dataclasses import dataclass
from typing import Any

from radixrt.errors import FormError
from radixrt.forms import form_process
from radixrt.forms.vocabulary import Vocabulary
from radixrt.workers.line_process import LineProcess

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
        self._process: LineProcess | None = None
        self._loaded: set[str] = set()  # engines

    def try_form(self, engine: str, kind: str, text: str, seconds: float = MAX_SECONDS) -> Verdict:
        """Whether an engine takes a form.

        Raises FormError where the process cannot be started, or was killed by another one.
        """
        with self._lock:
            process = self._running(engine)
            for answer in _asked(process, {"engine": engine, "kind": kind, "text": text}, seconds):
                return Verdict(answer.get("error"), answer.get("bytes", 0))
            status = process.end(wait=0.2)
        if status is None:
            return Verdict(f"it takes more than {seconds:g} seconds to compile", is_bomb=True)
        if status in (-signal.SIGKILL, -signal.SIGTERM):
            raise FormError(f"the process that tries forms was killed, by signal {-status}: is memory short?")
        limit = f"{MAX_BYTES // 2**30} GiB"
        return Verdict(f"it needs more than {limit} of memory, or ends its compiler ({status})", is_bomb=True)

    @property
    def process_id(self) -> int | None:
        """Of the process, while it runs."""
        return self._process.pid if self._process is not None and self._process.is_running else None

    def close(self) -> None:
        """End the process."""
        with self._lock:
            if self._process is not None:
                self._process.end(wait=0)

    def _running(self, engine: str) -> LineProcess:
        process = self._process
        if process is None or not process.is_running:
            process = self._process = LineProcess(
                str(form_process.__file__),
                MAX_BYTES,
                purpose="tries forms",
                error=FormError,
                environment={"OMP_NUM_THREADS": "1"},
                is_quiet=True,  # warnings of engines, and what aborts say
            )
            self._loaded = set()
            self._start(process, self._vocabulary.as_json, "the tokenizer")
        if engine not in self._loaded:
            self._start(process, {"load": engine}, engine)
            self._loaded.add(engine)
        return process

    def _start(self, process: LineProcess, message: dict[str, Any], what: str) -> None:
        answers = _asked(process, message, MAX_START_SECONDS)
        if not answers or "error" in answers[0]:
            status = process.end(wait=0.2)
            why = answers[0]["error"] if answers else f"status {status}"
            raise FormError(f"the process that tries forms cannot load {what}: {why}")


def _asked(process: LineProcess, message: dict[str, Any], seconds: float) -> list[dict[str, Any]]:
    """The answer to a message; [] if there is none in time."""
    return process.ask(json.dumps(message).encode() + b"\n", seconds=seconds)
