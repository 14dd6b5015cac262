"""Processes that run a module of radixrt as `python -m` does, forked from one that has imported everything: the
imports, of torch and transformers above all, take most of the seconds in which a real one starts.

Where there is a GPU or no Linux, and where libraries would find another environment, processes start as ever.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

_LOOK_SECONDS = 0.05
_MOST_BYTES = 1 << 20
_AT_IMPORT = ("TRITON_INTERPRET", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PYTHONOPTIMIZE")  # read once
_ENVIRONMENT = dict(
    os.environ
)  # of the process that is forked, whatever the test that is the first to need it sets
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


class ForkedProcess:
    """What a `subprocess.Popen` of `[sys.executable, "-m", MODULE, ...]` is, but for its pipes.

    `descriptors`: what the process has open, by its own numbers, 0 to 2 among them.
    """

    def __init__(
        self,
        command: Sequence[str],
        descriptors: Mapping[int, int],
        environment: Mapping[str, str],
        new_session: bool = False,
    ) -> None:
        _, _, module, *arguments = command
        self.returncode: int | None = None
        self._template = _template()
        self.pid: int = self._template.ask(
            {
                "module": module,
                "arguments": arguments,
                "numbers": list(descriptors),
                "environment": dict(environment),
                "folder": os.getcwd(),
                "new_session": new_session,
            },
            list(descriptors.values()),
        )

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._template.ask({"ended": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
            time.sleep(0.01)
        return status

    def send_signal(self, number: int) -> None:
        self._template.ask({"signalled": self.pid, "number": number})

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def popen(command: Sequence[str], **options: Any) -> ForkedProcess | subprocess.Popen[bytes]:
    """A forked process if `command` is `[sys.executable, "-m", MODULE, ...]`, a real one otherwise."""
    environment: Mapping[str, str] = options.get("env") or os.environ
    is_other = any(environment.get(name) != _ENVIRONMENT.get(name) for name in _AT_IMPORT)
    can_fork = sys.platform == "linux" and not torch.cuda.is_available()
    if not can_fork or is_other or list(command[:2]) != [sys.executable, "-m"]:
        return subprocess.Popen(command, **options)
    with open(os.devnull, "r+b") as nothing:
        descriptors: dict[int, int] = {number: number for number in options.get("pass_fds", ())}
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            given = options.get(name)
            if given is None:
                descriptors[number] = number
            else:
                descriptors[number] = nothing.fileno() if given == subprocess.DEVNULL else given.fileno()
        return ForkedProcess(command, descriptors, environment, options.get("start_new_session", False))


forked = SimpleNamespace(Popen=popen, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired)
"""What radixrt.workers.process needs of `subprocess`."""


def running(module: str) -> list[int]:
    """Forked processes of this one that run a module and have not ended."""
    found: list[int] = _template().ask({"running": module}) if _template.cache_info().currsize else []
    return found


class _Template:
    """The process that is forked, as this one sees it."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.forked_processes", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=_ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for pytest, which has processes to end
            )
        atexit.register(self._end)

    def _end(self) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def ask(self, question: dict[str, Any], descriptors: Sequence[int] = ()) -> Any:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(question).encode()], descriptors)
            answer = self._socket.recv(_MOST_BYTES)
        assert answer, "the process that is forked has ended"
        return json.loads(answer)


@cache
def _template() -> _Template:
    return _Template()


# --- in the process that is forked ---


def _serve(connection: socket.socket) -> dict[str, Any] | None:
    """Answer until the connection ends. In a forked process: what it is asked to be."""
    ended: dict[int, int] = {}
    running: dict[int, str] = {}
    while True:
        is_asked = select.select([connection], [], [], _LOOK_SECONDS if running else None)[0]
        for process in list(running):
            has_ended, status = os.waitpid(process, os.WNOHANG)
            if has_ended:
                del running[process]
                ended[process] = os.waitstatus_to_exitcode(status)
        if not is_asked:
            continue
        content, descriptors, _, _ = socket.recv_fds(connection, _MOST_BYTES, 64)
        if not content:
            return None
        asked = json.loads(content)
        if "ended" in asked:
            connection.send(json.dumps(ended.get(asked["ended"])).encode())
            continue
        if "signalled" in asked:
            if asked["signalled"] in running:  # none but this one waits for it: its number is no other's yet
                os.kill(asked["signalled"], asked["number"])
            connection.send(b"null")
            continue
        if "running" in asked:
            found = [process for process, module in running.items() if module == asked["running"]]
            connection.send(json.dumps(found).encode())
            continue
        process = os.fork()
        if process == 0:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # nobody else could end it
            connection.close()
            _take(dict(zip(asked["numbers"], descriptors, strict=True)))
            return asked
        running[process] = asked["module"]
        ended.pop(process, None)  # an earlier one of this number
        for descriptor in descriptors:
            os.close(descriptor)
        connection.send(json.dumps(process).encode())


def _take(descriptors: Mapping[int, int]) -> None:
    """Have what was received open under the given numbers, and not as it came."""
    above = max(descriptors) + 1
    spare = {number: fcntl.fcntl(own, fcntl.F_DUPFD, above) for number, own in descriptors.items()}
    for own in descriptors.values():
        os.close(own)
    for number, own in spare.items():
        os.dup2(own, number, inheritable=True)
        os.close(own)


def _become(asked: dict[str, Any]) -> None:
    """Run its module as `python -m` does."""
    if asked["new_session"]:
        os.setsid()
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.argv[1:] = asked["arguments"]
    runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)


def _main() -> None:
    from transformers import AutoTokenizer  # noqa: F401

    import radixrt.assembly
    import radixrt.cli
    import radixrt.server.run
    import radixrt.text.tokenizer  # noqa: F401

    asked = _serve(socket.socket(fileno=int(sys.argv[1])))
    if asked is not None:
        warnings.simplefilter("ignore", RuntimeWarning)  # runpy: the module may have been imported
        _become(asked)


if __name__ == "__main__":
    _main()
