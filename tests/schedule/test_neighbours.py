"""Where answers that wait part from one another."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixrt.cache.radix_tree import DEFAULT_NAMESPACE, Namespace, Node, RadixTree
from radixrt.sampling_params import SamplingParams
from radixrt.schedule import neighbours
from radixrt.schedule.answer import Answer, RequestLog
from radixrt.schedule.neighbours import Neighbours
from radixrt.schedule.request import Request


def answer_of(
    tokens: list[int], index: int = 0, scored_from: int | None = None, tenant: str | None = None
) -> Answer:
    params = SamplingParams()
    if scored_from is not None:
        params = SamplingParams(prompt_logprobs=0, prompt_logprobs_start=scored_from)
    prompt, namespace = np.array(tokens, np.int32), Namespace(tenant=tenant)
    request = Request(index, prompt, params, max_new_tokens=4, seed=0, namespace=namespace)
    return Answer(request, index, RequestLog(0.0))


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=12)


@given(prompts=prompts, data=st.data())
def test_all_that_wait_are_asked(prompts: list[list[int]], data: st.DataObject) -> None:
    """Beside a search of all pairs, some scored, while others come and go."""
    scored = [data.draw(st.one_of(st.none(), st.integers(1, len(prompt)))) for prompt in prompts]
    answers = [answer_of(prompt, i, scored[i]) for i, prompt in enumerate(prompts)]
    waiting = Neighbours()
    waiting.add(answers[: len(answers) // 2])
    waiting.add([*answers, answer_of(prompts[0], tenant="another")])
    gone = data.draw(st.sets(st.integers(1, len(answers) - 1)) if len(answers) > 1 else st.just(set[int]()))
    for i in gone:
        waiting.remove(answers[i])
        waiting.remove(answers[i])  # a second time it does nothing
    after = data.draw(st.integers(0, 8))
    expected = {
        min(common(prompts[0], prompt), answers[i].match_limit)
        for i, prompt in enumerate(prompts)
        if i and i not in gone and common(prompts[0], prompt) > after
    }
    assert waiting.partings(answers[0], after, 1) == sorted(at for at in expected if at > after)


@given(prompts=prompts, data=st.data())
def test_the_next_that_begins_with_a_state(prompts: list[list[int]], data: st.DataObject) -> None:
    """Beside a search of all, some scored, some of another tenant, while they go one by one."""
    scored = [data.draw(st.one_of(st.none(), st.integers(1, len(prompt)))) for prompt in prompts]
    tenants = [data.draw(st.sampled_from([None, "another"])) for _ in prompts]
    answers = [answer_of(prompt, i, scored[i], tenants[i]) for i, prompt in enumerate(prompts)]
    tree, nodes = RadixTree(), list[tuple[list[int], Node]]()
    for prompt in prompts:
        for end in range(1, len(prompt) + 1):
            tokens = np.array(prompt[:end], np.int32)
            nodes.append((prompt[:end], tree.insert(tree.root(DEFAULT_NAMESPACE), tokens, tokens)[0]))
    for state, node in enumerate({id(node): node for _, node in nodes}.values(), 1):
        node.state = state
    waiting, here = Neighbours(), list[Answer]()
    come, go = data.draw(st.permutations(range(len(answers)))), data.draw(st.permutations(range(len(answers))))
    in_order = data.draw(st.booleans())  # else some that stand before others come after these
    for i in sorted(come) if in_order else come:
        waiting.add([answers[i]])
        here.append(answers[i])
        for begins, node in nodes if in_order or len(here) == len(answers) else []:
            assert arrival_of(waiting.first_user(node)) == first_of(here, begins)
    for i in go:
        waiting.remove(answers[i])
        here.remove(answers[i])
        for begins, node in nodes:
            assert arrival_of(waiting.first_user(node)) == first_of(here, begins)


def arrival_of(answer: Answer | None) -> int | None:
    return None if answer is None else answer.arrival


def first_of(answers: list[Answer], begins: list[int]) -> int | None:
    """The number of the first that may begin with a state there, in the default namespace."""
    users = (
        answer.arrival
        for answer in answers
        if answer.tokens(len(begins)).tolist() == begins and answer.match_limit >= len(begins)
        if answer.request.namespace == DEFAULT_NAMESPACE
    )
    return min(users, default=None)


def test_who_is_first_is_found_again_once_the_others_are_gone() -> None:
    """One that stands before those that were found, and came after."""
    tree, tokens = RadixTree(), np.array([7], np.int32)
    node = tree.insert(tree.root(DEFAULT_NAMESPACE), tokens, tokens)[0]
    node.state = 1
    waiting, answers = Neighbours(), [answer_of([7, i], i) for i in range(3)]
    waiting.add(answers[1:2])
    assert waiting.first_user(node) is answers[1]
    waiting.add([answers[0], answers[2]])
    assert waiting.first_user(node) is answers[1]
    waiting.remove(answers[1])
    assert waiting.first_user(node) is answers[0]
    known = [weakref.ref(answer) for answer in answers]
    while answers:
        waiting.remove(answers.pop())
    assert not any(answer() for answer in known), "nobody holds what does not wait"


def test_who_has_gone_is_forgotten_while_another_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of states that are never asked for again."""
    monkeypatch.setattr(neighbours, "FORGET_EACH", 10)
    tree, waiting, gone = RadixTree(), Neighbours(), list[weakref.ref[Answer]]()
    waiting.add([answer_of([9, 9])])
    for state in range(1, 20):
        answers = [answer_of([state, 5, last], last) for last in range(4)]
        waiting.add(answers)
        tokens = np.array([state, 5], np.int32)
        node, *_ = tree.insert(tree.root(DEFAULT_NAMESPACE), tokens, tokens)
        node.state = state
        assert waiting.first_user(node) is answers[0]
        gone += map(weakref.ref, answers)
        while answers:
            waiting.remove(answers.pop())
    assert sum(answer() is not None for answer in gone) < 10


def test_a_state_is_worth_what_it_saves_all() -> None:
    """100 tokens for each of 2, then 10 more for each of 3: 5 for each of 6 are as many as 30 for one."""
    waiting, first = Neighbours(), list(range(300))
    lengths = [105, *[110] * 3, 200, 200]
    answers = [answer_of(first), *(answer_of([*first[:n], 999 + i]) for i, n in enumerate(lengths))]
    waiting.add(answers)
    assert waiting.partings(answers[0], 100, 30) == [105, 200]  # the second one saves 5 * 5
    assert waiting.partings(answers[0], 100, 25) == [105, 110, 200]
    assert waiting.partings(answers[0], 100, 31) == [110, 200]
    assert waiting.partings(answers[0], 199, 3) == []


def test_an_answer_that_got_tokens_meanwhile() -> None:
    """As one that was retracted with a pass in flight does."""
    waiting = Neighbours()
    answers = [answer_of([1, 2, 3]), answer_of([1, 2, 3, 7, 8], 1), answer_of([1, 2, 3, 7, 9], 2)]
    waiting.add(answers)
    for token in (7, 9, 5):
        answers[0].append(token)
    assert waiting.partings(answers[0], 0, 1) == [4]  # in the order of before, it has no more than 4 of any
    waiting.remove(answers[0])
    assert waiting.partings(answers[2], 0, 1) == [4]


def test_only_the_nearest_are_asked() -> None:
    waiting = Neighbours()
    answers = [answer_of([1, 2, 2, i, 3], i) for i in range(2 * neighbours.MAX_ASKED + 2)]
    waiting.add(answers)
    far = answer_of([1, 2, 2, 0, 3], len(answers))
    waiting.add([far])
    assert waiting.partings(far, 1, 1) == [3, 4]
    assert waiting.partings(answers[-1], 1, 4 * neighbours.MAX_ASKED) == []
    assert waiting.partings(answers[-1], 1, 2 * neighbours.MAX_ASKED) == [3]


def test_one_token_is_worth_no_stop() -> None:
    """Such as that which all prompts of a model begin with."""
    waiting = Neighbours()
    answers = [answer_of([1, i, i, i], i) for i in range(300)]
    waiting.add(answers)
    assert waiting.partings(answers[5], 0, 8) == []
    assert waiting.partings(answers[5], 0, 1) == [1]
