"""Another engine on the same lists, in a process of its own that `engine_worker` is the program of."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any

import torch

from radixrt.bench.run import TEMPERATURE
from radixrt.bench.throughput.figures import BaselineRun
from radixrt.errors import ParameterError, RadixrtError
from radixrt.workloads.lists import WorkloadPrompt

START_SECONDS = 1800  # of an engine that loads, compiles and captures
_PRODUCTS = {"vllm": "vLLM", "sglang": "SGLang", "transformers": "transformers"}


def check_installed(baseline: str | None) -> None:
    """Raise ParameterError, which says how to install it, if the engine of a baseline is not there."""
    if baseline is not None and importlib.util.find_spec(baseline) is None:
        raise ParameterError(
            f"baseline {baseline} needs {_PRODUCTS[baseline]}, which is not installed: make a virtual environment "
            f"for it, run `pip install {baseline}` and then `pip install .` there, and start the benchmark from it"
        )


class EngineProcess:
    """A process with another engine, which is started for the first list, and anew after one that did not end.

    Args:
        engine: one of `engine_worker.ENGINES`.
        options: its keyword arguments, of JSON's types.
        device: the one GPU that it sees, or the CPU.

    Attributes:
        name, settings: of the engine, with its version once it runs; no settings before.
    """

    def __init__(self, engine: str, options: Mapping[str, Any], device: torch.device) -> None:
        self.name = _PRODUCTS[engine]
        self.settings: dict[str, Any] = {}
        self._arguments = {"engine": engine, **options}
        self._environment = {**os.environ, **only_visible(device)}
        self._worker: _Worker | None = None
        self._failed: str | None = None  # why it cannot be started

    def run(
        self, prompts: Sequence[WorkloadPrompt], warm_up: Sequence[WorkloadPrompt], limit: float
    ) -> BaselineRun:
        """Answer a list after `warm_up`, each in at most `limit` seconds. A failure becomes the reason."""
        if self._failed is not None:
            return BaselineRun(reason=self._failed)
        try:
            worker = self._worker or self._start()
            job = {"temperature": TEMPERATURE, "warm_up": _listed(warm_up), "prompts": _listed(prompts)}
            worker.send(json.dumps(job))
            worker.read(limit)  # it is warm
            figures = worker.read(limit)
        except TimeoutError:
            self.close()
            return BaselineRun(stopped_after=limit, reason=f"stopped after {limit:g} s")
        except RadixrtError as error:
            self.close()  # an engine that failed may be of no more use
            return BaselineRun(reason=str(error))
        wanted = sum(prompt.max_new_tokens for prompt in prompts)
        if figures["tokens"] != wanted:
            made = f"{figures['tokens']} of {wanted} tokens"
            return BaselineRun(reason=f"it made {made}: nothing can be compared")
        return BaselineRun(seconds=figures["seconds"])

    def close(self) -> None:
        """End the process, and those that it started."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def _start(self) -> _Worker:
        worker = self._worker = _Worker(self._arguments, self._environment)
        try:
            told = worker.read(START_SECONDS)
        except (RadixrtError, TimeoutError) as error:
            reason = str(error) or f"it was not up after {START_SECONDS} s"
            self._failed = f"{self.name} did not start: {reason}"
            raise RadixrtError(self._failed) from error
        self.name, self.settings = told["name"], told["settings"]
        return worker


class _Worker:
    """A process that runs `engine_worker`, the leader of a group of its own."""

    def __init__(self, arguments: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        with contextlib.ExitStack() as opened:
            self._said = opened.enter_context(tempfile.TemporaryFile())
            self._process = subprocess.Popen(
                [sys.executable, "-m", "radixrt.bench.throughput.engine_worker", json.dumps(arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                text=True,
                env=environment,
                start_new_session=True,
            )
            self._opened = opened.pop_all()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._jobs = self._process.stdin
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=_pass_on, args=(self._process.stdout, self._lines), daemon=True)
        self._reader.start()

    def send(self, line: str) -> None:
        """Raises RadixrtError if the process has ended."""
        try:
            self._jobs.write(line + "\n")
            self._jobs.flush()
        except BrokenPipeError as error:
            raise RadixrtError(self._last_words()) from error

    def read(self, limit: float) -> dict[str, Any]:
        """What it tells next. Raises TimeoutError after `limit` seconds, RadixrtError if it failed."""
        try:
            line = self._lines.get(timeout=limit)
        except queue.Empty:
            raise TimeoutError from None
        if not line:
            raise RadixrtError(self._last_words())
        told: dict[str, Any] = json.loads(line)
        if "error" in told:
            raise RadixrtError(" ".join(told["error"].split())[:200])
        return told

    def close(self) -> None:
        """End it and all that it started."""
        with contextlib.suppress(ProcessLookupError):  # all have ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        with contextlib.suppress(BrokenPipeError):  # a job that it never read
            self._jobs.close()
        self._opened.close()

    def _last_words(self) -> str:
        """What it said at last on stderr."""
        self._said.seek(0)
        said = self._said.read().decode(errors="replace").strip().splitlines()
        return f"its process ended: {said[-1].strip() if said else 'it said nothing'}"[:200]


def only_visible(device: torch.device) -> dict[str, str]:
    """The environment in which this GPU is the only one; nothing for others, or for the first."""
    if device.type != "cuda" or not device.index:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {"CUDA_VISIBLE_DEVICES": visible.split(",")[device.index] if visible else str(device.index)}


def _listed(prompts: Sequence[WorkloadPrompt]) -> list[tuple[list[int] | str, int]]:
    return [
        (prompt.prompt_ids.tolist() if prompt.text is None else prompt.text, prompt.max_new_tokens)
        for prompt in prompts
    ]


def _pass_on(stream: IO[str], lines: queue.SimpleQueue[str]) -> None:
    """Put each line into the queue, and an empty one at the end."""
    with stream:
        for line in stream:
            lines.put(line)
    lines.put("")
