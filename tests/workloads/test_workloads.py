"""Lists, programs, the best possible hit rate and the physical bound, from the token lists alone."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt.bench.catalogue import LISTS as LIST_NAMES
from radixrt.bench.catalogue import SCALES, WORKLOADS
from radixrt.workloads import TokenStatistics, best_hit_rate, token_statistics
from radixrt.workloads.bound import DeviceSpeed, Experts, ModelShape, list_bound, program_bound
from radixrt.workloads.lists import (
    LISTS,
    WorkloadPrompt,
    agents,
    classification,
    docqa,
    documents,
    extraction,
    fewshot,
    judging,
    reasoning,
    repository,
    rollouts,
    samples,
    system_prompt,
    thoughts,
    unshared,
)
from radixrt.workloads.programs import (
    PROGRAMS,
    Answer,
    Program,
    Round,
    chat,
    choices,
    play,
    program_statistics,
    tree_search,
)

# few tokens, some of them beyond a byte: prefixes are often shared, and whole tokens must differ
TOKENS = st.sampled_from([0, 1, 255, 256, 257, 2**31 - 1])
PROMPTS = st.lists(st.lists(TOKENS, max_size=6), max_size=12)


def in_order(prompts: list[list[int]]) -> TokenStatistics:
    """An unlimited cache that sees the prompts in this order: the set of all prefixes."""
    cache: set[tuple[int, ...]] = set()
    cached = 0
    for prompt in prompts:
        prefixes = [tuple(prompt[:n]) for n in range(1, len(prompt) + 1)]
        cached += sum(prefix in cache for prefix in prefixes[:-1])
        cache.update(prefixes)
    return TokenStatistics(sum(map(len, prompts)), len(cache), cached)


@given(prompts=PROMPTS, seed=st.integers(0, 100))
def test_is_what_an_unlimited_cache_reaches_at_best(prompts: list[list[int]], seed: int) -> None:
    # Prefixes first: a prompt that is wholly cached computes its last token again.
    expected = in_order(sorted(prompts, key=len))
    random.Random(seed).shuffle(prompts)
    assert in_order(prompts).best_cached_tokens <= expected.best_cached_tokens
    assert token_statistics(prompts) == expected
    assert token_statistics([np.array(prompt, dtype=np.int32) for prompt in prompts]) == expected


@settings(deadline=None)
@given(prompts=st.lists(st.lists(TOKENS, max_size=4), max_size=5), before=PROMPTS, data=st.data())
def test_prompts_of_which_more_is_computed(
    prompts: list[list[int]], before: list[list[int]], data: st.DataObject
) -> None:
    """The best of all orders, with memory for all."""
    computed = [data.draw(st.integers(1, 5)) for _ in prompts]

    def hits(order: Sequence[int]) -> int:
        known = {tuple(one[: n + 1]) for one in before for n in range(len(one))}
        found = 0
        for i in order:
            prefixes = [tuple(prompts[i][: n + 1]) for n in range(len(prompts[i]))]
            found += sum(prefix in known for prefix in prefixes[: max(0, len(prefixes) - computed[i])])
            known.update(prefixes)
        return found

    best = max(map(hits, itertools.permutations(range(len(prompts)))))
    assert token_statistics(prompts, before, computed).best_cached_tokens == best


def test_a_whole_hit_computes_its_last_token() -> None:
    assert token_statistics([[1, 2, 3]] * 4) == TokenStatistics(12, 3, 6)
    assert best_hit_rate([[1, 2, 3]] * 4) == 0.5
    assert token_statistics([[1, 2, 3], [1, 2], [1]]) == TokenStatistics(6, 3, 3)


def test_no_tokens() -> None:
    assert best_hit_rate([]) == 0.0
    assert best_hit_rate([[], []]) == 0.0


def test_ids_beyond_int32_are_refused() -> None:
    with pytest.raises(OverflowError):
        token_statistics([[2**31]])


# -- best possible hit rate of a program -------------------------------------------------------------------


@st.composite
def programs(draw: st.DrawFn) -> list[Round]:
    rounds = []
    for _ in range(draw(st.integers(1, 3))):
        texts = draw(st.lists(st.lists(TOKENS, min_size=1, max_size=5), max_size=5))
        answers = [draw(st.lists(TOKENS, max_size=3)) for _ in texts]
        prompts = [
            WorkloadPrompt(np.array(prompt, dtype=np.int32), len(a))
            for prompt, a in zip(texts, answers, strict=True)
        ]
        rounds.append(Round(prompts, answers))
    return rounds


@given(rounds=programs())
def test_a_program_is_what_an_unlimited_cache_reaches_round_by_round(rounds: list[Round]) -> None:
    cache: set[tuple[int, ...]] = set()
    total = distinct = cached = 0
    for played in rounds:
        for one in sorted(played.prompts, key=lambda one: len(one.prompt_ids)):
            prefixes = [tuple(one.prompt_ids[:n].tolist()) for n in range(1, len(one.prompt_ids) + 1)]
            total += len(prefixes)
            distinct += sum(prefix not in cache for prefix in prefixes)
            cached += sum(prefix in cache for prefix in prefixes[:-1])
            cache.update(prefixes)
        for one, answer in zip(played.prompts, played.answers, strict=True):
            prompt = one.prompt_ids.tolist()
            cache.update(tuple(prompt + list(answer[:n])) for n in range(1, len(answer)))  # not the last one
    assert program_statistics(rounds) == TokenStatistics(total, distinct, cached)


def test_the_last_token_of_an_answer_is_not_cached() -> None:
    def two_turns() -> Program:
        (answer,) = yield [prompt([1, 2, 3], 3)]
        yield [prompt([1, 2, 3, *answer, 9], 1)]

    rounds = list(play(two_turns(), lambda prompts: [[4, 5, 6]] * len(prompts)))
    assert [played.inputs[0].tolist() for played in rounds] == [[1, 2, 3], [1, 2, 3, 4, 5, 6, 9]]
    assert program_statistics(rounds) == TokenStatistics(10, 5, 5)


# -- the lists ---------------------------------------------------------------------------------------------

# Of the definition's lists, for its own seeds and for seed 17.
GOLDEN = {
    "unshared": ("dbb774544267ded6", "f7005e4c8828eb9c"),
    "fewshot": ("b9674405b6cd7686", "d4d07e0071f59248"),
    "docqa": ("4cb5a5f539f46af1", "9735f3e35a459ae8"),
    "system_prompt": ("84e53bab30fad2d1", "e3600f59ed56791e"),
    "samples": ("65f3f921055d1b30", "124d8999b308b0ce"),
    "judging": ("4589435c36a1c7d0", "a3874e2b19307bcf"),
    "documents": ("e54e33eb405e972b", "0d05c531d1c98ccb"),
    "rollouts": ("6cfea29e38ba8381", "aec5c903b07d97d3"),
    "classification": ("dfed4896146c8b25", "522bb7cf62835e50"),
    "alone": ("3d81979d96dc2beb", "4a27d3270e46fcec"),
    "agents": ("791410fad70026ce", "5c2fa46e46515e86"),
    "repository": ("b5c1401d2493c9a3", "eacd742f0c4a7a08"),
    "extraction": ("4289401615dd2aa0", "58ab375df7383afd"),
    "reasoning": ("96b3d652d78c63ff", "9f42d8c83a155722"),
    "thoughts": ("79ba0fb30a789616", "090c274c7761e801"),
    "evaluation": ("0834f178e7c2966e", "ab2df63b4ff721c5"),
}

# Of the same lists: requests, prompt tokens, distinct ones, answers' tokens, and the bound in seconds of both
# model shapes on an H200.
FIGURES = {
    "unshared": (256, 147_394, 147_389, 145_680, 4.070906674194807, 10.363654680057955),
    "fewshot": (1140, 1_064_387, 136_502, 9_120, 0.21141523462482228, 2.639073944402309),
    "docqa": (256, 2_107_377, 42_991, 32_768, 0.3499341248780125, 1.7014699344079391),
    "system_prompt": (512, 1_122_046, 75_510, 79_811, 0.7045463110099925, 3.301757062699651),
    "samples": (512, 524_288, 16_384, 262_144, 2.1938873882632643, 5.598115019103665),
    "judging": (2400, 4_660_056, 187_520, 173_067, 0.8660767093438748, 7.016069493069596),
    "documents": (480, 3_127_387, 125_674, 61_797, 1.1536418264912371, 6.107209608521396),
    "rollouts": (512, 130_656, 8_166, 279_095, 4.7722578241207145, 16.06005935918213),
    "classification": (6000, 4_708_623, 507_834, 18_000, 0.7076743098852647, 9.468305119143858),
    "alone": (8, 4_800, 4_800, 5_600, 0.3443780601773846, 2.7120285900556103),
    "agents": (576, 2_546_986, 235_555, 32_583, 0.9655637792767611, 5.636535611601351),
    "repository": (300, 4_568_683, 83_679, 119_495, 2.1845987789736308, 6.530253224269168),
    "extraction": (1500, 3_225_602, 1_426_697, 90_000, 4.706914406546878, 29.830554188392313),
    "reasoning": (128, 35_040, 4_380, 210_223, 8.438908773860865, 28.646303949902816),
    "thoughts": (4752, 6_774_417, 272_442, 191_815, 1.0233231162259744, 8.833310081933966),
    "evaluation": (6000, 7_463_063, 204_435, 6_000, 0.3006362653138633, 3.780953344523666),
}

H200 = DeviceSpeed(bandwidth=4.26e12, flops=790e12)
QWEN3 = ModelShape(28, 1024, 3072, 16, 8, 128, 151936, 114_688)
LLAMA = ModelShape(32, 4096, 14336, 32, 8, 128, 128256, 131_072)


def prompt(prompt: Sequence[int], new_tokens: int) -> WorkloadPrompt:
    return WorkloadPrompt(np.array(prompt, dtype=np.int32), new_tokens)


def digest(prompts: Sequence[WorkloadPrompt]) -> str:
    """Of lengths, tokens and answers' lengths."""
    of_all = hashlib.sha256()
    for one in prompts:
        lengths = np.array([len(one.prompt_ids), one.max_new_tokens], np.int32)
        of_all.update(np.concatenate([lengths[:1], one.prompt_ids, lengths[1:]]).tobytes())
    return of_all.hexdigest()[:16]


@pytest.mark.parametrize("name", LISTS)
def test_lists_are_those_of_the_definition(name: str) -> None:
    prompts = LISTS[name]()
    assert (digest(prompts), digest(LISTS[name](17))) == GOLDEN[name]
    statistics = token_statistics([one.prompt_ids for one in prompts])
    requests, prompt_tokens, distinct, new_tokens, qwen3, llama = FIGURES[name]
    assert (len(prompts), statistics.prompt_tokens, statistics.distinct_tokens) == (
        requests,
        prompt_tokens,
        distinct,
    )
    assert sum(one.max_new_tokens for one in prompts) == new_tokens
    assert list_bound(prompts, QWEN3, H200) == pytest.approx(qwen3, rel=1e-12)
    assert list_bound(prompts, LLAMA, H200) == pytest.approx(llama, rel=1e-12)


def test_lists_of_other_sizes_are_those_of_the_definition() -> None:
    assert digest(fewshot(5, subjects=3, questions=4)) == "23b4a44cc05f6c8a"
    assert digest(docqa(5, documents=2, document_len=100, questions=3, new_tokens=7)) == "250ba9d742166773"
    short = system_prompt(5, requests=9, system_len=50, user_len=(3, 9), new_tokens=(2, 5))
    assert digest(short) == "b267003950241920"
    assert digest(samples(5, prompts=2, prompt_len=30, samples=3, new_tokens=4)) == "281c48aa871f0b93"
    assert digest(judging(5, questions=3, rubric_len=50, answers=2, votes=2)) == "d9be4fb0f40f5f05"
    assert digest(documents(5, documents=2, questions=3)) == "2865b28010e0a07e"
    assert digest(rollouts(5, prompts=3, samples=4)) == "851c5936770858d1"
    assert digest(classification(5, requests=9)) == "d6efc59a4eaaaf2c"
    assert digest(agents(5, runs=3, turns=4, system_len=50)) == "875e9387a61244db"
    assert digest(repository(5, repository_len=60, questions=7)) == "7afe6bdcd6a7110e"
    assert digest(extraction(5, requests=4)) == "f3a95da0479a526e"
    assert digest(reasoning(5, prompts=3, samples=4)) == "3c8f592d7ff857c8"
    assert digest(thoughts(5, roots=2, depth=3, branches=4)) == "b84edb6ad09d0fb1"


def test_lengths_keep_to_their_ranges() -> None:
    texts = documents(documents=30, document_len=(4, 64), questions=4, question_len=(1, 1), new_tokens=(2, 9))
    assert {len(one.prompt_ids) for one in texts} <= set(range(5, 66))
    assert {2, 9} <= {one.max_new_tokens for one in texts} <= set(range(2, 10))
    drawn = [one.max_new_tokens for one in rollouts(samples=100, max_new_tokens=3, mean_log=0)]
    assert set(drawn) == {1, 2, 3}  # an answer has a token at least


def test_a_small_vocabulary() -> None:
    ids = np.concatenate([one.prompt_ids for one in unshared(requests=9, vocab_size=13)])
    assert set(ids.tolist()) == {10, 11, 12}
    with pytest.raises(ValueError, match="vocab_size is 10"):
        unshared(vocab_size=10)


# -- the bound ---------------------------------------------------------------------------------------------

# One layer, hidden size 2, intermediate size 3, 2 heads and 1 KV head of size 2, 5 tokens: attention weights
# 8 + 4 + 4 + 8, MLP 18, so 42; head 10; KV 4 values; attention 16 operations a pair of tokens.
TOY = ModelShape(1, 2, 3, 2, 1, 2, 5, 8)
E4M3 = replace(TOY, layers_in_e4m3=True)
INT4 = replace(QWEN3, layers_in_int4=True)
# All tokens go through a part of size 3, and through two of four experts of size 5, of 2 x 3 x 5 = 30 weights.
MIXTURE = replace(TOY, experts=Experts(4, 2, 5))
FAST = 1e30  # a speed that never is what limits


def test_shape() -> None:
    assert (TOY.layer_weights, TOY.head_weights, TOY.attention_ops) == (42, 10, 16)
    assert (TOY.weight_bytes, TOY.layer_ops, TOY.weight_ops) == (2 * 52, 2 * 42, 2 * 52)
    assert (E4M3.weight_bytes, E4M3.layer_ops, E4M3.weight_ops) == (42 + 2 * 10, 42, 42 + 2 * 10)
    scales_and_zeros = INT4.layer_weights // 128 * (2 + 1)
    assert INT4.weight_bytes == INT4.layer_weights // 2 + scales_and_zeros + 2 * INT4.head_weights
    assert INT4.weight_ops == QWEN3.weight_ops
    assert E4M3.attention_ops == 16
    assert (QWEN3.layer_weights + QWEN3.head_weights) == pytest.approx(0.596e9, rel=1e-3)  # 0.6B, as it is called


def test_shape_of_a_mixture() -> None:
    assert MIXTURE.layer_weights == 42
    assert MIXTURE.weight_bytes == 2 * (52 + 4 * 30)
    assert (MIXTURE.layer_ops, MIXTURE.weight_ops) == (2 * (42 + 2 * 30), 2 * (52 + 2 * 30))
    # A token reads two experts, two tokens three in the mean, many all.
    assert [MIXTURE.read_bytes(n) for n in (1.0, 2.0)] == [2 * (52 + 2 * 30), 2 * (52 + 3 * 30)]
    assert MIXTURE.read_bytes(1e3) == MIXTURE.weight_bytes
    assert TOY.read_bytes(1.0) == TOY.read_bytes(1e3) == TOY.weight_bytes
    in_4_bits = replace(MIXTURE, experts=replace(MIXTURE.experts, bytes_per_weight=0.5), layers_in_e4m3=True)
    assert in_4_bits.weight_bytes == 42 + 2 * 10 + 4 * 30 / 2
    assert in_4_bits.layer_ops == 42 + 2 * 2 * 30
    in_e4m3 = replace(MIXTURE, experts=replace(MIXTURE.experts, in_e4m3=True), layers_in_e4m3=True)
    assert in_e4m3.weight_bytes == 42 + 2 * 10 + 4 * 30
    assert in_e4m3.layer_ops == 42 + 2 * 30


def test_bound_of_a_prefill() -> None:
    # 3 tokens through the layers, 1 + 2 + 3 pairs, one row of the head.
    assert list_bound([prompt([1, 2, 3], 1)], TOY, DeviceSpeed(1.0, 1.0)) == 3 * 84 + 6 * 16 + 20
    # Of e4m3 twice as many operations are done in the same time.
    assert list_bound([prompt([1, 2, 3], 1)], E4M3, DeviceSpeed(1.0, 1.0)) == 3 * 42 + 6 * 16 + 20
    # The second prompt adds one token, which attends to three.
    twice = [prompt([1, 2, 3], 1), prompt([1, 2, 4], 1)]
    assert list_bound(twice, TOY, DeviceSpeed(1.0, 1.0)) == 4 * 84 + 9 * 16 + 2 * 20
    # What was computed before costs nothing but to be attended to.
    known = [np.array([1, 2], dtype=np.int32)]
    assert list_bound(twice, TOY, DeviceSpeed(1.0, 1.0), known) == 2 * 84 + 6 * 16 + 2 * 20
    assert list_bound([], TOY, DeviceSpeed(1.0, 1.0)) == 0.0


def test_bound_of_a_decode() -> None:
    two = [prompt([1, 2, 3], 3), prompt([1, 2, 4], 2)]
    # Bytes: step 1 reads 52 weights of 2 bytes, 4 distinct tokens and 2 new ones; step 2 half the prompts' tokens
    # and the 2 tokens of the one that is left. KV is 8 bytes a token.
    assert list_bound(two, TOY, DeviceSpeed(1.0, FAST)) == pytest.approx(104 + 6 * 8 + 104 + (2 + 2) * 8)
    assert list_bound(two, E4M3, DeviceSpeed(1.0, FAST)) == pytest.approx(62 + 6 * 8 + 62 + (2 + 2) * 8)
    # Operations: 104 a token and 16 a token that it attends to: 3 + 1 each, then 3 + 2.
    prefill = 4 * 84 + 9 * 16 + 2 * 20
    assert list_bound(two, TOY, DeviceSpeed(FAST, 1.0)) == prefill + 2 * (104 + 4 * 16) + 104 + 5 * 16
    # Two tokens read three experts, one reads two.
    steps = 2 * (52 + 3 * 30) + 6 * 8 + 2 * (52 + 2 * 30) + (2 + 2) * 8
    assert list_bound(two, MIXTURE, DeviceSpeed(1.0, FAST)) == pytest.approx(steps)
    # The larger of the two counts in each step.
    assert list_bound(two, TOY, DeviceSpeed(1.0, 1.0)) == prefill + 336 + 184


def test_bound_of_a_program_is_that_of_its_rounds() -> None:
    rounds = [Round([prompt([1, 2], 2)], [[3, 4]]), Round([prompt([1, 2, 3, 4], 1)], [[5]])]
    speed = DeviceSpeed(1.0, 1.0)
    first = list_bound(rounds[0].prompts, TOY, speed)
    second = 84 + 4 * 16 + 20  # the token that was sampled last is the only new one
    assert program_bound(rounds, TOY, speed) == first + second


# -- the programs ------------------------------------------------------------------------------------------


def echo(prompts: Sequence[WorkloadPrompt]) -> list[Answer]:
    """Answers that differ: the prompt's place, repeated."""
    return [[20_000 + i] * one.max_new_tokens for i, one in enumerate(prompts)]


def test_chat_appends_the_answers() -> None:
    rounds = list(play(chat(0, conversations=3, turns=3, system_len=7, user_len=(2, 4), new_tokens=(1, 3)), echo))
    assert [len(played.prompts) for played in rounds] == [3, 3, 3]
    assert len({tuple(prompt[:7]) for played in rounds for prompt in played.inputs}) == 1
    for before, after in pairwise(rounds):
        for prompt, answer, following in zip(before.inputs, before.answers, after.inputs, strict=True):
            said = [*prompt, *answer]
            assert following[: len(said)].tolist() == said
            assert 2 <= len(following) - len(said) <= 4


def test_choices_share_their_question() -> None:
    (played,) = play(
        choices(0, questions=3, choices=2, examples_len=9, question_len=(2, 4), choice_len=(1, 3)), echo
    )
    assert len(played.prompts) == 6
    assert len({tuple(one.prompt_ids) for one in played.prompts}) == 3
    for one in played.prompts:
        assert one.continuation_ids is not None
        assert one.input_ids.tolist() == [*one.prompt_ids, *one.continuation_ids]


def test_tree_search_continues_what_it_keeps() -> None:
    rounds = list(play(tree_search(0, roots=2, root_len=6, rounds=3, branches=4, kept=3, new_tokens=2), echo))
    assert [len(played.prompts) for played in rounds] == [8, 24, 24]
    for before, after in pairwise(rounds):
        grown = [[*prompt, *answer] for prompt, answer in zip(before.inputs, before.answers, strict=True)]
        texts = [prompt.tolist() for prompt in after.inputs]
        assert all(text in grown for text in texts)
        assert texts[0] == texts[3]
        assert texts[0] != texts[4]
    assert len({tuple(prompt[:6]) for prompt in rounds[-1].inputs}) == 2  # no root is lost


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_depend_on_their_seed_alone(name: str) -> None:
    def asked(seed: int) -> list[list[Any]]:
        rounds = play(PROGRAMS[name](seed, **SCALES["cpu"].sizes[name]), echo)
        return [[one.input_ids.tolist(), one.max_new_tokens] for played in rounds for one in played.prompts]

    assert asked(0) == asked(0)
    assert asked(0) != asked(1)


def test_every_program_has_a_size_at_the_cpu_scale() -> None:
    assert tuple(LISTS) == LIST_NAMES
    assert tuple(PROGRAMS) == tuple(SCALES["cpu"].sizes) == tuple(dict.fromkeys(LIST_NAMES + WORKLOADS))
    # Requests that are admitted together must wait for their prefix: it takes more than one pass.
    budget = SCALES["cpu"].chunked_prefill_size
    assert budget is not None
    for name in set(PROGRAMS) - {"unshared", "alone"}:
        first = next(PROGRAMS[name](0, **SCALES["cpu"].sizes[name]))
        shared = token_statistics([one.input_ids for one in first])
        assert shared.best_hit_rate > 0.5
        assert min(len(one.input_ids) for one in first) > budget
