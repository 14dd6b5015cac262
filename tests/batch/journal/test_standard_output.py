"""Records on standard output: in order, seen at once, and readers that go away."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import tracemalloc
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import radixrt
from radixrt.batch.job import run_batch
from radixrt.batch.journal.standard_output import StandardOutput
from radixrt.errors import BatchFileError, JournalError
from tests.support.fake_runtime import FakeRuntime
from tests.support.file_limit import file_limit

HOME = Path(radixrt.__file__).resolve().parent.parent


def test_lines_come_in_order_and_at_once(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    with StandardOutput(tmp_path) as output:
        for position, shown in ((1, b""), (0, b"0\xff\n1\xff\n"), (3, b""), (2, b"2\xff\n3\xff\n"), (5, b"")):
            output.append(position, b"%d\xff\n" % position)
            output.sync()
            assert capfdbinary.readouterr().out == shown
    os.write(1, b"behind\n")  # it is not closed
    assert capfdbinary.readouterr().out == b"5\xff\nbehind\n"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.permutations(range(12)), st.integers(0, 12))
def test_any_order_gives_one_order(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], order: list[int], count: int
) -> None:
    """Also if it is left before all lines are there, by an exception as well."""
    with suppress(KeyboardInterrupt), StandardOutput(tmp_path) as output:
        for done, position in enumerate(order[:count], 1):
            output.append(position, b"%d\n" % position)
            gap = next((place for place in range(12) if place not in order[:done]), 12)
            assert output.durable == gap  # what waits may be lost
        raise KeyboardInterrupt
    assert output.durable == count
    assert capfdbinary.readouterr().out == b"".join(b"%d\n" % position for position in sorted(order[:count]))


def test_what_waits_takes_no_memory(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """It is on disk, until nothing waits."""
    sizes = []
    tracemalloc.start()
    try:
        with StandardOutput(tmp_path) as output:
            for position in [*range(19, -1, -1), *range(39, 20, -1)]:
                output.append(position, bytes([65 + position]) * 2**20)
                sizes.append(sum(path.stat().st_size for path in tmp_path.iterdir()) // 2**20)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sizes == [*range(1, 20), 0, *range(1, 20)]
    assert most < 4 * 2**20
    expected = b"".join(bytes([65 + position]) * 2**20 for position in range(40) if position != 20)
    assert capfdbinary.readouterr().out == expected


def test_a_disk_with_no_room_for_what_waits(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """What has found room is printed, whole."""
    refused = pytest.raises(JournalError, match="waiting: File too large; raise the limit")
    with StandardOutput(tmp_path) as output:
        output.append(4, b"four\n")
        with file_limit(10), refused:
            output.append(2, b"two, and too long\n")
        output.append(3, b"three\n")
    assert capfdbinary.readouterr().out == b"three\nfour\n"
    with pytest.raises(BatchFileError, match=r"cannot write .*waiting: Not a directory") as caught:
        StandardOutput(tmp_path / "waiting").append(1, b"x")
    assert caught.type is BatchFileError


def test_what_waited_and_has_gone(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    gone = pytest.raises(JournalError, match=r"cannot read .*waiting: the file is cut short; see to the disk")
    with gone, StandardOutput(tmp_path) as output:
        output.append(1, b"one\n")
        output.append(2, b"two\n")
        os.truncate(tmp_path / "waiting", 4)
        output.append(0, b"zero\n")
    assert capfdbinary.readouterr().out == b"zero\none\n"


def test_what_was_printed_before_stays_before(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from radixrt.batch.journal.standard_output import StandardOutput
print("before")
with StandardOutput(Path(sys.argv[1])) as output:
    output.append(0, b"record\\n")
print("behind")
"""
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", code, str(tmp_path)]
    result = subprocess.run(command, cwd=HOME, env=buffered, capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("before\nrecord\nbehind\n", "")


def test_standard_output_that_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(BatchFileError, match="cannot write standard output: "):
        StandardOutput(tmp_path)  # what capsys puts there is no file
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(BatchFileError, match="cannot write standard output: it is closed"):
        StandardOutput(tmp_path)


def test_a_reader_that_goes_away(tmp_path: Path) -> None:
    """It is said once, and nothing that was not taken is tried again."""
    code = """
import sys
from pathlib import Path
from radixrt.batch.journal.standard_output import StandardOutput
from radixrt.errors import BatchFileError
try:
    with StandardOutput(Path(sys.argv[1])) as output:
        for position in range(100_000):
            output.append(position, b"x" * 100)
except BatchFileError as error:
    sys.stderr.write(str(error))
    sys.exit(2)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=HOME,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == "cannot write standard output: Broken pipe"
    assert process.wait() == 2
    process.stderr.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no disk that is always full")
def test_a_full_disk(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from radixrt.batch.journal.standard_output import StandardOutput
with StandardOutput(Path(sys.argv[1])) as output:
    output.append(1, b"record\\n")  # it waits, and is tried when it is left
"""
    with open("/dev/full", "wb") as full:
        result = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], cwd=HOME, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert result.stderr.endswith("cannot write standard output: No space left on device\n")
    assert result.returncode == 1


def test_no_room_for_what_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    (tmp_path / "in.jsonl").touch()
    with pytest.raises(BatchFileError, match=r"cannot make a temporary folder; TMPDIR names .*: No such"):
        run_batch(FakeRuntime(), tmp_path / "in.jsonl", "-")
