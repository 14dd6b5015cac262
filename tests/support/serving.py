"""What tests ask a server on the built-in model, and how."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai

from radixrt.runtime import Runtime
from tests.support.forked_processes import popen

FACTS = "Mira likes Oslo. Tarek counts 374. Ines paints blue."
QUESTIONS = [f"{FACTS}\nQ: {who}?\nA:" for who in ("Mira likes", "Tarek counts", "Ines paints")]
ANSWERS = ["Oslo", "374", "blue"]
GREEDY: dict[str, Any] = {"model": "any", "temperature": 0, "max_tokens": 8}
LONG = {**GREEDY, "prompt": QUESTIONS[0], "max_tokens": 900, "ignore_eos": True}

Serving = Callable[..., str]  # serves a Server, or one without limits of its own; returns the URL


def client_of(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def counted(url: str, status: int, path: str = "/v1/completions") -> float:
    """How many responses of this status the server has counted."""
    name = re.escape(f'radixrt_responses_total{{endpoint="{path}",status="{status}"}} ')
    found = re.search(name + r"(\S+)", httpx.get(f"{url}/metrics").text)
    return 0.0 if found is None else float(found[1])


@contextmanager
def held(runtime: Runtime) -> Iterator[None]:
    """No pass begins inside."""
    entered, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        let_go.wait(60)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(runtime._driver.between_passes, hold)
        entered.wait(20)
        try:
            yield
        finally:
            let_go.set()


class Served:
    """`radixrt serve` with options, from its line that says where; ended in any case. Its log is in the folder."""

    def __init__(self, folder: Path, *options: str, module: str = "radixrt", is_forked: bool = True) -> None:
        command = [sys.executable, "-m", module, "serve", "--port", "0", "--device", "cpu", *options]
        self._log = folder / "err"
        with self._log.open("w") as log:
            self.process = (popen if is_forked else subprocess.Popen)(command, stderr=log)
        while (found := re.search(r"at (http://\S+)/v1\n", self.told())) is None:
            assert self.process.poll() is None, self.told()
            time.sleep(0.02)
        self.url = found[1]

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def told(self) -> str:
        return self._log.read_text()

    def ask(self, **more: Any) -> httpx.Response:
        body = {"prompt": "Mira likes Oslo.", "temperature": 0, "max_tokens": 450, "ignore_eos": True, **more}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=60)

    def takes_connections(self) -> bool:
        try:
            httpx.get(f"{self.url}/health")
        except httpx.TransportError as error:
            return not isinstance(error, httpx.ConnectError)  # it may be taken, and closed
        return True

    def until_it_runs(self, count: int = 1) -> None:
        self.until_it_tells(f"radixrt_running_requests {count}.0")

    def until_it_tells(self, number: str) -> None:
        """In `/metrics`."""
        while number not in httpx.get(f"{self.url}/metrics").text:
            time.sleep(0.01)
