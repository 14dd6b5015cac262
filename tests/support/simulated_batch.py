"""A batch without a model or torch.

As a program it is one process that reads a `Task` a line, as JSON, runs it in a child, kills that if the task says
so, and writes the child's exit status as a line.
"""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from radixrt.batch.journal import journal as journal_module
from radixrt.batch.journal.journal import Journal
from radixrt.batch.journal.manifest import Manifest
from radixrt.batch.journal.run_folder import RunFolder
from radixrt.cli.exit_status import DONE, exit_status
from radixrt.errors import JournalError, RadixrtError
from radixrt.files.disk import DISK, Disk, refusal


def answer(position: int, attempt: int = 0) -> bytes:
    """The record of a position, 30 to 300 bytes, which says in which attempt it was computed."""
    rng = random.Random(position)
    text = "".join(rng.choices('abc é\\"\t\r\0\u2028🦊', k=rng.randrange(100)))
    record = {"index": position, "attempt": attempt, "text": text}
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"


def manifest(num_records: int, **changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "input": {"sha256": "ab" * 32, "bytes": 1234},
        "weights": {"name": "tiny", "fingerprint": [1, 2]},
        "tokenizer": {"sha256": "cd" * 32},
        "parameters": {"temperature": 0.5, "max_new_tokens": 8},
        **changes,
    }
    return Manifest(num_records, **fields)


class Witness:
    """Knows what was written to the journals of all attempts, and what of it has to be there.

    Attributes:
        records: by position, as they were found when a journal was opened, or written since.
        required: positions that the journal has to have when it is opened next.
    """

    def __init__(self) -> None:
        self.records: dict[int, bytes] = {}
        self.required: set[int] = set()
        self._journal: Journal | None = None  # the last that was opened
        self._is_open = False
        self._order: list[int] = []  # positions in the order of writing, after the ones found

    def opened(self, journal: Journal) -> None:
        found = dict(zip(np.flatnonzero(journal.finished).tolist(), journal.records(), strict=True))
        for position, record in found.items():
            assert record == self.records[position], "a record is not what was written"
        assert self.required <= set(found), "what was counted is lost"
        assert journal.durable == journal.written == journal.recovery.records == len(found)
        self.records, self._journal, self._order, self._is_open = found, journal, list(found), True

    def writing(self, position: int, record: bytes) -> None:
        self.records[position] = record

    def wrote(self, position: int) -> None:
        self._order.append(position)

    def killed(self) -> None:
        """The process has ended: whatever `append` has acknowledged has to be there."""
        if self._is_open:
            self.required = set(self._order)
        self._is_open = False

    def power_cut(self) -> None:
        """Or the machine has: whatever was counted as durable has to be there."""
        self.required = set() if self._journal is None else set(self._order[: self._journal.durable])
        self._is_open = False

    def output(self) -> bytes:
        """The file of all records."""
        return b"".join(record for _, record in sorted(self.records.items()))


def run(
    output: Path,
    num_records: int,
    *,
    disk: Disk = DISK,
    attempt: int = 0,
    pause: Callable[[], None] = lambda: None,
    witness: Witness | None = None,
    **options: Any,
) -> None:
    """Answer what is not answered yet, in an order that depends on the attempt, and make the output.

    Args:
        pause: called before each answer.
        witness: told of all that is written.
        options: of `RunFolder.begin`.
    """
    with RunFolder(output, disk=disk) as folder:
        try:
            disk.write_file(folder.scratch / "tokens", iter([b"1 2 3"]))
        except OSError as error:
            raise JournalError(refusal(error)) from error
        journal = folder.begin(manifest(num_records), **options)
        if witness is not None:
            witness.opened(journal)
        missing = np.flatnonzero(~journal.finished)
        for position in np.random.default_rng(attempt).permutation(missing).tolist():
            pause()
            record = answer(position, attempt)
            if witness is not None:
                witness.writing(position, record)
            journal.append(position, record)
            if witness is not None:
                witness.wrote(position)
        folder.finish()


@dataclass
class Task:
    """One attempt at a batch, in a process of its own.

    Attributes:
        output, num_records, attempt: of the batch.
        kill_after: seconds until the process is killed by another one.
        kill_at: it kills itself at that call among those that change something, `kill_when` "before" the call,
            "after" it or in the "middle" if it is a write.
        pause: the most seconds, at random, before an answer and before each call.
    """

    output: str
    num_records: int
    attempt: int
    kill_after: float | None = None
    kill_at: int = -1
    kill_when: str = "before"
    pause: float = 0.0


class TaskDisk(Disk):
    """A disk that pauses and kills as its task says. The calls' own data go to the system as they are."""

    CALLS = ("open", "close", "write", "fsync", "truncate", "replace", "unlink", "mkdir", "rmdir", "flock")

    def __init__(self, task: Task) -> None:
        self._task = task
        self._number = -1
        self._rng = random.Random(task.attempt)

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        return functools.partial(self._call, name, value) if name in TaskDisk.CALLS else value

    def pause(self) -> None:
        if self._task.pause:
            time.sleep(self._rng.random() * self._task.pause)

    def _call(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        self.pause()
        self._number += 1
        is_last = self._number == self._task.kill_at
        if is_last and self._task.kill_when == "middle" and name == "write":
            call(args[0], args[1][: len(args[1]) // 2])
        if is_last and self._task.kill_when != "after":
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            return call(*args)
        finally:
            if is_last:
                os.kill(os.getpid(), signal.SIGKILL)


def run_task(task: Task) -> int:
    """The exit status of a command that runs the task."""
    disk = TaskDisk(task)
    try:
        run(Path(task.output), task.num_records, disk=disk, attempt=task.attempt, pause=disk.pause)
    except RadixrtError as error:
        print(error, file=sys.stderr)
        return exit_status(error)
    return DONE


def main() -> None:
    assert "torch" not in sys.modules
    journal_module.SYNC_RECORDS = 4
    for line in sys.stdin:
        task = Task(**json.loads(line))
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = run_task(task)
            finally:
                os._exit(status)
        if task.kill_after is not None:
            time.sleep(task.kill_after)
            os.kill(child, signal.SIGKILL)
        _, wait_status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(wait_status), flush=True)


if __name__ == "__main__":
    main()
