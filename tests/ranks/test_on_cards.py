"""Ranks and stages on two, four and eight cards: beside one, and when one is lost."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from radixrt.errors import DeviceLostError
from radixrt.output import RequestOutput
from radixrt.runtime import Runtime
from radixrt.sampling_params import SamplingParams
from tests.models.test_hybrid import answers, tree
from tests.ranks.test_ranks import LINES, PARAMS, none_left, ranks_of_this_process, tokens_of
from tests.support import checkpoints

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.whole_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two cards"),
]
HEADS = {"head_dim": 64, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
HYBRIDS: dict[str, Callable[[], Any]] = {
    "qwen3.5": partial(checkpoints.qwen3_5, **HEADS),
    "qwen3.5-moe": partial(checkpoints.qwen3_5_moe, **HEADS),
    "lfm2-moe": checkpoints.lfm2_moe,
    "granite4-moe": partial(checkpoints.granite4_hybrid_moe, mamba_n_groups=1),
    "nemotron-h-moe": checkpoints.nemotron_h_moe,
}
TWO = pytest.mark.parametrize("two", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
FOUR_CARDS = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="there are no four cards")
FOUR = pytest.mark.parametrize(
    "four", [{"tensor_parallel_size": 4}, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}]
)
EIGHT_CARDS = pytest.mark.skipif(torch.cuda.device_count() < 8, reason="there are no eight cards")
LLAMA = {"hidden_size": 1024, "num_attention_heads": 8, "num_hidden_layers": 8, "initializer_range": 0.05}
POOLS = pytest.mark.parametrize("pool", [{}, {"max_total_tokens": 700, "host_memory_gb": 0.01}])


def runtime(**options: Any) -> Runtime:
    told: dict[str, Any] = {"dtype": "bfloat16", "max_total_tokens": 20_000} | options
    return Runtime(device="cuda", **told)


def check_answers(cards: dict[str, int], **options: Any) -> None:
    lines, params = LINES * 20, PARAMS * 20
    with runtime(**options) as one:
        expected = tokens_of(one.generate(lines, params))
    with none_left(), runtime(**cards, **options) as all_of_them:
        for _ in range(2):
            assert tokens_of(all_of_them.generate(lines, params)) == expected


@TWO
@POOLS
def test_answers_are_those_of_one_card(two: dict[str, int], pool: dict[str, Any]) -> None:
    """Cold and warm, also where KV has to go to the host and back."""
    check_answers(two, **pool)


@FOUR_CARDS
@FOUR
@POOLS
def test_answers_of_four_are_those_of_one_card(four: dict[str, int], pool: dict[str, Any]) -> None:
    """In float32: in bf16 sums of four parts are rounded otherwise than one product's."""
    check_answers(four, **pool, dtype="float32")


@EIGHT_CARDS
@pytest.mark.parametrize(("ranks", "stages"), [(8, 1), (4, 2), (2, 4)])
def test_answers_of_eight_are_those_of_one_card(ranks: int, stages: int, tmp_path: Path) -> None:
    folder = checkpoints.write(checkpoints.llama(**LLAMA, num_key_value_heads=8), tmp_path)
    options: dict[str, Any] = {"model": folder, "dtype": "float32", "max_total_tokens": 4000}
    with runtime(**options) as one:
        expected = answers(one, tree(depth=3))
    shape = {"tensor_parallel_size": ranks, "pipeline_parallel_size": stages}
    with none_left(), runtime(**shape, **options) as all_of_them:
        assert [answers(all_of_them, tree(depth=3)) for _ in range(2)] == [expected] * 2


@FOUR_CARDS
@FOUR
def test_four_have_the_same_bits_whatever_runs_beside(four: dict[str, int]) -> None:
    """Deterministic, in bf16: all at once, and then one by one in another order, from an empty cache."""
    params = SamplingParams(max_new_tokens=30, temperature=0.0, logprobs=2)
    lines = [f"{line} {k}" for k in range(12) for line in LINES]

    def bits(output: RequestOutput) -> list[Any]:
        return [(answer.token_ids, answer.logprobs) for answer in output.outputs]

    with none_left(), runtime(**four, deterministic=True) as all_of_them:
        together = [bits(output) for output in all_of_them.generate(lines, params)]
        all_of_them.flush_cache()
        alone = [bits(all_of_them.generate(line, params)) for line in reversed(lines)]
    assert alone[::-1] == together


@TWO
@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids(name: str, two: dict[str, int], tmp_path: Path) -> None:
    """Prompts that part at many places, cold and warm, in float32; from the host, and from kept caches."""
    folder, asked = checkpoints.write(HYBRIDS[name](), tmp_path), tree(depth=3)
    options: dict[str, Any] = {"model": folder, "device": "cuda", "dtype": "float32", "max_total_tokens": 4000}
    paths, small = (tmp_path / "one", tmp_path / "two"), {"max_total_tokens": 220, "host_memory_gb": 0.01}
    with Runtime(**options) as one:
        expected = answers(one, asked)
        saved = one.save_cache(paths[0])
    with none_left(), Runtime(**two, **options) as both:
        assert [answers(both, asked) for _ in range(2)] == [expected] * 2
        both.flush_cache()
        assert both.load_cache(paths[0]) == saved
        assert answers(both, asked) == expected
    with none_left(), Runtime(**two, **options | small) as both:
        assert [answers(both, asked) for _ in range(2)] == [expected] * 2
        assert both.cache_stats().state_loaded >= 5
        both.save_cache(paths[1])
    with Runtime(**options) as one:
        assert one.load_cache(paths[1]) > small["max_total_tokens"]
        assert answers(one, asked) == expected


@TWO
@pytest.mark.parametrize("lost_by", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_lost_ends_all(two: dict[str, int], lost_by: signal.Signals) -> None:
    """Within 30 s of being lost, and no process is left."""
    with none_left():
        both, began = runtime(**two), 0.0
        (rank,) = ranks_of_this_process()

        def lose() -> None:
            nonlocal began
            time.sleep(1)
            began = time.monotonic()
            os.kill(rank.pid, lost_by)

        thread = threading.Thread(target=lose)
        thread.start()
        with pytest.raises(DeviceLostError, match="rank 1 of 2"):
            both.generate(LINES * 800, SamplingParams(max_new_tokens=200, ignore_eos=True))
        assert time.monotonic() - began < 30
        thread.join()
        both.close()
        assert time.monotonic() - began < 35
