"""The journal of a batch on a simulated disk: what is found in it after faults, kills, power cuts and damage."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import re
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from radixrt.batch.journal import journal as journal_module
from radixrt.batch.journal.journal import Journal, Recovery, create_journal
from radixrt.errors import BatchFileError, JournalError
from radixrt.files.disk import Disk
from tests.support.simulated_batch import Witness, answer, manifest, run
from tests.support.simulated_disk import Killed, Machine, Nth, Process, no_fault

OUTPUT = Path("/answers.jsonl")
ALONE = Path("/journal")  # of tests without a folder


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sync every few records, and an output made in several blocks."""
    monkeypatch.setattr(journal_module, "SYNC_RECORDS", 4)
    monkeypatch.setattr(journal_module, "SYNC_SECONDS", 1e9)
    monkeypatch.setattr(journal_module, "ORDERED_BYTES", 500)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def no_space() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def failed() -> OSError:
    return OSError(errno.EIO, "Input/output error")


def new_journal(num_records: int, disk: Disk | None = None, clock: Callable[[], float] = Clock()) -> Journal:  # noqa: B008
    disk = Process(Machine()) if disk is None else disk
    create_journal(ALONE, manifest(num_records), disk)
    return Journal(ALONE, manifest(num_records), disk, clock)


def reopened(machine: Machine, num_records: int) -> Journal:
    return with_what_was_found(num_records, Process(machine), Clock())


def with_what_was_found(num_records: int, process: Process, clock: Clock) -> Journal:
    """The journal, which has told of each of its records once."""
    told: list[bytes] = []
    journal = Journal(ALONE, manifest(num_records), process, clock, told.append)
    assert sorted(told) == sorted(journal.records())
    return journal


def contents(journal: Journal) -> dict[int, bytes]:
    """Its records by position."""
    return dict(zip(np.flatnonzero(journal.finished).tolist(), journal.records(), strict=True))


def data_of(machine: Machine) -> bytes:
    return machine.files()[str(ALONE)]


def set_data(machine: Machine, data: bytes) -> None:
    """The lines of the journal, in memory and on the disk."""
    node = machine.find(ALONE)
    node.data = node.on_disk = data
    node.lost = []


def lines_of(data: bytes) -> list[tuple[int, str, bytes]]:
    """An independent reader of the documented format: the end of each line, its kind and its rest."""
    found = []
    end = 0
    for number, line in enumerate(data.split(b"\n")[:-1]):
        end += len(line) + 1
        if number == 0:
            name, crc, text = line.split(b"\t", 2)
            assert name == b"radixrt-journal 1"
            assert int(crc, 16) == zlib.crc32(text)
            found.append((end, "header", text))
            continue
        crc, rest = line.split(b"\t", 1)
        assert re.fullmatch(b"[0-9a-f]{8}", crc)
        assert int(crc, 16) == zlib.crc32(rest)
        kind, rest = rest.split(b"\t", 1)
        found.append((end, kind.decode(), rest))
    return found


# ---- its content


def test_the_format() -> None:
    machine = Machine()
    journal = new_journal(8, Process(machine))
    for position in (3, 0, 7, 6, 1):
        journal.append(position, answer(position))
    lines = lines_of(data_of(machine))
    assert [kind for _, kind, _ in lines] == ["header", "3", "0", "7", "6", "synced", "1"]
    assert lines[0][2] == manifest(8).to_json()
    assert lines[1][2] + b"\n" == answer(3)
    journal.close()
    assert [kind for _, kind, _ in lines_of(data_of(machine))[-2:]] == ["1", "synced"]
    journal = reopened(machine, 8)
    for position in (2, 4, 5):
        journal.append(position, answer(position))
    journal.mark_finished()
    journal.mark_finished()
    assert [kind for _, kind, _ in lines_of(data_of(machine))[-3:]] == ["5", "synced", "finished"]
    assert data_of(machine).startswith(b"radixrt-journal 1\t")


def test_other_programs_can_make_the_output(tmp_path: Path) -> None:
    """The command of the module's documentation."""
    documentation = journal_module.create_journal.__globals__["parse_line"].__globals__["__doc__"]
    command = next(line.strip() for line in documentation.splitlines() if line.strip().startswith("awk"))
    if not all(map(shutil.which, ("awk", "sort", "cut", "sh"))):
        pytest.skip("there is no awk, sort or cut")
    machine = Machine()
    journal = new_journal(20, Process(machine))
    for position in random.Random(0).sample(range(20), 20):
        journal.append(position, answer(position))
    journal.mark_finished()
    (tmp_path / "journal").write_bytes(data_of(machine))
    done = subprocess.run(
        ["sh", "-c", command], cwd=tmp_path, capture_output=True, check=True, env={**os.environ, "LC_ALL": "C"}
    )
    assert done.stdout == b"".join(map(answer, range(20)))


@pytest.mark.parametrize(
    ("position", "line", "message"),
    [
        (-1, b"a\n", "no position -1 in a run of 4 records"),
        (4, b"a\n", "no position 4"),
        (1, b"a\n", "position 1 has a record"),
        (2, b"", "not one line"),
        (2, b"a", "not one line"),
        (2, b"a\nb\n", "not one line"),
        (2, b"a\n\n", "not one line"),
        (2, b"\na", "not one line"),
    ],
)
def test_what_cannot_be_appended(position: int, line: bytes, message: str) -> None:
    machine = Machine()
    journal = new_journal(4, Process(machine))
    journal.append(1, b"b\n")
    before = data_of(machine)
    with pytest.raises(ValueError, match=message):
        journal.append(position, line)
    assert data_of(machine) == before
    journal.append(2, b"\n")  # it goes on
    assert contents(journal) == {1: b"b\n", 2: b"\n"}


def test_an_empty_run() -> None:
    machine = Machine()
    run(OUTPUT, 0, disk=Process(machine))
    assert machine.files() == {str(OUTPUT): b""}


def test_records_larger_than_what_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixrt.batch.journal.journal_format.BLOCK_BYTES", 7)
    machine = Machine()
    journal = new_journal(5, Process(machine, most=11))
    lines = {2: b"x" * 3000 + b"\n", 0: b"\n", 4: b"y" * 499 + b"\n", 1: b"z\n"}
    for position, line in lines.items():
        journal.append(position, line)
    journal.close()
    journal = reopened(machine, 5)
    assert contents(journal) == dict(sorted(lines.items()))
    assert journal.finished.tolist() == [True, True, True, False, True]
    assert list(contents(journal)) == [0, 1, 2, 4]


@given(st.permutations(range(12)), st.lists(st.integers(1, 300), min_size=12, max_size=12), st.integers(1, 1500))
def test_records_come_by_position(order: list[int], lengths: list[int], at_once: int) -> None:
    journal = new_journal(12)
    lines = [bytes([97 + p]) * lengths[p] + b"\n" for p in range(12)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal_module, "ORDERED_BYTES", at_once)
        for count, position in enumerate(order):
            assert list(journal.records()) == [lines[p] for p in sorted(order[:count])]
            journal.append(position, lines[position])
        assert list(journal.records()) == lines


def test_blocks_are_no_larger_than_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines of a block are read in the order of the file."""
    disk = Process(Machine())
    journal = new_journal(40, disk)
    order = random.Random(0).sample(range(40), 40)
    for position in order:
        journal.append(position, b"x" * 82 + b"\n")  # 94 or 95 bytes with checksum and position
    offsets: list[int] = []
    pread_all = disk.pread_all

    def watched(fd: int, count: int, offset: int) -> bytes:
        offsets.append(offset)
        return pread_all(fd, count, offset)

    monkeypatch.setattr(disk, "pread_all", watched)
    assert len(list(journal.records())) == 40
    places = [sorted(offsets).index(offset) for offset in offsets]
    blocks = [sorted(order.index(position) for position in range(first, first + 5)) for first in range(0, 40, 5)]
    assert places == [place for block in blocks for place in block]


# ---- when it is synced


def test_syncs_come_by_count_and_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "SYNC_SECONDS", 2.0)
    clock, disk = Clock(), Process(Machine())
    journal = new_journal(20, disk, clock)

    def counts() -> tuple[int, int]:
        return journal.written, journal.durable

    begun = disk.calls["fsync"]
    for position in range(3):
        journal.append(position, answer(position))
    assert counts() == (3, 0)
    journal.append(3, answer(3))
    assert counts() == (4, 4)
    assert disk.calls["fsync"] - begun == 1
    clock.now += 5.0
    journal.append(4, answer(4))  # its time begins now
    assert counts() == (5, 4)
    clock.now += 1.5
    journal.append(5, answer(5))
    journal.sync_if_due()
    assert counts() == (6, 4)
    clock.now += 0.5
    journal.sync_if_due()
    assert counts() == (6, 6)
    journal.append(6, answer(6))
    clock.now += 2.0
    journal.append(7, answer(7))
    assert counts() == (8, 8)
    clock.now += 100.0
    journal.sync_if_due()
    journal.sync()
    assert disk.calls["fsync"] - begun == 3  # none where there is nothing to sync
    journal.append(8, answer(8))
    journal.close()
    journal.close()
    assert disk.calls["fsync"] - begun == 4
    assert disk.open_files == 0


def test_defaults() -> None:
    """As promised in docs/architecture/durability.md; the fixture has changed them here."""
    code = "from radixrt.batch.journal import journal; print(journal.SYNC_RECORDS, journal.SYNC_SECONDS)"
    home = Path(journal_module.__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": str(home)}
    )
    assert done.stdout.split() == ["256", "2.0"]


@pytest.mark.parametrize("change", ["append", "truncate", "remove"])
def test_another_writer_is_noticed(change: str) -> None:
    """Where locks are none, or somebody tidies up."""
    machine = Machine()
    journal = new_journal(20, Process(machine))
    journal.append(0, answer(0))
    journal.sync()
    other = Process(machine)
    if change == "remove":
        other.unlink(ALONE)
    else:
        fd = other.open(ALONE, os.O_WRONLY | os.O_APPEND)
        other.write(fd, b"x") if change == "append" else other.truncate(fd, 10)
    journal.append(1, answer(1))
    what = "something has removed it" if change == "remove" else "something has changed it"
    with pytest.raises(JournalError, match=what):
        journal.sync()
    assert journal.durable == 1
    with pytest.raises(JournalError, match=what):
        journal.append(2, answer(2))


# ---- tails and damage


def synced_and_not() -> bytes:
    """The journal of a run of 9 records: 4 that were synced and 3 that were not."""
    machine = Machine()
    journal = new_journal(9, Process(machine))
    for position in (5, 2, 8, 0, 7, 1, 6):
        journal.append(position, answer(position))
    return data_of(machine)


def positions_in(data: bytes) -> list[int]:
    return [int(kind) for _, kind, _ in lines_of(data) if kind.isdigit()]


def goes_on(machine: Machine, found: list[int]) -> None:
    """Opened again, the journal has these records, and takes the rest."""
    journal = reopened(machine, 9)
    assert contents(journal) == {position: answer(position) for position in sorted(found)}
    assert (journal.written, journal.durable) == (len(found), len(found))
    for position in set(range(9)) - set(found):
        journal.append(position, answer(position, 1))
    journal.close()
    assert sorted(positions_in(data_of(machine))) == list(range(9))  # its own reader finds nothing wrong either
    journal = reopened(machine, 9)
    assert journal.recovery == Recovery(9, 0, 0)
    assert contents(journal) == {p: answer(p, int(p not in found)) for p in range(9)}


def test_a_tail_torn_anywhere_is_cut() -> None:
    data = synced_and_not()
    ends = [end for end, _, _ in lines_of(data)]
    for length in range(ends[0], len(data) + 1):
        machine = Machine()
        new_journal(9, Process(machine))
        set_data(machine, data[:length])
        kept = max(end for end in ends if end <= length)
        found = positions_in(data[:kept])
        journal = reopened(machine, 9)
        assert journal.recovery == Recovery(len(found), length - kept, 0)
        assert data_of(machine)[:kept] == data[:kept]
        if length % 5 == 0 or length in ends:
            goes_on(machine, found)


def test_what_was_found_counts_as_durable() -> None:
    """So it is marked, and damage to it is never taken for a torn tail. First of all, what was cut is gone."""
    data = synced_and_not()
    machine = Machine()
    new_journal(9, Process(machine))
    set_data(machine, data + b"torn")
    calls: list[str] = []
    process = Process(machine, late_fault=lambda kind, number: calls.append(kind))
    journal = Journal(ALONE, manifest(9), process)
    assert journal.durable == 7
    assert [call for call in calls if call != "pread"] == (
        ["open", "fstat", "fsync", "drop_cache", "fstat", "truncate", "fsync", "write"]
    )
    marked = data_of(machine)
    assert marked[: len(data)] == data
    assert [kind for _, kind, _ in lines_of(marked)][-2:] == ["6", "synced"]
    process.kill()
    reopened(machine, 9).close()
    assert data_of(machine) == marked  # once is enough
    set_data(machine, damaged := marked.replace(b'"index": 6', b'"index": 5'))
    with pytest.raises(BatchFileError, match="is damaged now, in line 9: "):
        reopened(machine, 9)
    assert data_of(machine) == damaged


def test_a_journal_without_its_first_line_is_refused() -> None:
    data = synced_and_not()
    header = lines_of(data)[0][0]
    for kept in [*(data[:length] for length in range(header)), data[header:], data[1:]]:
        machine = Machine()
        new_journal(9, Process(machine))
        set_data(machine, kept)
        with pytest.raises(
            BatchFileError, match=r"is no journal, or damaged in its first line .* remove the folder"
        ):
            reopened(machine, 9)
        assert data_of(machine) == kept


BYTE_CHANGES: dict[str, Callable[[int], int]] = {
    "low bit": lambda byte: byte ^ 1,
    "high bit": lambda byte: byte ^ 0x80,
    "end of line": lambda byte: 10,
    "zero": lambda byte: 0,
}


@pytest.mark.long_unless(kept=lambda given: (given["change"] == "low bit") == (given["step"] == 1))
@pytest.mark.parametrize("step", [1, 7])
@pytest.mark.parametrize("change", BYTE_CHANGES)
def test_a_changed_byte_is_found_wherever_it_is(change: str, step: int) -> None:
    """Before the last `synced` it is damage, which is refused; after it, the journal is cut there."""
    data = synced_and_not()
    lines = lines_of(data)
    last_synced = next(lines[n - 1][0] for n, (_, kind, _) in enumerate(lines) if kind == "synced")  # begins there
    for place in range(0, len(data), step):
        changed = data[:place] + bytes([BYTE_CHANGES[change](data[place])]) + data[place + 1 :]
        if changed == data:
            continue
        machine = Machine()
        new_journal(9, Process(machine))
        set_data(machine, changed)
        number = next(n for n, (end, _, _) in enumerate(lines, 1) if place < end)
        if place < last_synced - 1:
            with pytest.raises(BatchFileError) as raised:
                reopened(machine, 9)
            if number == 1:
                assert re.search("in its first line|is of format [0-9]+,", str(raised.value))
            else:
                assert f"damaged now, in line {number}" in str(raised.value)
                assert f"sed -i '{number}d" in str(raised.value)
            assert data_of(machine) == changed
        else:
            # If the last `synced` itself is damaged, nothing says that the lines before it were durable.
            found = positions_in(data[: lines[number - 2][0]])
            assert reopened(machine, 9).recovery.records == len(found)
            goes_on(machine, found)


def test_the_remedy_for_damage_works(tmp_path: Path) -> None:
    """On a real file, with the command of the message."""
    if not shutil.which("sed") or not sys.platform.startswith("linux"):
        pytest.skip("the command is GNU sed's")
    disk, path = Disk(), tmp_path / "its journal"
    create_journal(path, manifest(30), disk)
    journal = Journal(path, manifest(30), disk)
    for position in range(30):
        journal.append(position, answer(position))
    journal.mark_finished()
    journal.close()
    data = path.read_bytes()
    lines = lines_of(data)
    damaged = [
        number for number, (_, kind, _) in enumerate(lines) if kind in {"3", "4", "9", "20", "21", "22", "28"}
    ]
    for number in damaged:
        place = lines[number][0] - 20
        data = data[:place] + b"\0\xff" + data[place + 2 :]
    path.write_bytes(data)
    for rest in (damaged, damaged[5:]):
        with pytest.raises(BatchFileError) as raised:
            Journal(path, manifest(30), disk)
        assert ("and 2 more" in str(raised.value)) == (len(rest) == 7)
        command = re.search(r"delete what is damaged \((.*?)\) and", str(raised.value))
        assert command is not None
        subprocess.run(["sh", "-c", command[1]], check=True)
    journal = Journal(path, manifest(30), disk)
    assert np.flatnonzero(~journal.finished).tolist() == [3, 4, 9, 20, 21, 22, 28]
    for position in np.flatnonzero(~journal.finished).tolist():
        journal.append(position, answer(position))
    assert list(journal.records()) == [answer(position) for position in range(30)]
    journal.close()


@pytest.mark.parametrize(
    "garbage",
    [
        b"\n",
        b"\n\n\n",
        b"x",
        b"\0" * 5000,
        random.Random(0).randbytes(5000),
        b"00000000\t3\tabc\n",
        b"%08x\t9\tabc\n" % zlib.crc32(b"9\tabc"),  # of a larger run
        b"%08x\t03\tabc\n" % zlib.crc32(b"03\tabc"),
        b"%08x\t 3\tabc\n" % zlib.crc32(b" 3\tabc"),
        b"%08X\t3\t%s\n" % (zlib.crc32(b"3\tz"), b"z"),
        b"%08x\tother\tabc\n" % zlib.crc32(b"other\tabc"),
        b"%08x\t3\n" % zlib.crc32(b"3"),
        b"%08x\t3\tabc" % zlib.crc32(b"3\tabc"),
        b"garbage\n" + b"%08x\t3\tabc\n" % zlib.crc32(b"3\tabc"),  # good, but never synced
    ],
)
def test_what_was_never_synced_is_cut(garbage: bytes) -> None:
    data = synced_and_not()
    found = positions_in(data)
    machine = Machine()
    new_journal(9, Process(machine))
    set_data(machine, data + garbage)
    assert reopened(machine, 9).recovery == Recovery(len(found), len(garbage), 0)
    goes_on(machine, found)


def test_the_first_of_two_records_counts() -> None:
    data = synced_and_not()
    twice = [
        b"%08x\t%s" % (zlib.crc32(line[:-1]), line) for line in (b"2\tanother\n", b"8\t\n", b"4\tx\n", b"4\ty\n")
    ]
    machine = Machine()
    new_journal(9, Process(machine))
    set_data(machine, data + b"".join(twice))
    journal = reopened(machine, 9)
    assert journal.recovery == Recovery(8, 0, 3)
    assert contents(journal) == {**{p: answer(p) for p in (0, 1, 2, 5, 6, 7, 8)}, 4: b"x\n"}
    journal.append(3, b"z\n")
    journal.mark_finished()
    assert len(list(journal.records())) == 9


def test_another_format_is_refused() -> None:
    data = synced_and_not()
    for version in (b"0", b"2", b"17"):
        machine = Machine()
        new_journal(9, Process(machine))
        rest = b"whatever that format has\n" if version == b"17" else data.partition(b"\t")[2]
        set_data(machine, changed := b"radixrt-journal " + version + b"\t" + rest)
        message = f"is of format {version.decode()}, and this radixrt reads 1: finish the run with the version"
        with pytest.raises(BatchFileError, match=message):
            reopened(machine, 9)
        assert data_of(machine) == changed


@pytest.mark.parametrize(
    "text", [b"[]", b"{}", b"7", b'{"num_records": -1}', b"{", b'{"a": 1}', b"\xff", b"[" * 99999]
)
def test_a_first_line_that_no_version_wrote(text: bytes) -> None:
    machine = Machine()
    new_journal(9, Process(machine))
    set_data(machine, b"radixrt-journal 1\t%08x\t%s\n" % (zlib.crc32(text), text))
    with pytest.raises(BatchFileError, match="is no journal, or damaged in its first line"):
        reopened(machine, 9)


def test_a_journal_that_was_closed_or_failed_can_be_read_no_more() -> None:
    journal = new_journal(2)
    journal.append(0, answer(0))
    journal.close()
    for call in (lambda: list(journal.records()), journal.sync, lambda: journal.append(1, answer(1))):
        with pytest.raises(JournalError, match="it is closed"):
            call()


def test_a_record_that_reads_differently_ends_the_run() -> None:
    machine = Machine()
    journal = new_journal(7, Process(machine))
    for position in range(6):
        journal.append(position, answer(position))
    node = machine.find(ALONE)
    node.data = node.data.replace(b'"index": 3', b'"index": 4')
    with pytest.raises(JournalError, match="the record of position 3 is not what was written"):
        list(journal.records())
    with pytest.raises(JournalError):
        journal.append(6, b"x\n")


# ---- faults: every call of every kind fails once


CHANGES = ("open", "close", "write", "fsync", "truncate", "replace", "unlink", "mkdir", "rmdir", "flock")
KINDS = (*CHANGES, "pread", "fstat", "lstat", "list", "drop_cache")


def finish(machine: Machine, num_records: int, witness: Witness) -> bool:
    """Run the batch to its end without faults: what has to be there is, and the output is whole.

    Returns:
        whether there was something to do. If nothing is left but the output, it is refused as any other.
    """
    before = machine.files()
    has_ended = before.keys() == {str(OUTPUT)} and not machine.folders()
    if has_ended:
        with pytest.raises(BatchFileError, match="exists; --overwrite replaces it"):
            run(OUTPUT, num_records, disk=Process(machine))
        assert before[str(OUTPUT)] == witness.output()
    else:
        run(OUTPUT, num_records, disk=Process(machine), attempt=9, witness=witness)
    assert len(witness.records) == num_records
    assert machine.files() == {str(OUTPUT): witness.output()}
    assert machine.folders() == set()
    return not has_ended


def half_run(num_records: int) -> tuple[Machine, Witness]:
    """A machine where half of the records were written when the process was killed, in the middle of one."""
    machine, witness = Machine(), Witness()
    process = Process(machine)
    written = 0

    def stop() -> None:
        nonlocal written
        written += 1
        if written > num_records // 2:
            process.kill_at = process.calls["all"], "middle"

    with pytest.raises(Killed):
        run(OUTPUT, num_records, disk=process, witness=witness, pause=stop)
    return machine, witness


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("how", ["instead", "after", "from then on", "in parts"])
def test_every_call_fails_once(kind: str, resumed: bool, how: str) -> None:
    """An error says what to do. Then the run goes on to its output, and what was counted is there."""
    num_records, number = 10, 0
    while True:
        machine, witness = half_run(num_records) if resumed else (Machine(), Witness())
        fault = Nth(kind, number, no_space if kind == "write" else failed, on=how == "from then on")
        process = Process(machine, most=40 if how == "in parts" else 2**31)
        if how == "after":
            process.late_fault = fault
        else:
            process.fault = fault
        try:
            run(OUTPUT, num_records, disk=process, attempt=1, witness=witness)
            error = ""
        except BatchFileError as raised:
            error = str(raised)
            assert isinstance(raised, JournalError)  # noqa: PT017
        if process.calls[kind] <= number:
            break
        if fault.raised:
            said = (
                "No space left on device; make room" if kind == "write" else "Input/output error; see to the disk"
            )
            assert f"{said}, then run the same command again" in error
        assert process.open_files == (kind == "open" and how == "after")  # nobody knows of that one
        process.kill()
        if number % 2 or kind == "fsync":
            machine.cut_power(random.Random(number), loss=1.0 if number % 4 == 1 else 0.5)
            witness.power_cut()
        else:
            witness.killed()
        finish(machine, num_records, witness)
        number += 1
    assert number >= (resumed if kind == "truncate" else 1)


def test_a_failed_fsync_is_believed() -> None:
    """Nothing is tried again, what was not durable before is not counted, and what is read afterwards is from the
    disk, not from the memory that the fsync could not write.
    """
    machine = Machine()
    process = Process(machine)
    journal = new_journal(20, process)
    for position in range(4):
        journal.append(position, answer(position))
    assert journal.durable == 4
    process.fault = Nth("fsync", process.calls["fsync"], failed)
    journal.append(4, answer(4))
    message = (
        r"cannot use /journal: Input/output error; see to the disk, then run the same command again "
        r"\(4 of 20 records are on the disk\)"
    )
    with pytest.raises(JournalError, match=message):
        journal.sync()
    calls = process.calls["all"]
    for call in (journal.sync, lambda: journal.append(5, answer(5)), lambda: list(journal.records())):
        with pytest.raises(JournalError, match="Input/output error"):
            call()
    assert process.calls["all"] == calls
    journal.close()
    assert process.calls["all"] == calls + 1  # the file is closed, no more
    assert (journal.written, journal.durable) == (5, 4)
    assert contents(reopened(machine, 20)) == {position: answer(position) for position in range(4)}


def test_a_disk_that_takes_nothing_is_no_endless_loop() -> None:
    process = Process(Machine())
    journal = new_journal(2, process)
    process.most = 0
    process.fault = Nth("write", process.calls["write"] + 20, AssertionError)
    with pytest.raises(JournalError, match="the system writes nothing and says no error"):
        journal.append(0, answer(0))


# ---- kills and power cuts, at every call


@pytest.mark.parametrize("when", ["before", "middle", "after"])
@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("loss", [None, 0.5, 1.0])
def test_the_end_at_every_call(when: str, resumed: bool, loss: float | None) -> None:
    """A kill loses nothing that was written, a power cut nothing that was durable. The same command then ends with
    the whole output, unless all had been done.
    """
    num_records, at = 10, 0
    goes_on: list[bool] = []
    while True:
        machine, witness = half_run(num_records) if resumed else (Machine(), Witness())
        process = Process(machine, kill_at=(at, when))
        with contextlib.suppress(Killed):
            run(OUTPUT, num_records, disk=process, attempt=1, witness=witness)
        if process.is_alive:
            break
        witness.killed()
        if loss is not None:
            machine.cut_power(random.Random(at), loss)
            witness.power_cut()
        goes_on.append(finish(machine, num_records, witness))
        at += 1
    assert at > 60
    if loss is None:  # the last two calls remove the journal and let the lock go
        assert goes_on == [True] * (at - 2) + [when != "after", False]


@given(st.integers(0, 2**32), st.data())
@settings(max_examples=150)
def test_many_ends(seed: int, data: st.DataObject) -> None:
    """Kills, power cuts and faults, one after the other, until the run has ended."""
    rng = random.Random(seed)
    num_records = rng.randrange(1, 25)
    machine, witness = Machine(), Witness()
    for attempt in range(data.draw(st.integers(1, 8))):
        kind, number = rng.choice(KINDS), rng.randrange(6)
        process = Process(
            machine,
            kill_at=(rng.randrange(120), rng.choice(["before", "middle", "after"])),
            fault=Nth(kind, number, failed) if rng.random() < 0.3 else no_fault,
            late_fault=Nth(kind, number, failed) if rng.random() < 0.2 else no_fault,
            most=rng.choice([2**31, 30]),
        )
        with contextlib.suppress(Killed, BatchFileError):
            run(OUTPUT, num_records, disk=process, attempt=attempt, witness=witness)
            break
        process.kill()
        if rng.random() < 0.5:
            machine.cut_power(rng, rng.random())
            witness.power_cut()
        elif isinstance(process.fault, Nth):  # what a failed fsync has lost, the next process does not find
            witness.power_cut()
        else:
            witness.killed()
        if str(OUTPUT) in machine.files():
            break
    finish(machine, num_records, witness)


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("how", ["instead", "after"])
def test_ctrl_c_at_every_call(resumed: bool, how: str) -> None:
    """The exception goes through, whatever was written stays, the files are closed, and the run can go on."""
    num_records, at = 10, 0
    while True:
        machine, witness = half_run(num_records) if resumed else (Machine(), Witness())
        process = Process(machine)
        fault = Interrupt(at)
        if how == "after":
            process.late_fault = fault
        else:
            process.fault = fault
        try:
            run(OUTPUT, num_records, disk=process, attempt=1, witness=witness)
            break
        except KeyboardInterrupt:
            witness.killed()
        process.kill()
        finish(machine, num_records, witness)
        at += 1
    assert at > 60


class Interrupt:
    """Ctrl-C in the call of that number among all."""

    def __init__(self, at: int) -> None:
        self._left = at

    def __call__(self, kind: str, number: int) -> BaseException | None:
        self._left -= 1
        return KeyboardInterrupt() if self._left == -1 else None


BATCH_FOLDER = str(Path(journal_module.__file__).parents[1])


@contextmanager
def interrupted_at(line: int) -> Iterator[list[int]]:
    """Ctrl-C before a line of the code in radixrt/batch: of this number, counted as they run. Gives the count."""
    count = [0]

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(BATCH_FOLDER):
            return None
        if event == "line":
            count[0] += 1
            if count[0] == line:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("resumed", [False, True])
def test_ctrl_c_before_every_line(resumed: bool, step: int) -> None:
    """Wherever Ctrl-C comes, in `close` too, nothing that was acknowledged is lost or damaged."""
    num_records, line = 6, 1
    while True:
        machine, witness = half_run(num_records) if resumed else (Machine(), Witness())
        process = Process(machine)
        try:
            with interrupted_at(line) as count:
                run(OUTPUT, num_records, disk=process, attempt=1, witness=witness)
            assert count[0] < line
            break
        except KeyboardInterrupt:
            witness.killed()
        process.kill()
        finish(machine, num_records, witness)
        line += step
    assert line > 500


def test_after_ctrl_c_in_a_call_the_journal_takes_no_more() -> None:
    """After half a record no other may be written."""
    machine = Machine()
    process = Process(machine, most=30)
    journal = new_journal(8, process)
    journal.append(0, answer(0))
    process.fault = Interrupt(2)
    with pytest.raises(KeyboardInterrupt):
        journal.append(1, answer(1))
    process.fault = no_fault
    assert data_of(machine)[-1:] != b"\n"
    for call in (journal.sync, lambda: journal.append(2, answer(2)), journal.mark_finished):
        with pytest.raises((JournalError, BatchFileError)):
            call()
    with pytest.raises(JournalError, match="a call was interrupted; run the same command again"):
        journal.sync()
    journal.close()
    assert contents(reopened(machine, 8)) == {0: answer(0)}


# ---- whatever is done with it


class Journals(RuleBasedStateMachine):
    """A journal on a machine, beside what has to be in it."""

    @initialize(num_records=st.integers(1, 30))
    def begin(self, num_records: int) -> None:
        self.machine = Machine()
        self.num_records = num_records
        self.process = Process(self.machine)
        create_journal(ALONE, manifest(num_records), self.process)
        self.process.fsync_folder(ALONE.parent)
        self.tried: dict[int, bytes] = {}  # the last line of a position that may have come to the file
        self.there: dict[int, bytes] = {}  # what the journal has
        self.durable: set[int] = set()
        self.clock = Clock()
        self.reopen(set())

    def reopen(self, required: set[int]) -> None:
        self.process.kill()
        self.process = Process(self.machine)
        self.journal = with_what_was_found(self.num_records, self.process, self.clock)
        found = contents(self.journal)
        assert required <= set(found)
        assert all(self.tried[position] == line for position, line in found.items())
        assert self.journal.recovery.duplicates == 0
        self.there, self.durable = found, set(found)

    def counted(self) -> None:
        """The journal may have synced: what it counts is durable from now on."""
        if self.journal.durable > len(self.durable):
            assert self.journal.durable == len(self.there)
            self.durable = set(self.there)

    @precondition(lambda self: len(self.there) < self.num_records)
    @rule(which=st.integers(0, 99), line=st.binary(max_size=60), seconds=st.sampled_from([0.0, 0.5, 3.0]))
    def append(self, which: int, line: bytes, seconds: float) -> None:
        missing = sorted(set(range(self.num_records)) - set(self.there))
        position = missing[which % len(missing)]
        self.tried[position] = line.replace(b"\n", b"") + b"\n"
        self.clock.now += seconds
        self.journal.append(position, self.tried[position])
        self.there[position] = self.tried[position]
        self.counted()

    @rule()
    def sync(self) -> None:
        self.journal.sync()
        self.counted()
        assert self.journal.durable == len(self.there)

    @rule(seconds=st.sampled_from([0.5, 3.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        self.journal.sync_if_due()
        self.counted()

    @rule()
    def close(self) -> None:
        self.journal.close()
        self.reopen(set(self.there))

    @rule()
    def kill(self) -> None:
        self.reopen(set(self.there))

    @rule(seed=st.integers(0, 2**32), loss=st.sampled_from([0.1, 0.5, 0.9, 1.0]))
    def cut_power(self, seed: int, loss: float) -> None:
        self.process.kill()
        self.machine.cut_power(random.Random(seed), loss)
        self.reopen(self.durable)

    @precondition(lambda self: self.journal.durable < self.journal.written)
    @rule(late=st.booleans())
    def fsync_fails(self, late: bool) -> None:
        fault = Nth("fsync", self.process.calls["fsync"], failed)
        if late:
            self.process.late_fault = fault
        else:
            self.process.fault = fault
        with pytest.raises(JournalError):
            self.journal.sync()
        assert self.journal.durable == len(self.durable)
        self.reopen(self.durable)

    @precondition(lambda self: len(self.there) < self.num_records)
    @rule(most=st.integers(1, 40), after=st.integers(0, 3), is_late=st.booleans())
    def disk_is_full(self, most: int, after: int, is_late: bool) -> None:
        """A write is taken in part, and then no more."""
        position = min(set(range(self.num_records)) - set(self.there))
        self.tried[position] = b"%d: it may be there or not\n" % position
        self.process.most = most
        fault = Nth("write", self.process.calls["write"] + after, no_space, on=True)
        if is_late:
            self.process.late_fault = fault
        else:
            self.process.fault = fault
        required = set(self.there)
        with contextlib.suppress(JournalError):
            self.journal.append(position, self.tried[position])
            self.there[position] = self.tried[position]
            self.counted()
            required = set(self.there)
        self.reopen(required)

    @precondition(lambda self: len(self.there) == self.num_records)
    @rule()
    def mark_finished(self) -> None:
        self.journal.mark_finished()
        self.counted()
        assert self.journal.is_finished

    @invariant()
    def everything_is_as_it_was_written(self) -> None:
        journal = self.journal
        assert np.flatnonzero(journal.finished).tolist() == sorted(self.there)
        assert contents(journal) == self.there
        assert (journal.written, journal.durable) == (len(self.there), len(self.durable))
        lines = lines_of(data_of(self.machine))
        assert sorted(int(kind) for _, kind, _ in lines if kind.isdigit()) == sorted(self.there)
        # A `synced` tells the truth: all lines before it are durable.
        last = max(n for n, (_, kind, _) in enumerate(lines) if kind in ("header", "synced"))
        assert {int(kind) for _, kind, _ in lines[:last] if kind.isdigit()} <= self.durable


@pytest.mark.parametrize("examples", [40, pytest.param(2000, marks=pytest.mark.long)])
def test_a_journal_is_what_was_done_with_it(examples: int) -> None:
    run_state_machine_as_test(Journals, settings=settings(max_examples=examples, stateful_step_count=40))
