"""Ranks and stages on two cards: beside one, and when one is lost."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from radixrt.errors import DeviceLostError
from radixrt.runtime import Runtime
from radixrt.sampling_params import SamplingParams
from tests.models.test_hybrid import MODELS, answers, tree
from tests.ranks.test_ranks import LINES, PARAMS, none_left, ranks_of_this_process, tokens_of
from tests.support import checkpoints

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.whole_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two cards"),
]
TWO = pytest.mark.parametrize("two", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])


def runtime(**options: Any) -> Runtime:
    return Runtime(device="cuda", dtype="bfloat16", **({"max_total_tokens": 20_000} | options))


@TWO
@pytest.mark.parametrize("pool", [{}, {"max_total_tokens": 700, "host_memory_gb": 0.01}])
def test_answers_are_those_of_one_card(two: dict[str, int], pool: dict[str, Any]) -> None:
    """Cold and warm, also where KV has to go to the host and back."""
    lines, params = LINES * 20, PARAMS * 20
    with runtime(**pool) as one:
        expected = tokens_of(one.generate(lines, params))
    with none_left(), runtime(**two, **pool) as both:
        for _ in range(2):
            assert tokens_of(both.generate(lines, params)) == expected


@TWO
@pytest.mark.parametrize("name", MODELS)
def test_hybrids(name: str, two: dict[str, int], tmp_path: Path) -> None:
    """Prompts that part at many places, cold and warm, in float32."""
    folder, asked = checkpoints.write(MODELS[name](), tmp_path), tree(depth=3)
    options = {"model": folder, "device": "cuda", "dtype": "float32", "max_total_tokens": 4000}
    with Runtime(**options) as one:
        expected = answers(one, asked)
    with none_left(), Runtime(**two, **options) as both:
        assert [answers(both, asked) for _ in range(2)] == [expected] * 2


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
