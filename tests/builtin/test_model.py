"""The built-in model through the Runtime: its answers are right only if every KV slot is."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from radixrt import FinishReason, RequestOutput, Runtime, SamplingParams
from radixrt.builtin.task import EVAL_SEED, Question, ask_alone, ask_few_shot, make_document
from radixrt.cache.radix_tree import RadixTree

pytestmark = pytest.mark.usefixtures("device")

GREEDY = SamplingParams(temperature=0, max_new_tokens=8)


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    """200 questions about held-out documents of 128, 256 and 512 tokens, alone and few-shot."""
    rng = random.Random(EVAL_SEED)
    out: list[Question] = []
    for max_tokens, count in ((128, 20), (256, 24), (512, 56)):
        document = make_document(rng, max_tokens=max_tokens)
        out += ask_alone(rng, document, count)
        out += ask_few_shot(rng, make_document(rng, max_tokens=max_tokens), count // 2, 6)
        out += ask_few_shot(rng, make_document(rng, max_tokens=max_tokens, facts_per_name=3), count // 2, 3)
    rng.shuffle(out)
    assert len(out) == 200
    return out


def answer(questions: list[Question], **options: Any) -> tuple[list[RequestOutput], float]:
    with Runtime(device=torch.get_default_device(), max_total_tokens=20_000, **options) as runtime:
        runtime.parts.model.kv_pool.fill(float("nan"))  # whatever reads a slot that it does not own shows
        outputs = runtime.generate([q.prompt for q in questions], GREEDY)
    exact = sum(o.text.strip() == q.answer for o, q in zip(outputs, questions, strict=True))
    return outputs, exact / len(questions)


def test_answers_with_the_cache_and_with_misses_forced(questions: list[Question]) -> None:
    cached, exact = answer(questions)
    assert exact >= 0.95
    assert all(o.finish_reason is FinishReason.STOP for o in cached)
    assert sum(o.usage.cached_tokens for o in cached) > 0.9 * sum(o.usage.prompt_tokens for o in cached)
    missed, exact = answer(questions[:60], force_miss=True)
    assert exact >= 0.95
    assert all(o.usage.cached_tokens == 0 for o in missed)
    assert [o.token_ids for o in missed] == [o.token_ids for o in cached[:60]]


def test_answers_from_a_small_pool_in_small_chunks(questions: list[Question]) -> None:
    options: dict[str, Any] = {"max_total_tokens": 1300, "chunked_prefill_size": 48, "max_running_requests": 5}
    with Runtime(device=torch.get_default_device(), **options) as runtime:
        outputs = runtime.generate([q.prompt for q in questions[:60]], GREEDY)
        assert runtime.cache_stats().evicted_tokens > 0
    assert [o.text.strip() for o in outputs] == [q.answer for q in questions[:60]]


def test_a_wrong_slot_gives_wrong_answers(questions: list[Question], monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers can tell: half of each matched prefix is read from the slots of its other half."""
    slots_of = RadixTree.slots_of

    def mixed_up(self: RadixTree, node: Any) -> Any:
        slots = slots_of(self, node).copy()
        half = len(slots) // 2
        slots[:half] = slots[-half:] if half else slots[:0]
        return slots

    monkeypatch.setattr(RadixTree, "slots_of", mixed_up)
    _, exact = answer(questions[:80], max_running_requests=4)  # few find their prefix in their own pass
    assert exact < 0.6
