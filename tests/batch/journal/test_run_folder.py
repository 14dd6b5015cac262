"""The folder of a run on a real disk, and the processes that want it."""

from __future__ import annotations

import errno
import gzip
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from radixrt.batch.job import run_batch
from radixrt.batch.journal import journal as journal_module
from radixrt.batch.journal.run_folder import RunFolder, aside_path, has_run
from radixrt.cli.exit_status import DONE, RESUMABLE, UNUSABLE
from radixrt.errors import BatchFileError, JournalError
from radixrt.files.disk import Disk
from tests.support import simulated_batch
from tests.support.fake_runtime import FakeRuntime
from tests.support.simulated_batch import Task, TaskDisk, answer, manifest, run

HOME = Path(journal_module.__file__).resolve().parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(HOME)}


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "answers.jsonl"


def folder_of(output: Path) -> Path:
    return output.with_name("answers.jsonl.run")


def part_of_a_run(output: Path, num_records: int, positions: range, disk: Disk | None = None) -> None:
    with RunFolder(output, disk=disk or Disk()) as folder:
        journal = folder.begin(manifest(num_records))
        for position in positions:
            journal.append(position, answer(position))


def whole(num_records: int) -> bytes:
    return b"".join(map(answer, range(num_records)))


# ---- begin and finish


def test_a_run_in_two_parts(output: Path) -> None:
    part_of_a_run(output, 10, range(3, 7))
    assert sorted(os.listdir(folder_of(output))) == ["journal", "lock", "scratch"]
    with RunFolder(output) as folder:
        assert folder.path == folder_of(output)
        journal = folder.begin(manifest(10))
        assert np.flatnonzero(journal.finished).tolist() == [3, 4, 5, 6]
        with pytest.raises(BatchFileError, match="lacks 6 of 10 records, the first that of position 0"):
            folder.finish()
        assert os.listdir(output.parent) == [folder.path.name]
        assert "output" not in os.listdir(folder.path)
        for position in (0, 1, 2, 7, 8, 9):
            journal.append(position, answer(position))
        folder.finish()
        assert os.listdir(output.parent) == [output.name]
    assert output.read_bytes() == whole(10)
    assert os.listdir(output.parent) == [output.name]


def test_an_output_that_exists(output: Path) -> None:
    output.write_text("precious")
    with pytest.raises(BatchFileError, match=r"the output .*answers\.jsonl exists; --overwrite replaces it"):
        run(output, 5)
    assert os.listdir(output.parent) == [output.name]  # nothing else is left
    assert output.read_text() == "precious"
    run(output, 5, replace=True)
    assert output.read_bytes() == whole(5)


def test_an_output_that_appears_meanwhile(output: Path) -> None:
    part_of_a_run(output, 5, range(2))
    output.write_text("precious")
    with pytest.raises(BatchFileError, match="exists; --overwrite"):
        run(output, 5)
    output.unlink()
    with RunFolder(output) as folder:
        journal = folder.begin(manifest(5))
        for position in range(2, 5):
            journal.append(position, answer(position))
        output.write_text("precious")
        with pytest.raises(BatchFileError, match="exists; --overwrite"):
            folder.finish()
    assert output.read_text() == "precious"
    output.unlink()
    run(output, 5)
    assert output.read_bytes() == whole(5)


def test_begin_anew(output: Path) -> None:
    part_of_a_run(output, 10, range(4))
    with RunFolder(output) as folder:
        assert folder.begin(manifest(6), restart=True).written == 0
    part_of_a_run(output, 6, range(3))
    with RunFolder(output) as folder:
        assert folder.begin(manifest(6)).written == 3
    (folder_of(output) / "journal").write_bytes(b"whatever")
    run(output, 6, restart=True)
    assert output.read_bytes() == whole(6)


def test_another_run_is_refused_with_what_differs(output: Path) -> None:
    part_of_a_run(output, 10, range(4))
    before = (folder_of(output) / "journal").read_bytes()
    other = manifest(11, parameters={"temperature": 1.0, "max_new_tokens": 8})
    with RunFolder(output) as folder, pytest.raises(BatchFileError) as raised:
        folder.begin(other)
    assert str(raised.value) == (
        f"{folder_of(output)} holds a run of something else: num_records is 10 there and 11 here; "
        "parameters.temperature is 0.5 there and 1.0 here. Give what that run was begun with to go on with it, "
        f"choose another output, or remove the folder {folder_of(output)} to begin anew"
    )
    assert not isinstance(raised.value, JournalError)
    assert (folder_of(output) / "journal").read_bytes() == before
    run(output, 10)


class Interrupted(TaskDisk):
    """Ctrl-C before the n-th call that changes something once the output has its name, from 0."""

    def __init__(self, output: Path, number: int) -> None:
        super().__init__(Task(str(output), 0, 0))
        self._output = output
        self.left = number

    def _call(self, name: str, call: Any, *args: Any) -> Any:
        if self._output.exists():
            self.left -= 1
            if self.left == -1:
                raise KeyboardInterrupt
        return call(*args)


def ended_at(output: Path, number: int) -> bool:
    """End a run at that call of the removal of its folder; whether there was such a call."""
    disk = Interrupted(output, number)
    with suppress(KeyboardInterrupt):
        run(output, 5, disk=disk)
    return disk.left < 0


def test_ended_while_its_folder_is_removed(output: Path) -> None:
    """The same run goes on to its end, computes nothing again, and another one is told which it was."""
    number = 0
    while ended_at(output, number):
        assert output.read_bytes() == whole(5)
        assert has_run(output) == (os.listdir(output.parent) != [output.name])
        if not has_run(output):
            break
        with RunFolder(output) as folder, pytest.raises(BatchFileError, match="a run of something else: num_rec"):
            folder.begin(manifest(6), replace=True)
        assert output.read_bytes() == whole(5)
        with RunFolder(output):  # such as one that finds its input bad
            pass
        with RunFolder(output) as folder:
            assert folder.begin(manifest(5)).finished.all()
            folder.finish()
        assert os.listdir(output.parent) == [output.name]
        assert output.read_bytes() == whole(5)
        output.unlink()
        number += 1
    assert number > 8


@pytest.mark.parametrize("is_there", [False, True])
def test_begin_anew_after_an_end_while_the_folder_is_removed(output: Path, is_there: bool) -> None:
    """The remains of another run neither get into a new one nor block it."""
    number = 0
    while ended_at(output, number) and has_run(output):
        if not is_there:
            output.unlink()
        else:
            with RunFolder(output) as folder, pytest.raises(BatchFileError, match="exists; --overwrite"):
                folder.begin(manifest(6), restart=True)
        with RunFolder(output) as folder:
            assert folder.begin(manifest(6), restart=True, replace=is_there).written == 0
        run(output, 6, replace=is_there)
        assert output.read_bytes() == whole(6)
        assert os.listdir(output.parent) == [output.name]
        output.unlink()
        number += 1
    assert number > 8


def test_an_output_that_is_lost_while_the_folder_is_removed_is_made_again(output: Path) -> None:
    number = 0
    while ended_at(output, number) and has_run(output):
        output.unlink()
        run(output, 5, attempt=1)
        assert output.read_bytes() == whole(5)
        output.unlink()
        number += 1
    assert number > 8


@pytest.mark.parametrize("precious", [b"", b"precious", whole(5)[:-1], whole(5) + b"\n"])
def test_an_output_of_others_is_kept_after_an_end_while_the_folder_is_removed(
    output: Path, precious: bytes
) -> None:
    number = 0
    while ended_at(output, number) and has_run(output):
        output.write_bytes(precious)
        with pytest.raises(BatchFileError, match="exists; --overwrite replaces it"):
            run(output, 5)
        assert output.read_bytes() == precious
        run(output, 5, replace=True)
        assert output.read_bytes() == whole(5)
        output.unlink()
        number += 1
    assert number > 8


def test_a_journal_aside_of_a_run_before_does_not_replace_a_later_one(output: Path) -> None:
    """A power cut may bring it back."""
    part_of_a_run(output, 5, range(3))
    aside_path(output).write_bytes(b"of a run before")
    run(output, 5)
    assert output.read_bytes() == whole(5)
    assert os.listdir(output.parent) == [output.name]


def test_what_is_not_of_the_run_is_left_alone(output: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("precious")
    folder_of(output).mkdir()
    (folder_of(output) / "notes.txt").write_text("mine")
    with RunFolder(output) as folder:
        journal = folder.begin(manifest(1))
        (folder.scratch / "deep" / "deeper").mkdir(parents=True)
        (folder.scratch / "deep" / "tokens").write_text("1")
        (folder.scratch / "link").symlink_to(tmp_path / "elsewhere")
        (folder.scratch / "dangling").symlink_to(tmp_path / "nowhere")
        journal.append(0, answer(0))
        folder.finish()
    assert os.listdir(folder_of(output)) == ["notes.txt"]
    assert (tmp_path / "elsewhere" / "file").read_text() == "precious"


def test_a_refused_run_leaves_nothing(output: Path) -> None:
    with RunFolder(output) as folder:
        (folder.scratch / "tokens").write_text("1 2 3")
    assert os.listdir(output.parent) == []


def test_folders_that_cannot_be(output: Path, tmp_path: Path) -> None:
    with pytest.raises(BatchFileError, match=r"cannot make .*no.*: No such file or directory"):
        RunFolder(tmp_path / "no" / "answers.jsonl")
    with pytest.raises(BatchFileError, match="File name too long"):
        RunFolder(tmp_path / ("x" * 243))
    assert os.listdir(tmp_path) == []
    folder_of(output).write_text("a file")
    with pytest.raises(BatchFileError, match="is in the way of radixrt's own folder"):
        RunFolder(output)
    folder_of(output).unlink()
    for target in (tmp_path / "nowhere", tmp_path):
        folder_of(output).symlink_to(target)
        with pytest.raises(BatchFileError, match="is in the way of radixrt's own folder"):
            RunFolder(output)
        folder_of(output).unlink()
    run(tmp_path / ("x" * 242), 3)


def test_links(tmp_path: Path) -> None:
    """To the folder of the output they are followed; in the run's folder they are refused."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    output = tmp_path / "link" / "answers.jsonl"
    part_of_a_run(output, 5, range(2))
    run(output, 5)
    assert output.read_bytes() == whole(5)


def soft(path: Path, precious: Path) -> None:
    path.symlink_to(precious)


def dangling(path: Path, precious: Path) -> None:
    path.symlink_to(precious.with_name("nowhere"))


def hard(path: Path, precious: Path) -> None:
    os.link(precious, path)


def fifo(path: Path, precious: Path) -> None:
    os.mkfifo(path)


def folder(path: Path, precious: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("put", [soft, dangling, hard, fifo, folder])
@pytest.mark.parametrize("name", ["lock", "journal", "journal.partial", "output"])
def test_what_is_not_of_the_run_is_not_written_to(
    output: Path, tmp_path: Path, name: str, put: Callable[[Path, Path], None]
) -> None:
    """It is named, at once."""
    precious = tmp_path / "precious"
    precious.write_text("precious")
    folder_of(output).mkdir()
    put(folder_of(output) / name, precious)
    with pytest.raises(
        BatchFileError, match=f"run/{name} is in the way of radixrt's own file: .*; move"
    ) as raised:
        run(output, 5)
    assert not isinstance(raised.value, JournalError)
    assert precious.read_text() == "precious"
    assert not (tmp_path / "nowhere").exists()
    assert not output.exists()


@pytest.mark.parametrize("put", [soft, dangling, hard, fifo])
@pytest.mark.parametrize("name", ["entries.jsonl", "tokens.i32", "offsets.i64"])
def test_scratch_files_that_are_not_of_the_run(
    output: Path, tmp_path: Path, name: str, put: Callable[[Path, Path], None]
) -> None:
    precious, source = tmp_path / "precious", tmp_path / "in.jsonl"
    precious.write_text("precious")
    source.write_text('{"prompt": [1, 2]}\n')
    (folder_of(output) / "scratch").mkdir(parents=True)
    put(folder_of(output) / "scratch" / name, precious)
    with pytest.raises(BatchFileError, match=f"scratch/{name} is in the way of radixrt's own file"):
        run_batch(FakeRuntime(), source, output)
    assert precious.read_text() == "precious"
    assert not (tmp_path / "nowhere").exists()


def test_a_scratch_folder_elsewhere(output: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("precious")
    folder_of(output).mkdir()
    (folder_of(output) / "scratch").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BatchFileError, match="scratch is in the way of radixrt's own folder"):
        run(output, 5)
    assert os.listdir(tmp_path / "elsewhere") == ["file"]


def test_a_compressed_output(output: Path) -> None:
    def compressed(chunks: Iterator[bytes]) -> Iterator[bytes]:
        compressor = zlib.compressobj(wbits=31)
        for chunk in chunks:
            yield compressor.compress(chunk)
        yield compressor.flush()

    part_of_a_run(output, 3000, range(3000))
    with RunFolder(output) as folder:
        folder.begin(manifest(3000))
        folder.finish(compressed)
    assert gzip.decompress(output.read_bytes()) == whole(3000)


def test_the_order_of_calls(output: Path) -> None:
    """A kill is simulated elsewhere at any call; here is why nothing can be lost: what is synced before what."""
    calls: list[str] = []

    class Listening(TaskDisk):
        def _call(self, name: str, call: Any, *args: Any) -> Any:
            result = call(*args)
            if name == "open":
                names[result] = args[0].name
            what = args[0] if isinstance(args[0], Path) else Path(names[args[0]])
            calls.append(f"{name} {what.name}" + (f" {args[1].name}" if name == "replace" else ""))
            return result

    names: dict[int, str] = {}
    run(output, 2, disk=Listening(Task("", 0, 0)))
    calls = [call for call in calls if not call.startswith(("open", "close", "mkdir", "write"))]
    parent, run_name = output.parent.name, folder_of(output).name
    assert calls == [
        "flock lock",
        "fsync tokens",
        "fsync journal.partial",
        "replace journal.partial journal",
        f"fsync {run_name}",
        f"fsync {parent}",
        "fsync journal",
        "fsync output",
        "fsync journal",
        "fsync journal",
        "replace output answers.jsonl",
        f"fsync {parent}",
        "unlink tokens",
        "rmdir scratch",
        f"replace journal {aside_path(output).name}",
        "unlink lock",
        f"rmdir {run_name}",
        f"fsync {parent}",
        f"unlink {aside_path(output).name}",
    ]


# ---- one writer


def test_a_second_writer_is_refused(output: Path) -> None:
    with RunFolder(output) as folder:
        journal = folder.begin(manifest(3))
        journal.append(0, answer(0))
        with pytest.raises(BatchFileError) as raised:
            RunFolder(output)
        assert f"another process writes to {folder.path}: process {os.getpid()} on " in str(raised.value)
        assert "wait until it has ended" in str(raised.value)
        journal.append(1, answer(1))
    part_of_a_run(output, 3, range(2, 3))
    run(output, 3)
    assert output.read_bytes() == whole(3)


HOLDER = """
import os, sys, time
from pathlib import Path
from radixrt.batch.journal.run_folder import RunFolder, aside_path, has_run
from tests.support.simulated_batch import answer, manifest

with RunFolder(Path(sys.argv[1])) as folder:
    journal = folder.begin(manifest(3))
    journal.append(0, answer(0))
    if sys.argv[2] == "fork" and os.fork() == 0:
        time.sleep(60)
    print(os.getpid(), flush=True)
    time.sleep(60)
"""


@contextmanager
def holder(output: Path, how: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds the lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(output), how],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(HOME)},
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert int(process.stdout.readline()) == process.pid
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()  # until its child has ended, too


def test_a_killed_holder_lets_the_lock_go(output: Path) -> None:
    with holder(output, "alone") as process:
        with pytest.raises(BatchFileError, match=f"another process writes to .*: process {process.pid} on "):
            RunFolder(output)
        process.kill()
        process.wait()
        with RunFolder(output) as folder:
            assert folder.begin(manifest(3)).written == 1


def test_a_child_that_is_left_behind_is_named(output: Path) -> None:
    with holder(output, "fork") as process:
        process.kill()
        process.wait()
        with pytest.raises(
            BatchFileError, match=f"process {process.pid} is named there but has ended, so it is one"
        ):
            RunFolder(output)
    with RunFolder(output) as folder:
        assert folder.begin(manifest(3)).written == 1


@pytest.mark.parametrize(
    ("holder", "message"),
    [
        (b"", "it has not said which"),
        (b"\xff", "it has not said which"),
        (b"[]", "it has not said which"),
        (b'{"pid": "x", "host": "a"}', "it has not said which"),
        (b'{"pid": 1, "host": "elsewhere"}', "process 1 on elsewhere"),
        (b'{"pid": 99999999999999999999, "host": "%s"}' % os.uname().nodename.encode(), "has ended"),
        (b'{"pid": 1, "host": "%s"}' % os.uname().nodename.encode(), "process 1 on "),
    ],
)
def test_whatever_the_lock_says(output: Path, holder: bytes, message: str) -> None:
    with RunFolder(output):
        (folder_of(output) / "lock").write_bytes(holder)
        with pytest.raises(BatchFileError, match=message):
            RunFolder(output)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EIO])
def test_a_file_system_without_locks(output: Path, number: int) -> None:
    class Lockless(Disk):
        def flock(self, fd: int) -> None:
            raise OSError(number, os.strerror(number))

    has_none = "has no locks .*put the output on another one" if number != errno.EIO else "cannot make"
    before = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    with pytest.raises(BatchFileError, match=has_none):
        RunFolder(output, disk=Lockless())
    assert not before or len(os.listdir("/proc/self/fd")) == before


def test_a_folder_that_is_removed_while_its_lock_is_taken(output: Path) -> None:
    """By its last holder, who has finished: the next one makes a folder of its own."""

    class Slow(Disk):
        removals = 3

        def flock(self, fd: int) -> None:
            if self.removals:
                self.removals -= 1
                if self.removals == 0:
                    (folder_of(output) / "lock").unlink()  # removed, and made again by yet another process
                    (folder_of(output) / "lock").touch()
                else:
                    shutil.rmtree(folder_of(output))
            super().flock(fd)

        def mkdir(self, path: Path) -> None:
            super().mkdir(path)
            if path == folder_of(output) and self.removals == 3:
                path.rmdir()
                self.removals -= 1

    with RunFolder(output, disk=Slow()) as folder:
        with pytest.raises(BatchFileError, match="another process writes"):
            RunFolder(output)  # the lock is that of the file which others find
        folder.begin(manifest(1)).append(0, answer(0))
        folder.finish()
    assert os.listdir(output.parent) == [output.name]


# ---- processes that are killed


class Attempts:
    """A process that runs tasks, and what the journals of one output held."""

    def __init__(self, output: Path, num_records: int) -> None:
        self.output = output
        self.num_records = num_records
        self.attempt = 0
        self.kept: dict[int, bytes] = {}
        self.process = subprocess.Popen(
            [sys.executable, simulated_batch.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=ENVIRONMENT,
        )

    def __enter__(self) -> Attempts:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()

    def begin(self, output: Path) -> None:
        self.output, self.kept = output, {}

    def run(self, **options: Any) -> int:
        """Start one attempt; its exit status. Whatever was in the journal is there afterwards, byte for byte."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.attempt += 1
        task = Task(str(self.output), self.num_records, self.attempt, **options)
        self.process.stdin.write(json.dumps(asdict(task)).encode() + b"\n")
        self.process.stdin.flush()
        status = int(self.process.stdout.readline())
        found = self.records()
        if found is not None:
            assert {p: r for p, r in found.items() if p in self.kept} == self.kept
            assert all(
                json.loads(record)["attempt"] == self.attempt for p, record in found.items() if p not in self.kept
            )
            self.kept = found
        return status

    def records(self) -> dict[int, bytes] | None:
        """What the journal, or in its absence the output, holds; read by other code than radixrt's."""
        journal = self.output.with_name(self.output.name + ".run") / "journal"
        if not journal.exists():
            journal = aside_path(self.output)
        if not journal.exists():
            if not self.output.exists():
                return None
            return {json.loads(line)["index"]: line + b"\n" for line in self.output.read_bytes().split(b"\n")[:-1]}
        found: dict[int, bytes] = {}
        lines = journal.read_bytes().split(b"\n")
        for number, line in enumerate(lines[1:], 1):
            crc, _, rest = line.partition(b"\t")
            kind, _, record = rest.partition(b"\t")
            if len(crc) != 8 or int(crc, 16) != zlib.crc32(rest) or number == len(lines) - 1:
                assert number == len(lines) - 1, "only the tail can be torn"
            elif kind.isdigit():
                assert int(kind) not in found, "a record is there twice"
                found[int(kind)] = record + b"\n"
        return found

    def has_ended(self) -> bool:
        return os.listdir(self.output.parent) == [self.output.name]

    def check_end(self, **options: Any) -> None:
        """After a last attempt the output has each record once, as it was journalled."""
        had_ended = self.has_ended()  # it was killed when all had been done
        assert self.run(**options) == (UNUSABLE if had_ended else DONE)
        assert self.has_ended()
        lines = self.output.read_bytes().split(b"\n")
        assert lines.pop() == b""
        assert [json.loads(line)["index"] for line in lines] == list(range(self.num_records))
        assert b"".join(line + b"\n" for line in lines) == b"".join(self.kept[p] for p in range(self.num_records))
        assert [answer(p, json.loads(line)["attempt"]) for p, line in enumerate(lines)] == [
            x + b"\n" for x in lines
        ]


@pytest.mark.parametrize("kills", [20, pytest.param(200, marks=pytest.mark.long)])
def test_killed_at_random_points(tmp_path: Path, kills: int) -> None:
    rng = random.Random(0)
    phases = {"before the journal": 0, "with the journal": 0, "with the output": 0, "at the end": 0}
    left, finished = kills, 0
    with Attempts(tmp_path, 40) as attempts:
        (tmp_path / "whole").mkdir()
        attempts.begin(tmp_path / "whole" / "answers.jsonl")
        began = time.perf_counter()
        attempts.check_end(pause=0.001)
        seconds = time.perf_counter() - began
        while left or not finished:
            folder = tmp_path / str(finished)
            folder.mkdir()
            attempts.begin(folder / "answers.jsonl")
            while left and not attempts.has_ended():
                left -= 1
                status = attempts.run(kill_after=rng.random() * seconds / 4, pause=0.001)
                assert status in (DONE, -signal.SIGKILL)
                run_folder = folder / "answers.jsonl.run"
                if status == DONE:
                    left += 1  # no kill
                elif attempts.has_ended():
                    phases["at the end"] += 1
                elif (run_folder / "output").exists():
                    phases["with the output"] += 1
                elif (run_folder / "journal").exists():
                    phases["with the journal"] += 1
                else:
                    phases["before the journal"] += 1
            attempts.check_end()
            finished += 1
    print(f"\n{kills} kills in {finished} runs: {phases}")
    assert phases["with the journal"] > kills / 5
    if kills >= 200:
        assert all(phases.values()), phases


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.long)])
def test_killed_at_every_call(tmp_path: Path, step: int) -> None:
    """Real processes, real kills: at every call that changes something, of a run and of one that goes on."""
    at, ended = 0, False
    with Attempts(tmp_path, 10) as attempts:
        while not ended:
            for when in ("before", "middle", "after"):
                folder = tmp_path / f"{at} {when}"
                folder.mkdir()
                attempts.begin(folder / "answers.jsonl")
                status = attempts.run(kill_at=at, kill_when=when)
                ended = status == DONE
                if not ended:
                    assert status == -signal.SIGKILL
                    attempts.run(kill_at=at // 2, kill_when=when)
                attempts.check_end()
                shutil.rmtree(folder)
            at += step
    assert at > 50


# ---- disks that are full


def attempt(
    output: Path, num_records: int, number: int, limit: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the batch in a process of its own, which may write files of `limit` bytes."""
    code = (
        "import sys; import tests.support.simulated_batch as s; from pathlib import Path; "
        f"sys.exit(s.run_task(s.Task({str(output)!r}, {num_records}, {number})))"
    )

    def restrict() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=restrict,
        env={**os.environ, "PYTHONPATH": str(HOME)},
        check=False,
    )


def test_a_limit_on_the_size_of_files(output: Path) -> None:
    done = attempt(output, 500, 0, limit=20_000)
    assert done.returncode == RESUMABLE
    assert done.stderr.startswith(f"cannot use {folder_of(output)}/journal: File too large; ")
    assert "raise the limit on the size of files (ulimit -f), then run the same command again" in done.stderr
    assert (folder_of(output) / "journal").stat().st_size == 20_000
    assert not output.exists()
    done = attempt(output, 500, 1, limit=20_000)  # no better, and no worse
    assert done.returncode == RESUMABLE
    done = attempt(output, 500, 2)
    assert (done.returncode, done.stderr) == (DONE, "")
    attempts = [json.loads(line)["attempt"] for line in output.read_bytes().split(b"\n")[:-1]]
    assert len(attempts) == 500
    assert 50 < attempts.count(0) < 300
    assert attempts.count(1) <= 1
    assert os.listdir(output.parent) == [output.name]


def test_a_limit_that_the_output_exceeds(output: Path) -> None:
    """The journal fits because it was written without the limit."""
    part_of_a_run(output, 500, range(500))
    done = attempt(output, 500, 0, limit=20_000)
    assert done.returncode == RESUMABLE
    assert "File too large" in done.stderr
    assert not output.exists()
    assert attempt(output, 500, 0).returncode == DONE
    assert output.read_bytes() == whole(500)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 128 KiB."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(folder)]
    if not sys.platform.startswith("linux") or not shutil.which("mount"):
        pytest.skip("there is no tmpfs to mount")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(tiny_disk: Path) -> None:
    output = tiny_disk / "answers.jsonl"
    ballast = tiny_disk / "ballast"
    ballast.write_bytes(bytes(64 * 1024))
    done = attempt(output, 300, 0)
    assert done.returncode == RESUMABLE
    assert "No space left on device; make room, then run the same command again" in done.stderr
    done = attempt(output, 300, 1)  # the disk is still full
    assert done.returncode == RESUMABLE
    ballast.unlink()
    done = attempt(output, 300, 2)
    assert (done.returncode, done.stderr) == (DONE, "")
    attempts = [json.loads(line)["attempt"] for line in output.read_bytes().split(b"\n")[:-1]]
    assert len(attempts) == 300
    assert attempts.count(0) > 50
    assert os.listdir(tiny_disk) == [output.name]


# ---- size


MILLION = """
import os, sys, time
from pathlib import Path
import numpy as np
from radixrt.batch.journal.manifest import Manifest
from radixrt.batch.journal.run_folder import RunFolder, aside_path, has_run

output, num_records = Path(sys.argv[1]), int(sys.argv[2])
manifest = Manifest(num_records, {}, {}, {}, {})
text = b'{"index": %d, "text": "' + b"x" * 960 + b'"}\\n'

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))

order = np.random.default_rng(0).permutation(num_records).tolist()
begun = peak()
times = [time.perf_counter()]
with RunFolder(output) as folder:
    journal = folder.begin(manifest)
    for position in order:
        journal.append(position, text % position)
times.append(time.perf_counter())
with RunFolder(output) as folder:
    journal = folder.begin(manifest)
    times.append(time.perf_counter())
    assert journal.finished.all()
    folder.finish()
times.append(time.perf_counter())
append, opened, finished = np.diff(times)
memory = peak() - begun
print(f"{num_records:,} records of {len(text) + 3} bytes: {append / num_records * 1e6:.1f} us a record to append, "
      f"{opened:.2f} s to open, {finished:.2f} s to finish, {memory:.0f} MiB more memory at most")
with open(output, "rb") as file:
    assert all(line == text % position for position, line in enumerate(file))
print(memory)
"""


@pytest.mark.parametrize("num_records", [20_000, pytest.param(1_000_000, marks=pytest.mark.long)])
def test_many_records(output: Path, num_records: int) -> None:
    """`pytest -s -m long tests/batch/journal/test_run_folder.py -k many_records` prints the figures."""
    if not os.path.exists("/proc/self/status"):
        pytest.skip("the system does not say how much memory a process has had")
    done = subprocess.run(
        [sys.executable, "-c", MILLION, str(output), str(num_records)],
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr
    report, memory = done.stdout.splitlines()
    print(f"\n{report}")
    assert float(memory) < 400
