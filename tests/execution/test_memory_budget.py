"""The largest pass, by which memory is measured, and how many slots fit beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from memory_pool.layout import Layout
from memory_pool.req_to_token_pool import ReqToTokenPool
from memory_pool.state_pool import state_parts
from memory_pool.token_to_kv_pool import TokenToKVPool, kv_part
from radixrt import ParameterError, Runtime
from radixrt.execution import executor, memory_budget
from radixrt.execution.memory_budget import (
    host_pool_sizes,
    largest_pass,
    pool_slots,
    room_for_passes,
)
from radixrt.execution.model_runner import ModelRunner, Tuning
from radixrt.execution.sampling import sampler
from radixrt.limits import PassLimits, requests_at_once
from radixrt.models.loader import load_model
from tests.support.checkpoints import VOCAB_SIZE, llama, write

LIMITS = [  # requests, prompt tokens of a pass, context
    (1, 1, 2),
    (1, 40, 256),
    (1, 600, 256),  # as one request's longest prompt
    (6, 40, 256),
    (6, 40, 41),
    (6, 40, 40),  # a chunk, and a prompt of one token
    (6, 100, 31),
    (3, 100, 31),  # too few requests for as many tokens
    (70, 300, 256),
    (5, 1, 256),
    (3, 16, 2),
]

SLOT_OF_1000 = Layout((kv_part(5, 2, 25, torch.bfloat16),))  # bytes


def new_tokens(requests: int, chunk: int, context: int) -> int:
    return min(chunk, requests * (context - 1))


@pytest.mark.parametrize(("requests", "chunk", "context"), LIMITS)
def test_it_is_at_all_limits_and_not_beyond(requests: int, chunk: int, context: int) -> None:
    limits = PassLimits(requests, chunk)
    batch = largest_pass(limits, context)
    assert batch.num_rows == requests
    assert batch.num_samples.sum() == limits.max_samples == 2 * requests
    assert batch.num_samples.min() >= 1
    new = batch.seq_lens - batch.prefix_lens
    assert new.max() <= context - 1
    prompts = new[batch.num_scored > 0]
    assert prompts.sum() == len(batch.scored) == new_tokens(requests, chunk, context)
    assert (new[len(prompts) :] == 1).all(), "the others decode"
    assert new.sum() == len(batch.input_ids) == len(batch.out_cache_loc)
    extends = new > 1
    assert extends[: batch.num_extends].all()
    assert extends.sum() == batch.num_extends
    assert batch.num_scored.sum() == len(batch.scored_targets)
    assert len(set(batch.req_pool_indices.tolist())) == requests
    arrays = (batch.seq_lens, batch.prefix_lens, batch.input_ids, batch.out_cache_loc, batch.num_samples)
    assert {array.dtype for array in arrays} == {np.dtype(np.int32)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(llama(), tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize(("requests", "chunk", "context"), LIMITS)
def test_it_runs_and_does_all_that_takes_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch, requests: int, chunk: int, context: int
) -> None:
    cpu = torch.device("cpu")
    model, _ = load_model(folder, device=cpu, context_length=context)
    pool = TokenToKVPool(2, model.kv_layout(torch.float32), device=cpu)
    pool.fill(0.0)
    rows: dict[str, int] = {}

    def watch(module: Any, name: str, filters: tuple[str, ...] = ()) -> None:
        op = getattr(module, name)

        def watched(logits: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
            assert all(keywords[each] is not None for each in filters)
            rows[name] = max(rows.get(name, 0), len(logits))
            return op(logits, *arguments, **keywords)

        monkeypatch.setattr(module, name, watched)

    watch(sampler, "sample", ("top_ks", "top_ps", "min_ps"))
    watch(sampler, "apply_penalties")
    watch(sampler, "filtered_logits", ("top_ks", "top_ps", "min_ps"))
    watch(sampler, "token_logprobs")
    watch(executor, "token_logprobs")
    rows_of_pool = ReqToTokenPool(requests + 1, context)
    runner = ModelRunner(model, rows_of_pool, pool, cpu, tuning=Tuning(max_scored_at_once=32))
    limits = PassLimits(requests, chunk)
    result = runner.collect(runner.launch(largest_pass(limits, context)))
    scored = new_tokens(requests, chunk, context)
    assert rows["sample"] == rows["apply_penalties"] == rows["filtered_logits"] == limits.max_samples
    assert rows["token_logprobs"] == max(limits.max_samples, min(scored, 32))
    assert result.token_ids.shape == (limits.max_samples,)
    assert ((result.token_ids >= 0) & (result.token_ids < VOCAB_SIZE)).all()
    assert result.finite.shape == (requests,)
    assert result.finite.all()
    assert result.logprobs is not None
    assert result.prompt_logprobs is not None
    assert result.logprobs.top.shape == (limits.max_samples, 20)
    assert result.prompt_logprobs.top.shape == (scored, 20)
    assert np.isfinite(result.prompt_logprobs.chosen).all()


# --- slots ---


class Memory(NamedTuple):
    available: int
    total: int = 2**40


@pytest.fixture(params=["cpu", "cuda"])
def million_free(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device of which a million bytes are said to be free."""
    monkeypatch.setattr(memory_budget.psutil, "virtual_memory", lambda: Memory(1_000_000))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1_000_000, 9_000_000))
    return torch.device(request.param)


def test_passes_come_first(million_free: torch.device) -> None:
    def slots(fraction: float, promised: int = 0) -> int:
        return pool_slots(million_free, 1000, memory_fraction=fraction, max_total_tokens=None, promised=promised)

    assert slots(1.0) == 1000
    assert slots(0.5) == 500
    assert slots(1.0, 300_000) == 700
    assert slots(0.5, 300_000) == 350
    assert slots(1.0, 998_000) == 2
    for promised in (998_001, 1_000_000, 5_000_000):
        with pytest.raises(ParameterError) as error:
            slots(1.0, promised)
        assert str(error.value) == (
            f"memory_fraction is 1: of 1,000,000 free bytes, of which passes need {promised:,}, that is less than "
            "a KV slot of 1,000 bytes needs"
        )
    with pytest.raises(ParameterError, match=r"^memory_fraction is 0.001: of 1,000,000 free bytes, that is less"):
        slots(0.001)


def test_who_names_a_number_gets_it(million_free: torch.device) -> None:
    """What passes need is not looked at; one slot more is the reserved one."""

    def slots(most: int) -> int:
        return pool_slots(million_free, 1000, memory_fraction=0.1, max_total_tokens=most, promised=10**9)

    assert slots(1) == 2
    assert slots(999) == 1000
    with pytest.raises(ParameterError, match="max_total_tokens is 1000; it must be a whole number from 1 to 999"):
        slots(1000)


def test_the_host_s_pool_leaves_what_is_promised(million_free: torch.device) -> None:
    for nothing in (None, 0.0):
        assert host_pool_sizes(nothing, SLOT_OF_1000, promised=10**9) == (0, 0)
    assert host_pool_sizes(0.001, SLOT_OF_1000, promised=0) == (1000, 0)
    assert host_pool_sizes(0.001, SLOT_OF_1000, promised=0, num_ranks=4) == (250, 0)
    assert host_pool_sizes(0.0004, SLOT_OF_1000, promised=600_000) == (400, 0)
    with pytest.raises(ParameterError, match=r"host_memory_gb is 0.0005; it must be a number from 0 to 0.0004"):
        host_pool_sizes(0.0005, SLOT_OF_1000, promised=600_000)
    with pytest.raises(ParameterError, match=r"host_memory_gb is 0.0005; it must be a number from 0 to 0"):
        host_pool_sizes(0.0005, SLOT_OF_1000, promised=2_000_000)


def test_a_quarter_of_the_host_s_pool_is_for_states(million_free: torch.device) -> None:
    states = state_parts(1, (100,), 6, (1, 25, 25), torch.bfloat16)  # 3,500 bytes each
    layout = replace(SLOT_OF_1000, sequences=states)
    assert host_pool_sizes(0.0009, layout, promised=0) == (900 - 224, 64)
    assert host_pool_sizes(0.000028, layout, promised=0) == (21, 2)
    with pytest.raises(ParameterError, match="slots of 1,000 bytes and, in a quarter of it, two states of 3,5"):
        host_pool_sizes(0.000027, layout, promised=0)


def test_a_pool_on_the_cpu_is_promised_to_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system counts its memory as free until it is written to."""
    monkeypatch.setattr(memory_budget.psutil, "virtual_memory", lambda: Memory(40_000_000))
    options: dict[str, Any] = {"device": "cpu", "memory_fraction": 0.5}
    with pytest.raises(ParameterError, match=r"host_memory_gb is 0.021; it must be a number from 0 to 0.02"):
        Runtime(folder, host_memory_gb=0.021, **options)
    with Runtime(folder, host_memory_gb=0.019, **options) as runtime:
        assert runtime.cache_stats().host_capacity > 0


# --- whether there are graphs ---


@pytest.mark.parametrize("options", [{"device": "cpu"}, {"device": "cpu", "impl": "torch"}])
def test_graphs_capture_kernels_on_a_gpu(folder: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match="cuda_graphs is True, but only kernels on a GPU can be captured"):
        Runtime(folder, max_total_tokens=100, cuda_graphs=True, **options)
    for nothing in (None, False):
        with Runtime(folder, max_total_tokens=100, cuda_graphs=nothing, **options) as runtime:
            assert len(runtime.generate([5], {"max_new_tokens": 3, "ignore_eos": True}).token_ids) == 3


def test_too_little_memory_names_the_remedies() -> None:
    remedies = r"chunked_prefill_size.*cuda_graphs=False.*Tried to allocate 2 GiB"
    with pytest.raises(ParameterError, match=remedies), room_for_passes():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nand more")
    with pytest.raises(RuntimeError, match="something else"), room_for_passes():
        raise RuntimeError("something else")


# --- requests at once ---


@pytest.mark.parametrize(
    ("gigabytes", "bytes_per_slot", "context", "vocab", "count"),
    [
        (120, 131_072, 131_072, 128_256, 2048),  # Llama-3.1-8B on an H200
        (58, 131_072, 131_072, 128_256, 1024),  # on an H100
        (5, 131_072, 131_072, 128_256, 512),  # on a card of 24 GB
        (120, 114_688, 40_960, 151_936, 2048),  # Qwen3-0.6B on an H200
        (120, 114_688, 2**20, 151_936, 1024),  # long contexts want long tables
        (120, 2_000_000, 4096, 32_000, 512),  # large slots: a pool of few tokens
        (1, 256, 128, 64, 2048),
        (0, 256, 128, 64, 512),  # never fewer
    ],
)
def test_as_many_requests_run_at_once_as_memory_allows(
    gigabytes: int, bytes_per_slot: int, context: int, vocab: int, count: int
) -> None:
    free, sizes = gigabytes * 10**9, {"context_length": context, "vocab_size": vocab}
    assert requests_at_once(2048, free, free, bytes_per_slot, **sizes) == count
    # With a pool that is given, what it leaves must do.
    assert requests_at_once(2048, free, int(0.99 * free), bytes_per_slot, **sizes) <= count
    assert requests_at_once(2048, free, 1000 * bytes_per_slot, bytes_per_slot, **sizes) == 512


def test_a_pool_that_leaves_little_leaves_room_for_few_requests() -> None:
    """Llama-3.1-8B on an H200 whose pool takes 95 % of what is free."""
    sizes = {"context_length": 131_072, "vocab_size": 128_256}
    assert requests_at_once(2048, 120 * 10**9, 114 * 10**9, 131_072, **sizes) == 1024
    assert requests_at_once(2048, 120 * 10**9, 100 * 10**9, 131_072, **sizes) == 2048
