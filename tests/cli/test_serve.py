"""`radixrt serve` from its options to its end by a signal."""

from __future__ import annotations

import signal
import socket
import stat
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from radixrt import Runtime
from radixrt.cli import main

pytest.importorskip("starlette", reason="starlette is not installed: pip install 'radixrt[server]'")

from radixrt.server.run import Listener, listening_socket
from tests.support.serving import Served, until


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "host is '0.0.0.0', where others can ask: that needs --api-key-file"),
        (["--host", "example.org"], "that needs --api-key-file"),
        (["--api-key-file", "nothing"], "the API keys in nothing cannot be read"),
        (["--api-key-file", "short"], "line 1 of short is no API key"),
        (["--api-key-file", "empty"], "empty must have an API key a line"),
        (["--model-name", ""], "model_name is empty"),
        (["--port", "70000"], "port is 70000; it must be 0 to 65535"),
        (["--max-pending", "0"], "max_pending is 0"),
        (["--default-max-tokens", "0"], "default_max_tokens is 0"),
        (["--admin-socket", "short"], "short is there and is no socket; give another name"),
        (["--admin-socket", "nothing/there"], "the server cannot listen at nothing/there: No such file"),
        (["--admin-socket", "n" * 200], "AF_UNIX path too long"),
        (
            ["--tool-parser", "hermes", "--reasoning-parser", "harmony"],
            "harmony is for both, or for reasoning alone",
        ),
        (["--model", "nothing/there/here"], "there is no folder nothing/there/here"),
        (["--model", "~nobody-of-that-name/model"], "there is no folder ~nobody-of-that-name/model"),
        (["--model", "n" * 300], "cannot be read: File name too long"),
    ],
)
def test_what_cannot_be_served(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("short").write_text("key\n")
    Path("empty").write_text("# none yet\n")
    assert main(["serve", "--port", "0", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--files-dir", "--admin-socket", "--api-key-file", "--load-cache"])
def test_empty_paths_are_not_the_current_folder(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "--port", "0", option, ""])
    assert f"argument {option}: the path is empty" in capsys.readouterr().err


def test_threads_are_switched_soon_while_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or each pass would wait 5 ms for the event loop."""
    intervals, captured, before = [], list[Runtime](), sys.getswitchinterval()
    monkeypatch.setattr(Runtime, "capture_graphs", lambda self: captured.append(self))

    def run(self: Listener, sockets: object) -> None:
        assert len(captured) == 1  # before it listens
        intervals.append(sys.getswitchinterval())
        self.signal = signal.SIGTERM

    monkeypatch.setattr(Listener, "run", run)
    assert main(["serve", "--port", "0", "--device", "cpu"]) == 128 + signal.SIGTERM
    assert intervals == [pytest.approx(5e-4)]
    assert sys.getswitchinterval() == before


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    """Also by a server that has not loaded its model yet."""
    with listening_socket("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
    assert f"the server cannot listen at 127.0.0.1, port {port}: Address already in use" in capsys.readouterr().err


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(one, marks=pytest.mark.long) for one in (signal.SIGINT, signal.SIGHUP))],
)
def test_a_signal_lets_what_runs_end(number: signal.Signals, tmp_path: Path) -> None:
    """New connections are refused, and the cache is saved in the end."""
    cache = tmp_path / "cache"
    options = ("--save-cache", str(cache))
    with Served(tmp_path, *options, is_forked=False) as served, ThreadPoolExecutor() as threads:
        asked = threads.submit(served.ask)
        served.until_it_runs()
        assert httpx.get(f"{served.url}/health", headers={"Host": "evil.example"}).status_code == 403
        served.process.send_signal(number)
        while served.takes_connections():
            assert not asked.done()
        answer = asked.result()
        assert served.process.wait(20) == 128 + number
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 450
    assert "Traceback" not in served.told()
    assert f"cached tokens saved to {cache}" in served.told()
    if number != signal.SIGINT:  # once: it takes seconds
        return
    with Served(tmp_path, "--load-cache", str(cache)) as served:
        assert served.ask(max_tokens=1).json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_what_runs_too_long_is_cut(tmp_path: Path) -> None:
    with Served(tmp_path, "--drain-seconds", "1") as served, ThreadPoolExecutor() as threads:
        asked = threads.submit(served.ask, n=32, max_tokens=10**9)
        served.until_it_runs(32)
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(20) == 128 + signal.SIGTERM
        assert isinstance(asked.exception(), httpx.TransportError)
    assert "Traceback" not in served.told()


def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with Served(tmp_path, "--save-cache", str(cache)) as served, ThreadPoolExecutor() as threads:
        asked = threads.submit(served.ask, n=32, max_tokens=10**9)
        served.until_it_runs(32)
        served.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert served.process.poll() is None
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(10) == 128 + signal.SIGTERM
        assert isinstance(asked.exception(), httpx.TransportError)
    assert "Traceback" not in served.told()
    assert not cache.exists()


@pytest.mark.parametrize("drain", ["60", "0"])
def test_a_second_signal_ends_it_though_a_pass_hangs(drain: str, tmp_path: Path) -> None:
    """Whether requests are cut by then or not."""
    options = ("--drain-seconds", drain)
    with (
        Served(tmp_path, *options, module="tests.support.hanging_passes") as served,
        ThreadPoolExecutor() as threads,
    ):
        asked = threads.submit(served.ask)
        served.until_it_tells("radixrt_waiting_requests 1.0")
        served.process.send_signal(signal.SIGTERM)
        if drain == "0":
            until(asked.done)
        time.sleep(1)
        assert served.process.poll() is None
        assert asked.done() == (drain == "0")
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(15) == 128 + signal.SIGTERM
        assert isinstance(asked.exception(), httpx.TransportError)
    assert "radixrt: what runs has not ended within 1 s, and the process ends with it" in served.told()
    assert "Traceback" not in served.told()


def test_an_admin_socket(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is there while the server is, also while it drains, and for one server alone."""
    path, cache = tmp_path / "admin", tmp_path / "cache"
    socket.socket(socket.AF_UNIX).bind(str(path))  # as one that was killed has left it
    with Served(tmp_path, "--admin-socket", str(path)) as served, ThreadPoolExecutor() as threads:
        assert main(["serve", "--port", "0", "--admin-socket", str(path)]) == 2
        assert f"a server listens at {path} already" in capsys.readouterr().err
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        served.ask(max_tokens=1)
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost") as admin:
            saved = admin.post("/save", json={"path": str(cache)}, timeout=60).json()
            asked = threads.submit(served.ask)
            served.until_it_runs()
            served.process.send_signal(signal.SIGTERM)
            flushed = admin.post("/flush")
        assert asked.result().json()["usage"]["completion_tokens"] == 450
        assert served.process.wait(20) == 128 + signal.SIGTERM
    assert saved["saved_tokens"] > 0
    assert flushed.status_code == 200
    assert not path.exists()
    assert "Traceback" not in served.told()
    with Served(tmp_path, "--load-cache", str(cache)) as served:
        assert served.ask(max_tokens=1).json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
