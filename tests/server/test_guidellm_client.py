"""GuideLLM, a benchmark client, runs to its end against a server, and its figures are those of what was served."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from radixrt.builtin import MODEL_PATH
from radixrt.frontend.openai import CHAT
from radixrt.runtime import Runtime
from tests.support.serving import Serving, counted

if find_spec("guidellm") is None:
    pytest.skip("guidellm is not installed: make test-clients", allow_module_level=True)

REQUESTS, CLIENTS, PROMPT, ANSWER = 24, 4, 64, 16


def run(url: str, folder: Path) -> dict[str, Any]:
    """The benchmark of its report."""
    options = {
        "backend": f"kind=openai_http,target={url},model=any,request_format={CHAT}",
        "profile": f"kind=concurrent,streams={CLIENTS}",
        "constraint": f"kind=max_requests,count={REQUESTS}",
        "data": f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={ANSWER}",
        "tokenizer": f"kind=huggingface_auto,model={MODEL_PATH}",
        "output": f"kind=json,path={folder / 'report.json'}",
    }
    command = [sys.executable, "-m", "guidellm", "run", "--disable-console"]
    command += [word for name, value in options.items() for word in (f"--{name}", value)]
    own = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder), "GUIDELLM__MAX_WORKER_PROCESSES": "1"}
    environment = {**os.environ, **own}
    subprocess.run(command, check=True, env=environment, timeout=240)
    (benchmark,) = json.loads((folder / "report.json").read_text())["benchmarks"]
    assert isinstance(benchmark, dict)
    return benchmark


def test_its_figures(serving: Serving, runtime: Runtime, tmp_path: Path) -> None:
    url, began = serving(), runtime.activity()
    benchmark = run(url, tmp_path)
    figures: dict[str, Any] = {
        name: each["successful"]
        for name, each in benchmark["metrics"].items()
        if each and isinstance(each.get("successful"), dict)
    }
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (REQUESTS, 0, 0)
    assert counted(url, 200, CHAT) == REQUESTS
    assert (runtime.activity() - began).decoded_tokens >= REQUESTS * ANSWER
    assert figures["output_token_count"]["min"] == figures["output_token_count"]["max"] == ANSWER
    prompts = figures["prompt_token_count"]
    assert (prompts["min"], prompts["max"]) == pytest.approx((PROMPT, PROMPT), abs=1)  # a template may add no BOS
    assert 1 < figures["request_concurrency"]["mean"] <= CLIENTS
    first, between = (
        figures[name]["mean"] / 1000 for name in ("time_to_first_token_ms", "inter_token_latency_ms")
    )
    assert first > 0
    assert between > 0
    whole = figures["request_latency"]["mean"]
    assert first + (ANSWER - 1) * between == pytest.approx(whole, rel=0.2)
    assert figures["requests_per_second"]["mean"] == pytest.approx(REQUESTS / benchmark["duration"], rel=0.3)
