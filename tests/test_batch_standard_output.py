"""Records on standard output: in order, seen at once, and readers that go away."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import radixrt
from radixrt.batch.standard_output import StandardOutput
from radixrt.errors import BatchFileError

HOME = Path(radixrt.__file__).resolve().parent.parent


def test_lines_come_in_order_and_at_once(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    with StandardOutput() as output:
        for position, shown in ((1, b""), (0, b"0\xff\n1\xff\n"), (3, b""), (2, b"2\xff\n3\xff\n"), (5, b"")):
            output.put(position, b"%d\xff\n" % position)
            output.flush()
            assert capfdbinary.readouterr().out == shown
    os.write(1, b"behind\n")  # it is not closed
    assert capfdbinary.readouterr().out == b"5\xff\nbehind\n"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.permutations(range(12)), st.integers(0, 12))
def test_any_order_gives_one_order(
    capfdbinary: pytest.CaptureFixture[bytes], order: list[int], count: int
) -> None:
    """Also if it is left before all lines are there, by an exception as well."""
    with suppress(KeyboardInterrupt), StandardOutput() as output:
        for position in order[:count]:
            output.put(position, b"%d\n" % position)
        raise KeyboardInterrupt
    assert capfdbinary.readouterr().out == b"".join(b"%d\n" % position for position in sorted(order[:count]))


def test_what_was_printed_before_stays_before() -> None:
    code = """
from radixrt.batch.standard_output import StandardOutput
print("before")
with StandardOutput() as output:
    output.put(0, b"record\\n")
print("behind")
"""
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=HOME, env=buffered, capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("before\nrecord\nbehind\n", "")


def test_standard_output_that_is_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BatchFileError, match="cannot write standard output: "):
        StandardOutput()  # what capsys puts there is no file
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(BatchFileError, match="cannot write standard output: it is closed"):
        StandardOutput()


def test_a_reader_that_goes_away() -> None:
    """It is said once, and nothing that was not taken is tried again."""
    code = """
import sys
from radixrt.batch.standard_output import StandardOutput
from radixrt.errors import BatchFileError
try:
    with StandardOutput() as output:
        for position in range(100_000):
            output.put(position, b"x" * 100)
except BatchFileError as error:
    sys.stderr.write(str(error))
    sys.exit(2)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=HOME, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == "cannot write standard output: Broken pipe"
    assert process.wait() == 2
    process.stderr.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no disk that is always full")
def test_a_full_disk() -> None:
    code = """
from radixrt.batch.standard_output import StandardOutput
with StandardOutput() as output:
    output.put(1, b"record\\n")  # it waits, and is tried when it is left
"""
    with open("/dev/full", "wb") as full:
        result = subprocess.run(
            [sys.executable, "-c", code], cwd=HOME, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert result.stderr.endswith("cannot write standard output: No space left on device\n")
    assert result.returncode == 1
