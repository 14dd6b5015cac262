"""What ruins sharing near the start of prompts is found; what does not is left alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from radixrt.builtin import MODEL_PATH
from radixrt.planning.hints import MIN_SHARE, Hint
from radixrt.report.figures import hint_texts
from radixrt.text.tokenizer import load_tokenizer
from radixrt.workloads import token_statistics
from radixrt.workloads.lists import WorkloadPrompt, docqa, fewshot, samples, system_prompt, unshared
from scripts.bench_batch_plan import random_tree
from tests.support.plans import planned

RNG = np.random.default_rng(0)


def words(count: int, first: int = 100, last: int = 9000) -> list[int]:
    return RNG.integers(first, last, count).tolist()


def stamp(count: int) -> list[int]:
    """Digits."""
    return words(count, 20, 30)


def hints_of(prompts: list[list[int]]) -> tuple[Hint, ...]:
    return planned(prompts, 1).hints


def saved_by_moving(prompts: list[list[int]], position: int, differing: list[int]) -> int:
    """Tokens that are shared when what differs comes last."""
    moved = [
        prompt[:position] + prompt[position + count :] + prompt[position : position + count]
        for prompt, count in zip(prompts, differing, strict=True)
    ]
    return token_statistics(prompts).distinct_tokens - token_statistics(moved).distinct_tokens


@pytest.mark.parametrize("position", [0, 5, 300])
@pytest.mark.parametrize("least", [1, 6])
@pytest.mark.parametrize("prompts", [12, 400])
def test_a_timestamp_is_found(position: int, least: int, prompts: int) -> None:
    head, body = words(position), words(300)
    stamps = [words(1, 20, 10_000) if least == 1 else stamp(least + i % 5) for i in range(prompts)]
    texts = [head + time + body + words(20) for time in stamps]
    (hint,) = hints_of(texts)
    assert sorted(hint.prompts.tolist()) == list(range(prompts))
    assert position <= hint.position <= position + 3  # some begin with the same digit
    length = dict(zip(hint.prompts.tolist(), hint.differing.tolist(), strict=True))
    assert [length[i] for i in range(prompts)] == [len(time) - (hint.position - position) for time in stamps]
    expected = saved_by_moving(texts, hint.position, [length[i] for i in range(prompts)])
    assert hint.tokens == pytest.approx(expected, rel=0.02)


def test_a_counter_before_several_documents_is_one_hint() -> None:
    documents = [words(200) for _ in range(20)]
    texts = [words(5, 50, 51) + stamp(8) + documents[i % 20] + words(20) for i in range(600)]
    (hint,) = hints_of(texts)
    assert len(hint.prompts) == 600
    assert (hint.position, set(hint.differing.tolist())) == (5, {8})
    assert hint.tokens == pytest.approx((600 - 20) * 200, rel=0.03)


def test_a_name_within_documents_is_a_hint_for_each() -> None:
    documents = [words(150) for _ in range(10)]
    texts = [documents[i % 10] + words(3) + documents[i % 10][::-1] + words(20) for i in range(300)]
    hints = hints_of(texts)
    assert [len(hint.prompts) for hint in hints] == [30] * 10
    assert {hint.position for hint in hints} == {150}
    assert sum(hint.tokens for hint in hints) == pytest.approx(10 * 29 * 150, rel=0.03)


def test_the_worst_comes_first_and_others_are_left_out_of_it() -> None:
    long, short = words(900), words(100)
    texts = [[1, *stamp(6), *long, *words(9)] for _ in range(60)] + [
        [2, *stamp(6), *short, *words(9)] for _ in range(40)
    ]
    texts += [[3, *words(100)] for _ in range(50)]
    hints = hints_of(texts)
    assert [sorted(hint.prompts.tolist()) for hint in hints] == [list(range(60)), list(range(60, 100))]
    assert hints[0].tokens > hints[1].tokens


def test_where_only_some_have_it() -> None:
    head, body = words(5), words(300)
    texts = [head + (stamp(7) if i % 4 == 0 else []) + body + words(20) for i in range(400)]
    (hint,) = hints_of(texts)
    assert hint.tokens == pytest.approx(100 * 300, rel=0.05)


def test_what_would_save_little_is_not_told() -> None:
    body = words(100)
    texts = [stamp(6) + body for _ in range(10)]
    rest = [words(1000) for _ in range(int(10 * 100 / (MIN_SHARE * 1000)))]
    assert hints_of(texts)
    assert not hints_of(texts + rest)


def test_what_is_alike_only_for_a_while_is_not_told() -> None:
    """A phrase after the differing tokens is too short to matter, at their end too."""
    phrase, body = words(40), words(500)
    assert not hints_of([words(6) + phrase + words(200) for _ in range(100)])
    assert not hints_of([words(80) + body[:50] for _ in range(100)])
    assert not hints_of([words(80) + body + words(20) for _ in range(100)])


@pytest.mark.parametrize("documents", [(50, 50), (60, 140), (300, 300), (1000, 3000)])
def test_instructions_after_a_document_are_found(documents: tuple[int, int]) -> None:
    head, instructions = words(3), words(400)
    lengths = RNG.integers(documents[0], documents[1] + 1, 200)
    texts = [head + words(length) + instructions for length in lengths]
    (hint,) = hints_of(texts)
    assert (len(hint.prompts), hint.position, hint.tail) == (200, 3, 400)
    assert hint.differing.tolist() == [lengths[i] for i in hint.prompts]
    before = token_statistics(texts)
    after = token_statistics([head + instructions + text[3:-400] for text in texts])
    assert hint.tokens == before.distinct_tokens - after.distinct_tokens
    (told,) = hint_texts((hint,), before)
    assert "200 prompts end with the same 400 tokens, after " in told
    assert f"would be {after.best_hit_rate:.1%} instead of {before.best_hit_rate:.1%}" in told


def test_instructions_after_documents_that_come_twice() -> None:
    """Two sorts of instructions; the sharing of equal documents is not counted again."""
    instructions, documents = [words(300), words(200)], [words(150) for _ in range(40)]
    texts = [documents[i % 40] + instructions[i % 2] for i in range(80)]
    hints = hints_of(texts)
    assert [(len(hint.prompts), hint.tail) for hint in hints] == [(40, 300), (40, 200)]
    assert [hint.tokens for hint in hints] == [19 * 300, 19 * 200]


LISTS: dict[str, Callable[[], list[WorkloadPrompt]]] = {
    "unshared": lambda: unshared(requests=60, prompt_len=(10, 100)),
    "fewshot": lambda: fewshot(subjects=15, questions=12),
    "docqa": lambda: docqa(document_len=1000),
    "system_prompt": lambda: system_prompt(requests=200, system_len=400),
    "samples": lambda: samples(prompts=10, prompt_len=300),
    "three levels": lambda: random_tree(7, (6, 5, 6), ((20, 60), (10, 50), (1, 30)), (1, 40)),
    "few tokens": lambda: unshared(requests=300, prompt_len=(10, 100), vocab_size=13),
}


@pytest.mark.parametrize("name", LISTS)
def test_no_alarm_where_nothing_is_ruined(name: str) -> None:
    assert not hints_of([prompt.prompt_ids.tolist() for prompt in LISTS[name]()])


@pytest.mark.long
@pytest.mark.parametrize("make", [unshared, fewshot, docqa, system_prompt, samples])
def test_no_alarm_at_full_size(make: Callable[[], list[WorkloadPrompt]]) -> None:
    assert not hints_of([prompt.prompt_ids.tolist() for prompt in make()])


def test_text() -> None:
    tokenizer = load_tokenizer(MODEL_PATH)
    examples = Path(__file__).resolve().parents[2] / "examples" / "questions.jsonl"
    texts = [json.loads(line)["prompt"] for line in examples.read_text().splitlines()]
    assert not hints_of([ids.tolist() for ids in tokenizer.encode_batch(texts)])
    stamped = [f"Time: {i // 60:02d}:{i % 60:02d}. {text}" for i, text in enumerate(texts)]
    (hint,) = hints_of([ids.tolist() for ids in tokenizer.encode_batch(stamped)])
    assert len(hint.prompts) == len(texts)
    assert 1 <= hint.differing.min() <= hint.differing.max() <= 6
