"""From packed words to logits, and from logits to tokens: the same in a graph and kernel by kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from memory_pool.req_to_token_pool import ReqToTokenPool
from memory_pool.token_to_kv_pool import TokenToKVPool
from radixrt.execution.executor import Drawn, Executor, Forward
from radixrt.execution.graphs import PassShape
from radixrt.execution.pass_builder import PassBuilder
from radixrt.models.decoder import Decoder
from radixrt.models.loader import load_model
from radixrt.schedule.passes import Features, Pass, SamplingInputs
from tests.support.checkpoints import VOCAB_SIZE, llama, write
from tests.support.passes import plain_pass
from tests.support.recomputing import Recomputing, planner_on_cpu

CPU = torch.device("cpu")
MAX_REQUESTS, CONTEXT = 6, 64
SHAPES = [PassShape(0, 2, 0), PassShape(0, 6, 0), PassShape(32, 6, 7)]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = write(llama(seed=3, max_position_embeddings=CONTEXT), tmp_path_factory.mktemp("llama"))
    return load_model(folder, device=CPU, dtype=torch.float32)[0]


class Computer:
    """Builds and computes passes, of which those that fit are captured unless `is_eager`."""

    def __init__(self, model: Decoder, *, is_eager: bool, max_scored_at_once: int = 512) -> None:
        config = model.config
        self.rows = ReqToTokenPool(MAX_REQUESTS, CONTEXT)
        self.pool = TokenToKVPool(500, model.kv_layout(torch.float32), device=CPU)
        self.pool.fill(float("nan"))
        planner, shapes = planner_on_cpu(config, self.rows.req_to_token), [] if is_eager else SHAPES
        self.builder = PassBuilder(planner, shapes, MAX_REQUESTS)
        self.executor = Executor(model, self.rows, self.pool, max_scored_at_once)
        self.is_eager = is_eager
        if not is_eager:
            with torch.inference_mode():
                idle = [self.builder.idle(key) for key in self.builder.keys(reversed(SHAPES))]
                self.executor.reserve(idle, Recomputing(CPU))
                for each in idle:
                    self.executor.capture(each)

    def forward(self, pass_: Pass) -> Forward:
        packed = self.builder.build(pass_)
        assert (packed.key is None) == self.is_eager
        with torch.inference_mode():
            return self.executor.forward(pass_, packed)

    def run(self, pass_: Pass) -> tuple[Forward, Drawn]:
        forward = self.forward(pass_)
        with torch.inference_mode():
            drawn = self.executor.draw(forward)
        return forward, replace(drawn, token_ids=drawn.token_ids.clone(), finite=drawn.finite.clone())


ROWS = [4, 1, 3]
PROMPTS = plain_pass(ROWS, [0, 0, 0], [9, 5, 1])


def decodes(step: int, **changes: Any) -> Pass:
    """The pass after `step` others of the same requests."""
    lens, rows = np.array([10, 6, 2], np.int32) + np.int32(step), np.array(ROWS, np.int32)
    slots = np.arange(3, dtype=np.int32) + np.int32(20 + 3 * step)
    return plain_pass(rows, lens - 1, lens, input_ids=-(rows + 1), out_cache_loc=slots, **changes)


PASSES = [PROMPTS, *(decodes(step) for step in range(4))]


def draws_of(**arrays: Any) -> SamplingInputs:
    features = Features(is_random=True)
    plain = {
        "temperatures": np.full(3, 0.7, np.float32),
        "seeds": np.arange(3, dtype=np.int64),
        "sample_indices": np.zeros(3, np.int32),
        "draw_positions": np.full(3, 9, np.int32),
    }
    return SamplingInputs(np.arange(3, dtype=np.int32), features, None, None, plain | arrays)


def test_a_captured_pass_computes_what_the_kernels_do(loaded: Decoder) -> None:
    eager, captured = (Computer(loaded, is_eager=is_eager) for is_eager in (True, False))
    for pass_ in [*PASSES, decodes(4, sampling=draws_of())]:
        (forward, drawn), (other, others) = eager.run(pass_), captured.run(pass_)
        torch.testing.assert_close(other.logits, forward.logits, rtol=1e-4, atol=1e-5)
        assert forward.logits.shape == (3, VOCAB_SIZE)
        assert torch.equal(others.token_ids, drawn.token_ids)
        assert others.finite.tolist() == drawn.finite.tolist() == [True] * 3
        assert torch.equal(captured.executor.last_token[ROWS], eager.executor.last_token[ROWS])
        assert torch.equal(eager.executor.last_token[ROWS], drawn.token_ids)
        assert torch.equal(captured.executor.req_to_token[ROWS], eager.executor.req_to_token[ROWS])


@pytest.mark.parametrize("is_eager", [True, False])
@pytest.mark.parametrize("pass_", PASSES[:2], ids=["extends", "decodes"])
def test_a_mask_may_come_between_logits_and_draw(loaded: Decoder, is_eager: bool, pass_: Pass) -> None:
    """As that of a grammar does: tokens are drawn from the logits as they are then."""
    computer = Computer(loaded, is_eager=is_eager)
    if pass_ is not PROMPTS:
        computer.run(PROMPTS)
    forward = computer.forward(pass_)
    allowed = [7, 11, 13]
    with torch.inference_mode():
        for row, token in enumerate(allowed):
            forward.logits[row] = -float("inf")
            forward.logits[row, token] = 1.0
        assert computer.executor.draw(forward).token_ids.tolist() == allowed
    assert computer.executor.last_token[ROWS].tolist() == allowed


@pytest.mark.parametrize("is_eager", [True, False])
@pytest.mark.parametrize("pass_", PASSES[:2], ids=["extends", "decodes"])
def test_masks_come_before_the_draws_and_leave_log_probabilities(
    loaded: Decoder, is_eager: bool, pass_: Pass
) -> None:
    """Those of some rows; log-probabilities are of the model's own logits. What is not finite is told."""
    computer = Computer(loaded, is_eager=is_eager)
    rows, every = np.array([0, 2], np.int32), np.arange(3, dtype=np.int32)
    if pass_ is not PROMPTS:
        computer.run(PROMPTS)
    arrays = {"masked_rows": rows, "logprob_rows": every}
    pass_ = replace(pass_, sampling=SamplingInputs(every, Features(), None, 0, arrays, rows))
    forward = computer.forward(pass_)
    with torch.inference_mode():
        forward.logits[1, 11], forward.logits[2, 20] = 1e9, float("nan")
        before = forward.logits.clone()
        masks = computer.executor.mask_memory(2, -(-VOCAB_SIZE // 32))
        masks[:] = 0
        masks[0, 0] = masks[1, 0] = 1 << 7
        drawn = computer.executor.draw(forward, masks)
    assert drawn.token_ids.tolist()[:2] == [7, 11]
    assert drawn.finite.tolist() == [True, True, False]
    chosen = before.log_softmax(-1).gather(1, drawn.token_ids.long().unsqueeze(1)).flatten()
    torch.testing.assert_close(drawn.logprobs[0][:2], chosen[:2])
    assert computer.executor.last_token[ROWS[:2]].tolist() == [7, 11]


@pytest.mark.parametrize("is_eager", [True, False])
def test_logits_that_are_not_finite_are_told(loaded: Decoder, is_eager: bool) -> None:
    """Though the hidden state is."""
    computer = Computer(loaded, is_eager=is_eager)
    for pass_ in PASSES[:2]:
        forward = computer.forward(pass_)
        with torch.inference_mode():
            forward.logits[1, 9] = float("nan")
            assert computer.executor.draw(forward).finite.tolist() == [True, False, True]


@pytest.mark.parametrize("is_eager", [True, False])
def test_rows_that_are_not_finite_are_told_whether_they_sample_or_not(loaded: Decoder, is_eager: bool) -> None:
    computer = Computer(loaded, is_eager=is_eager)
    weights = loaded.embedding.weight
    before = weights[3].clone()
    with torch.no_grad():
        weights[3] = float("nan")
    try:
        none = np.zeros(0, np.int32)
        chunk = replace(
            PROMPTS,
            input_ids=np.where(np.arange(15) == 13, 3, 5).astype(np.int32),  # of the second request
            num_samples=np.array([1, 0, 1], np.int32),
            sampling=SamplingInputs(np.array([0, 2], np.int32), Features(), None, None, {}),
        )
        assert computer.run(chunk)[1].finite.tolist() == [True, False, True]
        nobody = replace(
            chunk, num_samples=chunk.num_samples * 0, sampling=replace(chunk.sampling, logits_rows=none)
        )
        drawn = computer.run(nobody)[1]
        assert drawn.finite.tolist() == [True, False, True]
        assert not len(drawn.token_ids)
        computer.run(replace(PROMPTS, input_ids=PROMPTS.input_ids + np.int32(3)))
        ids = np.array([5, 3, 5], np.int32)
        forward, drawn = computer.run(replace(decodes(0), input_ids=ids))
        assert (forward.finite is None) != is_eager, "the draw tells"
        assert drawn.finite.tolist() == [True, False, True]
    finally:
        with torch.no_grad():
            weights[3] = before


def test_a_long_pass_between_replays_harms_none(loaded: Decoder) -> None:
    """It takes the words of the others' buffer, or more than that has."""
    computer, expected = Computer(loaded, is_eager=False), Computer(loaded, is_eager=False)
    slots = np.arange(100, 140, dtype=np.int32)
    for pass_ in PASSES:
        with torch.inference_mode():
            many = plain_pass([0], [0], [40], out_cache_loc=slots)
            packed = computer.builder.build(many)
            assert packed.key is None
            words = np.append(packed.words, np.zeros(200_000, np.int32))
            computer.executor.forward(many, replace(packed, words=words))
        drawn = computer.run(pass_)[1]
        assert torch.equal(drawn.token_ids, expected.run(pass_)[1].token_ids)


@pytest.mark.parametrize("max_scored_at_once", [1, 4, 100])
def test_scores_are_the_same_however_many_are_computed_at_once(loaded: Decoder, max_scored_at_once: int) -> None:
    scored = np.array([0, 3, 4, 7, 9, 14], np.int32)
    targets = scored + np.int32(2)
    pass_ = replace(PROMPTS, scored=scored, scored_targets=targets, num_scored=scored[:3], num_top_scored=3)
    computer = Computer(loaded, is_eager=True, max_scored_at_once=max_scored_at_once)
    forward = computer.forward(pass_)
    with torch.inference_mode():
        scores = computer.executor.score(forward)
        assert forward.hidden is not None
        expected = loaded.compute_logits(forward.hidden, torch.from_numpy(scored)).log_softmax(-1)
    chosen, ranks, top_ids, top = scores
    torch.testing.assert_close(chosen, expected[torch.arange(6), torch.from_numpy(targets).long()])
    torch.testing.assert_close(top, expected.topk(3).values)
    assert torch.equal(top_ids.long(), expected.topk(3).indices)
    assert ranks.shape == (6,)
    forward = computer.forward(PROMPTS)
    assert computer.executor.score(forward) == ()
