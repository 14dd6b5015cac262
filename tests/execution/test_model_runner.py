"""A runner of passes: launch, collect, and what is in flight between."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from memory_pool.req_to_token_pool import ReqToTokenPool
from memory_pool.token_to_kv_pool import TokenToKVPool
from radixrt.execution.graphs import CAPTURED_DRAWS, PassShape, captured_shapes, ladder
from radixrt.execution.model_runner import ModelRunner, Tuning
from radixrt.execution.pass_builder import PassKey
from radixrt.limits import NO_PASSES, PassLimits
from radixrt.models.decoder import Decoder
from radixrt.models.loader import load_model
from tests.support.checkpoints import llama, write
from tests.support.passes import plain_pass
from tests.support.recomputing import Recomputing, planner_on_cpu

CPU = torch.device("cpu")
MAX_REQUESTS, CONTEXT, TOKENS, NUM_SLOTS = 5, 64, 24, 200


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = write(llama(seed=3, max_position_embeddings=CONTEXT), tmp_path_factory.mktemp("llama"))
    return load_model(folder, device=CPU, dtype=torch.float32)[0]


def runner_of(model: Decoder, *, captures: bool) -> ModelRunner:
    config, rows = model.config, ReqToTokenPool(MAX_REQUESTS, CONTEXT)
    pool = TokenToKVPool(NUM_SLOTS, model.kv_layout(torch.float32), device=CPU)
    tuning = Tuning(
        token_sizes=(8, TOKENS), recorder=Recomputing, planner=planner_on_cpu(config, rows.req_to_token)
    )
    captured = PassLimits(MAX_REQUESTS, TOKENS) if captures else NO_PASSES
    return ModelRunner(model, rows, pool, CPU, captured=captured, tuning=tuning)


PROMPTS = plain_pass([2, 0, 4], [0, 0, 0], [7, 3, 1])
ROWS, LENS = np.array([2, 0, 4], np.int32), np.array([8, 4, 2], np.int32)
DECODES = [
    plain_pass(ROWS, LENS + i - 1, LENS + i, input_ids=-(ROWS + 1), out_cache_loc=ROWS + np.int32(20 + 10 * i))
    for i in range(5)
]


@pytest.mark.parametrize("max_in_flight", [0, 1, 2])
def test_results_are_each_pass_s_own_however_many_are_in_flight(model: Decoder, max_in_flight: int) -> None:
    """Captured or not; what one pass found stays when others have used its memory."""
    outcomes = []
    for captures in (False, True):
        runner = runner_of(model, captures=captures)
        results, flying = [], []
        for pass_ in [PROMPTS, *DECODES]:
            flying.append(runner.launch(pass_))
            if len(flying) > max_in_flight:
                results.append(runner.collect(flying.pop(0)))
        results += [runner.collect(handle) for handle in flying]
        outcomes.append([result.token_ids.tolist() for result in results])
        assert all(result.finite.tolist() == [True] * 3 for result in results)
        assert all(result.accepted.tolist() == [1] * 3 for result in results)
        assert runner.copies.num_allocated <= 2 * (1 + max_in_flight)  # tokens and flags of each
    assert outcomes[0] == outcomes[1]
    assert len(set(map(tuple, outcomes[0]))) > 2


def names_of(runner: ModelRunner) -> tuple[set[PassShape], set[object]]:
    """What is captured: shapes of forward passes, and draws."""
    graphs = runner.executor.graphs.keys()
    forwards = {key for key in graphs if isinstance(key, PassKey)}
    return {key.shape for key in forwards}, graphs - forwards


def test_the_largest_are_captured_first_and_others_when_passes_come(model: Decoder) -> None:
    """Each once, with the draws that the pass needs, and whatever is left when somebody asks for that."""
    runner = runner_of(model, captures=True)
    runner.capture_largest()
    largest = PassShape(0, MAX_REQUESTS, 0)
    shapes, draws = names_of(runner)
    assert shapes == {largest, PassShape(TOKENS, MAX_REQUESTS, MAX_REQUESTS + 1)}
    assert draws == {(largest, features) for features in CAPTURED_DRAWS}

    eager, grown = runner_of(model, captures=False), list[dict[object, object]]()
    for _ in range(2):
        for pass_ in [PROMPTS, *DECODES]:
            found = [each.collect(each.launch(pass_)).token_ids.tolist() for each in (runner, eager)]
            assert found[0] == found[1]
        grown.append(dict(runner.executor.graphs))
    assert grown[0] == grown[1]
    small = PassShape(0, 4, 0)
    assert names_of(runner) == (shapes | {small}, draws | {(small, CAPTURED_DRAWS[0])})

    left = runner.num_uncaptured
    assert [runner.capture_next() for _ in range(left + 2)] == [True] * left + [False] * 2
    assert runner.num_uncaptured == 0
    num_weights = sum(weight.numel() for weight in model.parameters())
    assert names_of(runner)[0] == set(captured_shapes(MAX_REQUESTS, TOKENS, num_weights, (8, TOKENS)))
    sizes = ladder(MAX_REQUESTS)
    assert names_of(runner)[1] == {(PassShape(0, size, 0), each) for size in sizes for each in CAPTURED_DRAWS}
    assert grown[0].items() <= runner.executor.graphs.items()


def test_without_limits_there_are_no_graphs(model: Decoder) -> None:
    runner = runner_of(model, captures=False)
    runner.capture_largest()
    assert not runner.capture_next()
    assert not runner.executor.graphs


def test_a_pass_that_is_too_long_for_graphs_has_room_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is sent in many more words than graphs read, and leaves theirs alone."""
    length = 1000
    folder = write(llama(seed=3, max_position_embeddings=2 * length), tmp_path)
    model, _ = load_model(folder, device=CPU, dtype=torch.float32)
    monkeypatch.setitem(globals(), "MAX_REQUESTS", 2)
    monkeypatch.setitem(globals(), "CONTEXT", 2 * length)
    monkeypatch.setitem(globals(), "NUM_SLOTS", 2 * length)
    long = plain_pass([0], [0], [length], input_ids=np.arange(length, dtype=np.int32) % 20 + 1)
    ids, slots = np.array([-1], np.int32), np.array([1500], np.int32)
    after = plain_pass([0], [length], [length + 1], input_ids=ids, out_cache_loc=slots)
    found = []
    for captures in (False, True):
        runner = runner_of(model, captures=captures)
        found.append([runner.collect(runner.launch(pass_)).token_ids.tolist() for pass_ in (long, after, after)])
    assert found[0] == found[1]
