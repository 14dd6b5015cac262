"""`radixrt serve` from its options to its end by a signal."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from radixrt.cli import main

pytest.importorskip("fastapi", reason="fastapi is not installed: pip install 'radixrt[server]'")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "host is '0.0.0.0', where others can ask: that needs --api-key-file"),
        (["--host", "example.org"], "that needs --api-key-file"),
        (["--api-key-file", "nothing"], "the API keys in nothing cannot be read"),
        (["--api-key-file", "short"], "short must have an API key a line, of 16 characters at least"),
        (["--api-key-file", "empty"], "empty must have an API key a line"),
        (["--port", "70000"], "port is 70000; it must be 0 to 65535"),
        (["--max-waiting", "0"], "max_waiting is 0"),
        (["--model", "nothing/there/here"], "there is no folder nothing/there/here"),
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


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
    assert f"the server cannot listen at 127.0.0.1, port {port}" in capsys.readouterr().err


def test_a_signal_lets_what_runs_end(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "radixrt", "serve", "--port", "0", "--device", "cpu"]
    with (
        (tmp_path / "err").open("w") as log,
        subprocess.Popen(command, stderr=log) as process,
        ThreadPoolExecutor() as threads,
    ):
        while (found := re.search(r"at (http://\S+)/v1", (tmp_path / "err").read_text())) is None:
            assert process.poll() is None, (tmp_path / "err").read_text()
            time.sleep(0.05)
        url, body = found[1], {"prompt": "Mira likes Oslo.", "max_tokens": 900, "ignore_eos": True}
        while httpx.get(f"{url}/health").status_code != 200:
            time.sleep(0.05)
        asked = threads.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=60)
        while "radixrt_running_requests 1.0" not in httpx.get(f"{url}/metrics").text:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        answer = asked.result()
        assert process.wait(20) == 128 + signal.SIGTERM
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 900
    assert "Traceback" not in (tmp_path / "err").read_text()
