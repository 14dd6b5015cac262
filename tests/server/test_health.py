"""What a server says of itself."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from radixrt.execution.model_runner import ModelRunner
from radixrt.runtime import Runtime
from radixrt.sampling_params import SamplingParams
from radixrt.server.app import Server
from radixrt.server.limits import Limits
from tests.support import failing_device
from tests.support.runtimes import scheduled_runtime
from tests.support.serving import GREEDY, QUESTIONS, Serving, client_of, held, until


def test_health_and_numbers(serving: Serving, runtime: Runtime) -> None:
    url = serving()
    client_of(url).completions.create(prompt=QUESTIONS[0], **GREEDY)
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    text = httpx.get(f"{url}/metrics").text
    assert 'radixrt_responses_total{endpoint="/v1/completions",status="200"} 1.0' in text
    assert f"radixrt_passes_total {float(runtime.activity().passes)}" in text
    (model,) = client_of(url).models.list().data
    assert model.id == "built-in"


def test_numbers_of_states(serving: Serving, runtime: Runtime) -> None:
    """A model that keeps none has none."""
    assert "state" not in httpx.get(f"{serving()}/metrics").text
    with scheduled_runtime(pool_tokens=5000, context_length=200, num_states=900) as hybrid:
        url = serving(Server(hybrid, "hybrid"))
        for last in range(3):
            hybrid.generate([*range(100), 500 + last], SamplingParams(max_new_tokens=2))
        stats, text = hybrid.cache_stats(), httpx.get(f"{url}/metrics").text
        state = httpx.get(f"{url}/state").json()["states"]
    assert (stats.stateless_tokens, stats.cached_tokens) == (100, 100)
    for name, value in {
        "stateless_tokens_total": 100,
        "states_given_up_unused_total": 0,
        "states": 900,
        "free_states": stats.state_free,
        "running_states": 0,
        "kept_states": stats.state_kept,
        "kept_end_states": stats.state_ends,
        "kept_unused_states": stats.state_unused,
    }.items():
        assert f"radixrt_{name} {value:.1f}\n" in text, name
    assert state.pop("given_up_unused") == 0
    assert state.pop("stateless_tokens") == 100
    assert state == {name: getattr(stats, f"state_{name}") for name in state}
    assert state["free"] + state["own"] + state["kept"] + state["pending"] == state["capacity"] == 900
    assert "states" not in httpx.get(f"{serving()}/state").json()


def test_passes_that_do_not_come(serving: Serving, runtime: Runtime) -> None:
    """Time counts from when there is work: not while there is none, and not anew with each request."""
    url = serving(Server(runtime, "built-in", limits=Limits(stalled_seconds=1.0)))

    def ask() -> httpx.Response:
        return httpx.post(f"{url}/v1/completions", json={**GREEDY, "prompt": QUESTIONS[0]}, timeout=30)

    assert httpx.get(f"{url}/health").status_code == 200
    time.sleep(1.1)
    with ThreadPoolExecutor(9) as threads:
        with held(runtime):
            asked = [threads.submit(ask)]
            until(lambda: runtime.has_work)
            assert httpx.get(f"{url}/health").status_code == 200
            for _ in range(8):
                time.sleep(0.15)
                asked.append(threads.submit(ask))
            stalled = httpx.get(f"{url}/health")
        assert (stalled.status_code, stalled.json()["status"][:11]) == (503, "no pass for")
        assert [one.result().status_code for one in asked] == [200] * 9
    assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_a_server_that_ends(path: str, serving: Serving, runtime: Runtime) -> None:
    server = Server(runtime, "built-in")
    url, server.draining = serving(server), True
    response = httpx.post(f"{url}{path}", json={})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "draining")
    health = httpx.get(f"{url}/health")
    assert (health.status_code, health.json()["status"]) == (503, "the server ends, and takes no more requests")


def test_an_engine_that_is_lost(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(batch: Any) -> Any:
        raise RuntimeError("an illegal memory access was encountered")

    with Runtime(device="cpu", max_total_tokens=2000) as lost:
        url = serving(Server(lost, "built-in"))
        monkeypatch.setattr(lost.parts.engine.runner, "launch", fail)
        monkeypatch.setattr(ModelRunner, "check_device", failing_device.say_lost)
        for _ in range(2):
            response = httpx.post(f"{url}/v1/completions", json={**GREEDY, "prompt": "a"})
            assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_lost")
        assert httpx.post(f"{url}/tokenize", json={"prompt": "a"}).status_code == 503
        health = httpx.get(f"{url}/health")
        assert health.status_code == 503
        assert "go on in a new process" in health.json()["status"]


def test_a_step_on_its_way_is_no_loss(serving: Serving, runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    url, launch, told = serving(), runtime.parts.engine.runner.launch, []

    def watched(batch: Any) -> Any:
        told.append(httpx.get(f"{url}/health").status_code)
        return launch(batch)

    monkeypatch.setattr(runtime.parts.engine.runner, "launch", watched)
    assert httpx.post(f"{url}/v1/completions", json={**GREEDY, "prompt": "a"}, timeout=30).status_code == 200
    assert set(told) == {200}
