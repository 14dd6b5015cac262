"""A process that works for this one, over a socket pair."""

# Tests: tests/replicas/test_links.py

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from radixrt.workers.channel import Channel, Message

_log = logging.getLogger(__name__)

END_SECONDS = 5.0  # that a process has to be gone
LOG = "RADIXRT_WORKER_LOG"  # in its environment: the level at which it logs


class Process:
    """A process that runs `python -m PROGRAM FD` with a connected socket, and is sent `first`.

    `environment` of its own beside this one's; open files that it has `inherited`, by the same numbers.
    """

    def __init__(
        self, program: str, environment: Mapping[str, str], first: Message, inherited: Sequence[int] = ()
    ) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", program, str(theirs.fileno())],
                pass_fds=[theirs.fileno(), *inherited],
                env={**os.environ, **_environment(), **environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # this one's may carry records
                start_new_session=True,  # Ctrl-C is for this one, which says what is to be done
            )
        ours.setblocking(False)
        self.channel = Channel(ours)
        self.channel.send(first)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_closed(self) -> bool:
        return self.channel.is_closed

    def send(self, message: Message) -> None:
        self.channel.send(message)

    def receive(self) -> list[Message]:
        self.channel.flush()
        return self.channel.receive()

    def end(self) -> str:
        if self.channel.is_closed:  # it is ending: how, is its own
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)
        self._process.kill()
        self.channel.close()
        try:
            status = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:  # within a call of the system, such as of a driver that hangs
            return "killed, and not gone yet"
        return f"signal {-status}" if status < 0 else f"status {status}"

    def close(self) -> None:
        self.channel.close()

    def wait_for_end(self, seconds: float) -> None:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.end()


def _environment() -> dict[str, str]:
    """Of a process that finds this package, also where it is not installed, and logs as this one does."""
    found = {"PYTHONSAFEPATH": "1"}
    if _log.isEnabledFor(logging.INFO):
        found[LOG] = "INFO"
    home = str(Path(__file__).resolve().parents[2])
    # Where it is installed, its folder would come before the standard library.
    if home not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        found["PYTHONPATH"] = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))
    return found
