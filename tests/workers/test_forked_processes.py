"""The processes that stand for real ones in tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from tests.support import forked_processes
from tests.support.forked_processes import ForkedProcess, popen

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or torch.cuda.is_available(), reason="processes are not forked here"
)
COMMAND = [sys.executable, "-m", "tests.support.process_that_tells"]


def test_descriptors_have_their_numbers_and_the_environment_is_the_given_one(tmp_path: Path) -> None:
    """Also numbers that are above all that the process has, side by side."""
    told = tmp_path / "told"
    with told.open("wb") as file:
        given = [os.dup(file.fileno()) for _ in range(3)]
        above = [os.dup2(number, 600 + place) for place, number in enumerate(given)]
        environment = {**os.environ, "TOLD": "it"}
        process = popen([*COMMAND, *map(str, above)], pass_fds=above, env=environment, stdout=file)
        for number in (*given, *above):
            os.close(number)
    assert isinstance(process, ForkedProcess)
    assert process.wait(20) == 7
    assert sorted(told.read_text().split()) == ["600", "601", "602", "it"]


def test_a_signal_for_a_process_that_has_ended_is_for_nobody() -> None:
    process = popen(COMMAND, stdout=subprocess.DEVNULL)
    assert isinstance(process, ForkedProcess)
    while psutil.pid_exists(process.pid):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    process.kill()
    assert process.wait(20) == 7


def test_another_environment_at_import_starts_a_real_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one in which the forked process was started counts, not that of the test."""
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")
    process = popen([sys.executable, "-m", "this"], stdout=subprocess.DEVNULL)
    assert isinstance(process, subprocess.Popen)
    assert process.wait(20) == 0


@pytest.mark.long
def test_nothing_is_left_where_the_process_that_is_forked_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    template = forked_processes._Template()
    monkeypatch.setattr(forked_processes, "_template", lambda: template)
    process = popen([*COMMAND, "waits"], stdout=subprocess.DEVNULL)
    assert isinstance(process, ForkedProcess)
    assert os.getpgid(template._process.pid) != os.getpgid(0)  # Ctrl-C is not for it
    template._end()
    deadline = time.monotonic() + 20
    while psutil.pid_exists(process.pid) and psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)
