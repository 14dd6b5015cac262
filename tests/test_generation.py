"""What users of an engine expect of a request: answers, stops, penalties, log-probabilities, streams, scores."""

from __future__ import annotations

import asyncio
import json
import math
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex
import torch
from safetensors import safe_open
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from radixrt import (
    CompletionOutput,
    FinishReason,
    ModelError,
    ParameterError,
    PassError,
    PromptError,
    RadixrtError,
    Runtime,
)
from radixrt import SamplingParams as Params
from radixrt.batch.job import run_batch
from radixrt.builtin.task import EXAMPLES_SEED, make_questions
from radixrt.conversation import Conversation
from radixrt.execution.sampling import sampler
from radixrt.frontend.request_builder import builder_without_weights
from radixrt.models import weight_files
from tests.support.checkpoints import VOCAB_SIZE, llama, write
from tests.support.small_tokenizers import byte_level, chat_tokenizer

pytestmark = pytest.mark.usefixtures("device")

GREEDY = Params(temperature=0, max_new_tokens=12, ignore_eos=True)
PROMPT = [5, 6, 7, 8, 9, 10, 11]


@pytest.fixture(scope="module")
def model(device: torch.device) -> Any:
    with torch.device("cpu"):
        return llama(seed=4)


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> Path:
    return write(model.cpu(), tmp_path_factory.mktemp("llama"))


@pytest.fixture
def runtime(folder: Path) -> Iterator[Runtime]:
    with Runtime(folder, device=torch.get_default_device(), max_total_tokens=2000) as runtime:
        runtime.parts.model.kv_pool.fill(float("nan"))
        yield runtime


@pytest.fixture
def eager(folder: Path) -> Iterator[Runtime]:
    """Launches all passes kernel by kernel: a captured graph is replayed without what a test puts in place."""
    with Runtime(folder, device=torch.get_default_device(), max_total_tokens=2000, cuda_graphs=False) as runtime:
        runtime.parts.model.kv_pool.fill(float("nan"))
        yield runtime


@pytest.fixture(scope="module")
def builtin(device: torch.device) -> Iterator[Runtime]:
    with Runtime(device=device, max_total_tokens=8000) as runtime:
        yield runtime


def dense_logprobs(model: Any, ids: list[int]) -> torch.Tensor:
    """float64 log-probabilities of every next token, by one dense forward pass on the CPU."""
    with torch.inference_mode(), torch.device("cpu"):
        return torch.log_softmax(model.cpu()(torch.tensor([ids])).logits[0].double(), -1)


# -- several answers ---------------------------------------------------------------------------------------


def test_n_answers_compute_their_prompt_once(runtime: Runtime) -> None:
    params = Params(n=5, max_new_tokens=6, ignore_eos=True, seed=3)
    output = runtime.generate(PROMPT, params)
    assert [answer.index for answer in output.outputs] == [0, 1, 2, 3, 4]
    assert len({answer.token_ids for answer in output.outputs}) > 1
    assert (output.text, output.token_ids) == (output.outputs[0].text, output.outputs[0].token_ids)
    usage = output.usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.computed_tokens) == (7, 0, 7)
    assert usage.completion_tokens == 30
    stats = runtime.cache_stats()
    assert (stats.prompt_tokens, stats.cached_tokens, stats.recomputed_tokens) == (7, 0, 0)


def test_n_draws_differ_by_their_sample_index_alone(folder: Path) -> None:
    params = Params(n=4, max_new_tokens=8, ignore_eos=True, seed=3)
    options: dict[str, Any] = {"device": torch.get_default_device(), "max_total_tokens": 2000}
    with Runtime(folder, **options) as one, Runtime(folder, max_running_requests=1, **options) as other:
        first = [answer.token_ids for answer in one.generate(PROMPT, params).outputs]
        again = one.generate([[9, 9], PROMPT], [GREEDY, params])[1]
        assert [answer.token_ids for answer in again.outputs] == first
        assert [answer.token_ids for answer in other.generate(PROMPT, params).outputs] == first
        assert other.cache_stats().recomputed_tokens > 0  # two first tokens a pass: the others' are drawn apart
        single = one.generate(PROMPT, Params(max_new_tokens=8, ignore_eos=True, seed=3))
    assert single.token_ids == first[0]


def test_n_in_a_pool_that_is_too_small_for_all(folder: Path) -> None:
    params = Params(n=6, max_new_tokens=20, seed=1, stop_token_ids=(0,), ignore_eos=True, bad_words=[[0]])
    with Runtime(folder, device=torch.get_default_device(), max_total_tokens=2000) as roomy:
        expected = [answer.token_ids for answer in roomy.generate(PROMPT, params).outputs]
    with Runtime(folder, device=torch.get_default_device(), max_total_tokens=60) as tight:
        output = tight.generate(PROMPT, params)
        assert tight.parts.scheduler.num_retractions > 0
    assert [answer.token_ids for answer in output.outputs] == expected


# -- ends --------------------------------------------------------------------------------------------------


def test_no_new_tokens_fills_the_cache(runtime: Runtime) -> None:
    output = runtime.generate(PROMPT, Params(max_new_tokens=0))
    assert (output.token_ids, output.text, output.finish_reason) == ((), "", FinishReason.LENGTH)
    assert runtime.generate([*PROMPT, 20], GREEDY).usage.cached_tokens == 7
    assert runtime.generate(PROMPT, Params(max_new_tokens=0)).usage.cached_tokens == 6


def test_min_new_tokens_holds_back_every_end(runtime: Runtime) -> None:
    free = runtime.generate(PROMPT, GREEDY).token_ids
    at = next(i for i in range(1, 12) if free[i] not in free[:i])
    stopping = replace(GREEDY, stop_token_ids=(free[at],))
    assert runtime.generate(PROMPT, stopping).token_ids == free[: at + 1]
    held = replace(stopping, min_new_tokens=6)
    output = runtime.generate(PROMPT, held)
    assert free[at] not in output.token_ids[:6]
    assert output.token_ids[:at] == free[:at]


def test_min_new_tokens_holds_back_end_tokens_that_end_nothing(runtime: Runtime) -> None:
    """As vLLM and transformers do; from then on they are drawn like others."""
    drawn = runtime.generate(PROMPT, replace(GREEDY, logit_bias={2: 100.0}, min_new_tokens=6)).token_ids
    assert len(drawn) == 12
    assert 2 not in drawn[:6]
    assert set(drawn[6:]) == {2}


def test_stop_strings(builtin: Runtime) -> None:
    question = make_questions(EXAMPLES_SEED)[0].question
    prompt = question.prompt
    answer = builtin.generate(prompt, Params(temperature=0, max_new_tokens=8)).text
    assert answer.strip() == question.answer
    middle = question.answer[1:]
    params = Params(temperature=0, max_new_tokens=8, stop=(middle,))
    output = builtin.generate(prompt, params)
    assert output.finish_reason is FinishReason.STOP
    assert output.outputs[0].matched == middle
    assert output.text == answer[: answer.index(middle)]
    including = builtin.generate(
        prompt, Params(temperature=0, max_new_tokens=8, stop=middle, include_stop_str=True)
    )
    assert including.text == answer[: answer.index(middle) + len(middle)]
    assert builtin.generate(prompt, Params(temperature=0, stop=("never said",))).text == answer


def test_stop_regexes(builtin: Runtime) -> None:
    prompt = make_questions(EXAMPLES_SEED)[0].question.prompt
    params = Params(temperature=0, max_new_tokens=24, ignore_eos=True)
    free = builtin.generate(prompt, params)
    pattern = rf"(?<=\S{{2}})[^{free.text.strip()[0]}\s]{{2}}\b|\n+"
    ended = [end for end in range(len(free.text)) if regex.search(pattern, free.text[:end])]
    expected = regex.search(pattern, free.text[: ended[0]])
    output = builtin.generate(prompt, replace(params, stop_regex=(pattern,)))
    assert output.finish_reason is FinishReason.STOP
    assert output.outputs[0].matched == expected[0]
    assert output.text == free.text[: expected.start()]
    assert output.token_ids == free.token_ids[: len(output.token_ids)]
    assert len(output.token_ids) < len(free.token_ids)
    kept = replace(params, stop_regex=(pattern,), include_stop_str=True)
    *shown, last = builtin.stream(prompt, kept)
    assert last.output is not None
    assert last.output.text == free.text[: expected.end()] == "".join(chunk.text for chunk in [*shown, last])
    assert builtin.generate(prompt, replace(params, stop_regex=(r"never said",))).text == free.text
    several = builtin.generate(prompt, replace(kept, n=3))
    assert [answer.text for answer in several.outputs] == [last.output.text] * 3


def test_an_expression_that_takes_too_long_fails_its_own_request_alone(
    builtin: Runtime, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL", logger="radixrt")
    prompt = make_questions(EXAMPLES_SEED)[0].question.prompt
    params = Params(temperature=0, max_new_tokens=24, ignore_eos=True)
    free = builtin.generate(prompt, params)
    slow = r"(?s)^(.|..)+[\x01\x02]"
    slow_params = replace(params, max_new_tokens=100, stop_regex=slow)
    outputs = builtin.generate([prompt] * 3, [params, slow_params, params])
    assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
    assert outputs[1].error is not None
    assert "no text can be made of its answer: looking for stop_regex" in outputs[1].error
    assert outputs[1].text.startswith(free.text[:20])
    assert outputs[0].text == outputs[2].text == free.text
    *shown, last = builtin.stream(prompt, slow_params)
    assert last.output is not None
    assert last.output.error == outputs[1].error
    assert "".join(chunk.text for chunk in [*shown, last]) == last.output.text


def test_stop_regexes_of_lines(builtin: Runtime, tmp_path: Path) -> None:
    prompt = make_questions(EXAMPLES_SEED)[0].question.prompt
    free = builtin.generate(prompt, Params(temperature=0, max_new_tokens=8))
    own = {"prompt": prompt, "temperature": 0, "max_tokens": 8, "stop_regex": r"\S\S"}
    body = {**own, "model": "m", "stop_regex": [r"\S\S", "x+"]}
    lines: list[dict[str, Any]] = [
        own,
        {"prompt": prompt, "sampling_params": {"stop_regex": "a*"}},
        {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body},
    ]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    builtin.run_batch(source, out)
    plain, bad, openai = map(json.loads, out.read_text().splitlines())
    assert plain["text"] == free.text[: len(free.text) - len(free.text.lstrip())]
    assert plain["finish_reason"] == "stop"
    assert "stop_regex holds 'a*', which matches the empty text" in bad["error"]["message"]
    assert openai["response"]["body"]["choices"][0]["text"] == plain["text"]


def test_stop_strings_need_a_tokenizer(runtime: Runtime) -> None:
    with pytest.raises(PromptError, match="stop_regex and streams need a tokenizer"):
        runtime.generate(PROMPT, Params(stop=("x",)))
    with pytest.raises(PromptError, match="stop_regex and streams need a tokenizer"):
        runtime.generate(PROMPT, Params(stop_regex=("x",)))


def test_the_text_of_the_stop_token_is_kept_like_that_of_a_stop_string(builtin: Runtime) -> None:
    prompt = make_questions(EXAMPLES_SEED)[0].question.prompt
    params = Params(temperature=0, max_new_tokens=8, ignore_eos=True)
    free = builtin.generate(prompt, params)
    assert builtin.tokenizer is not None
    pieces = [builtin.tokenizer.decode(free.token_ids[:count]) for count in range(9)]
    at = next(place for place in range(1, 8) if len(pieces[place]) < len(pieces[place + 1]))
    for stop in ((), ("never said",)):  # with and without a text of its own on the way
        own = replace(params, stop_token_ids=(free.token_ids[at],), stop=stop)
        assert builtin.generate(prompt, own).text == pieces[at]
        kept = replace(own, include_stop_str=True)
        output = builtin.generate(prompt, kept)
        assert (output.text, output.outputs[0].matched) == (pieces[at + 1], free.token_ids[at])
        assert "".join(chunk.text for chunk in builtin.stream(prompt, kept)) == output.text
    ended = replace(params, ignore_eos=False, include_stop_str=True)
    assert (
        builtin.generate(prompt, ended).text
        == builtin.generate(prompt, replace(ended, include_stop_str=False)).text
    )
    special = replace(ended, skip_special_tokens=False)
    assert builtin.generate(prompt, special).text.endswith("</s>")


def test_no_text_is_made_where_none_is_wanted(runtime: Runtime, builtin: Runtime) -> None:
    params = replace(GREEDY, max_new_tokens=8)
    texts = builtin.generate("Mira likes", params)
    ids = builtin.generate("Mira likes", replace(params, detokenize=False))
    assert texts.text
    assert (ids.text, ids.token_ids) == ("", texts.token_ids)
    with pytest.raises(ParameterError, match="stop needs a text to look in, but detokenize is False"):
        Params(stop=["a"], detokenize=False)
    with pytest.raises(ParameterError, match="stop_regex needs a text to look in, but detokenize is False"):
        Params(stop_regex="a", detokenize=False)
    chunks = list(runtime.stream(PROMPT, replace(GREEDY, detokenize=False)))  # without a tokenizer
    assert [chunk.text for chunk in chunks] == [""] * len(chunks)
    assert sum(len(chunk.token_ids) for chunk in chunks) == 12


# -- changed logits ----------------------------------------------------------------------------------------


def reference(model: Any, prompt: list[int], count: int, change: Any) -> list[int]:
    """Greedy tokens where `change(logits, prompt, answer)` alters the logits before each choice."""
    answer: list[int] = []
    with torch.inference_mode(), torch.device("cpu"):
        for _ in range(count):
            logits = model.cpu()(torch.tensor([prompt + answer])).logits[0, -1].clone()
            answer.append(int(change(logits, prompt, answer).argmax()))
    return answer


def test_penalties_see_every_token_though_the_last_is_still_in_flight(runtime: Runtime, model: Any) -> None:
    def change(logits: torch.Tensor, prompt: list[int], answer: list[int]) -> torch.Tensor:
        for token in set(prompt + answer):
            logits[token] = logits[token] / 1.5 if logits[token] > 0 else logits[token] * 1.5
        for token in set(answer):
            logits[token] -= 0.7 * answer.count(token) + 0.4
        return logits

    params = replace(GREEDY, repetition_penalty=1.5, frequency_penalty=0.7, presence_penalty=0.4)
    expected = reference(model, PROMPT, 12, change)
    outputs = runtime.generate([PROMPT, PROMPT, [3, 4]], [params, GREEDY, params])
    assert list(outputs[0].token_ids) == expected
    assert list(outputs[1].token_ids) == reference(model, PROMPT, 12, lambda logits, *_: logits)
    assert outputs[0].token_ids != outputs[1].token_ids


def test_a_bad_word_given_as_text_is_banned_behind_a_blank_too(tmp_path: Path) -> None:
    tokenizer = byte_level()
    folder = write(llama(seed=4, vocab_size=len(tokenizer)), tmp_path)
    tokenizer.save_pretrained(folder)
    with Runtime(folder, device=torch.get_default_device(), max_total_tokens=2000) as runtime:
        pieces = [runtime.tokenizer.encode(text).tolist() for text in ("Oslo", " Oslo", ".")]
        assert [len(ids) for ids in pieces] == [2, 1, 1]
        allowed = [*pieces[0], *pieces[1], *pieces[2]]
        params = Params(max_new_tokens=100, ignore_eos=True, allowed_token_ids=allowed, seed=1)
        text = runtime.generate(PROMPT, params).text
        assert " Oslo" in text
        assert "Oslo" in text.replace(" Oslo", "")
        assert "Oslo" not in runtime.generate(PROMPT, replace(params, bad_words=["Oslo"])).text


def test_bias_allowed_and_bad_words(runtime: Runtime, model: Any) -> None:
    free = list(runtime.generate(PROMPT, GREEDY).token_ids)
    biased = runtime.generate(PROMPT, replace(GREEDY, logit_bias={"42": 100, free[0]: -100.0}))
    assert set(biased.token_ids) == {42}
    allowed = runtime.generate(PROMPT, replace(GREEDY, allowed_token_ids=(11, 13, 17)))
    assert set(allowed.token_ids) <= {11, 13, 17}

    words = [(free[0],), (free[3], free[4]), (free[5], free[6], free[7])]

    def ban(logits: torch.Tensor, prompt: list[int], answer: list[int]) -> torch.Tensor:
        said = prompt + answer
        for *before, last in words:
            if said[len(said) - len(before) :] == before:
                logits[last] = -torch.inf
        return logits

    output = runtime.generate(PROMPT, replace(GREEDY, bad_words=words))
    assert list(output.token_ids) == reference(model, PROMPT, 12, ban)
    second = free[:2]
    banned = runtime.generate(PROMPT, replace(GREEDY, bad_words=[second])).token_ids
    assert banned[0] == second[0]
    assert banned[1] != second[1]


def test_what_one_request_asks_for_is_done_for_it_alone(eager: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = [Params(max_new_tokens=8, ignore_eos=True, seed=i, top_p=p) for i, p in enumerate((1, 0.7, 1, 0.9))]
    prompts = [[*PROMPT, i] for i in range(4)]
    expected = [output.token_ids for output in eager.generate(prompts, plain)]
    rows: dict[str, set[int]] = {}

    def watch(name: str) -> None:
        op = getattr(sampler, name)

        def watched(logits: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
            rows.setdefault(name, set()).add(logits.shape[0])
            return op(logits, *arguments, **keywords)

        monkeypatch.setattr(sampler, name, watched)

    for name in ("apply_penalties", "add_bias", "ban_tokens", "keep_only", "token_logprobs", "sample"):
        watch(name)
    special = [
        (Params(temperature=0, presence_penalty=1, max_new_tokens=6, ignore_eos=True), "apply_penalties"),
        (Params(seed=9, logit_bias={7: 3.0}, max_new_tokens=6, ignore_eos=True), "add_bias"),
        (Params(temperature=0, bad_words=[[7], [8, 9]], max_new_tokens=6, ignore_eos=True), "ban_tokens"),
        (Params(temperature=0, allowed_token_ids=(3, 9, 40), max_new_tokens=6, ignore_eos=True), "keep_only"),
        (Params(temperature=0, logprobs=2, max_new_tokens=6, ignore_eos=True), "token_logprobs"),
    ]
    alone = [eager.generate(PROMPT, params).token_ids for params, _ in special]
    for (params, op), own in zip(special, alone, strict=True):
        rows.clear()
        eager.flush_cache()
        outputs = eager.generate([*prompts[:2], PROMPT, *prompts[2:]], [*plain[:2], params, *plain[2:]])
        got = [output.token_ids for output in outputs]
        assert got.pop(2) == own
        assert got == expected
        assert rows.pop(op) == {1}
        assert max(rows.pop("sample")) == 5
        assert not rows


def test_what_leaves_no_token_is_refused(runtime: Runtime) -> None:
    with pytest.raises(PromptError, match="leave none of allowed_token_ids to draw"):
        runtime.generate(PROMPT, Params(allowed_token_ids=(3,), bad_words=[(3,)]))
    with pytest.raises(PromptError, match="leave none"):
        runtime.generate(PROMPT, Params(allowed_token_ids=(2,), min_new_tokens=1))
    for name, value in (
        ("logit_bias", {VOCAB_SIZE: 1}),
        ("allowed_token_ids", [VOCAB_SIZE]),
        ("bad_words", [[101]]),
    ):
        with pytest.raises(PromptError, match=f"{name} holds 101"):
            runtime.generate(PROMPT, Params(**{name: value}))


# -- log-probabilities -------------------------------------------------------------------------------------


def test_logprobs_equal_a_dense_pass_cold_and_warm(runtime: Runtime, model: Any) -> None:
    params = Params(max_new_tokens=6, ignore_eos=True, seed=1, logprobs=3, temperature=0.7, top_k=20)
    for _ in range(2):
        output = runtime.generate(PROMPT, params)
        exact = dense_logprobs(model, [*PROMPT, *output.token_ids])
        assert output.logprobs is not None
        assert [token.token_id for token in output.logprobs] == list(output.token_ids)
        for i, token in enumerate(output.logprobs):
            row = exact[len(PROMPT) - 1 + i]
            assert token.logprob == pytest.approx(float(row[token.token_id]), abs=1e-4)
            assert token.rank == int((row > row[token.token_id]).sum()) + 1
            best = row.topk(3)
            assert [t for t, _ in token.top] == best.indices.tolist()
            assert [p for _, p in token.top] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert runtime.generate(PROMPT, GREEDY).logprobs is None


def test_logprobs_of_each_answer_are_its_own(runtime: Runtime, model: Any) -> None:
    output = runtime.generate(PROMPT, Params(n=3, seed=2, max_new_tokens=6, ignore_eos=True, logprobs=2))
    assert len({answer.token_ids for answer in output.outputs}) == 3
    for answer in output.outputs:
        exact = dense_logprobs(model, PROMPT + list(answer.token_ids))
        assert answer.logprobs is not None
        assert [token.token_id for token in answer.logprobs] == list(answer.token_ids)
        assert answer.cumulative_logprob == sum(token.logprob for token in answer.logprobs)
        for row, token in enumerate(answer.logprobs, len(PROMPT) - 1):
            assert token.logprob == pytest.approx(float(exact[row, token.token_id]), abs=1e-4)
            assert token.rank == 1 + int((exact[row] > exact[row, token.token_id]).sum())
            assert [i for i, _ in token.top] == exact[row].topk(2).indices.tolist()
    assert output.cumulative_logprob == output.outputs[0].cumulative_logprob
    assert runtime.generate(PROMPT, GREEDY).cumulative_logprob is None


def test_logprobs_go_to_those_that_asked(runtime: Runtime) -> None:
    prompts = [PROMPT, [3, 4], [20, 21, 22], PROMPT[::-1], [9]]
    base = Params(max_new_tokens=5, ignore_eos=True, seed=2)
    params = [
        replace(base, n=3),
        replace(base, n=2, logprobs=1),
        base,
        replace(base, logprobs=3, max_new_tokens=2),
        replace(base, logprobs=0),
    ]
    outputs = runtime.generate(prompts, params)
    for prompt, own, output in zip(prompts, params, outputs, strict=True):
        alone = runtime.generate(prompt, own)
        for answer, expected in zip(output.outputs, alone.outputs, strict=True):
            assert answer.token_ids == expected.token_ids
            if own.logprobs is None:
                assert answer.logprobs is None
                continue
            assert answer.logprobs is not None
            assert expected.logprobs is not None
            assert [t.token_id for t in answer.logprobs] == list(answer.token_ids)
            for token, same in zip(answer.logprobs, expected.logprobs, strict=True):
                assert token.logprob == pytest.approx(same.logprob, abs=1e-4)
                assert (token.rank, [t for t, _ in token.top]) == (same.rank, [t for t, _ in same.top])


def drawn_from(model: Any, prompt: list[int], answer: list[int], params: Params) -> torch.Tensor:
    """float64 log-probabilities of what each token of an answer is drawn from, by transformers' processors."""
    own: list[Any] = [RepetitionPenaltyLogitsProcessor(params.repetition_penalty)]
    if params.logit_bias:
        own.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in params.logit_bias}))
    if params.bad_words:
        words = [list(word) for word in params.bad_words if not isinstance(word, str)]
        own.append(NoBadWordsLogitsProcessor(words))
    if params.allowed_token_ids is not None:
        banned = [token for token in range(VOCAB_SIZE) if token not in params.allowed_token_ids]
        own.append(SuppressTokensLogitsProcessor(banned, device="cpu"))
    if params.temperature > 0:
        own.append(TemperatureLogitsWarper(params.temperature))
        own += [TopKLogitsWarper(params.top_k)] if params.top_k else []
        own += [TopPLogitsWarper(params.top_p)] if params.top_p < 1.0 else []
        own += [MinPLogitsWarper(params.min_p)] if params.min_p else []
    processors, ids = LogitsProcessorList(own), prompt + answer
    with torch.inference_mode(), torch.device("cpu"):
        logits = model.cpu()(torch.tensor([ids])).logits[0].double()
        rows = []
        for end in range(len(prompt), len(ids)):
            row = logits[end - 1].clone()
            for token in set(ids[len(prompt) : end]):
                count = ids[len(prompt) : end].count(token)
                row[token] -= params.presence_penalty + params.frequency_penalty * count
            rows.append(processors(torch.tensor([ids[:end]]), row[None])[0].log_softmax(-1))
    return torch.stack(rows)


FROM = Params(max_new_tokens=8, ignore_eos=True, seed=5, logprobs=6, logprobs_mode="processed_logprobs")
DRAWN_FROM: dict[str, Params] = {
    "temperature": replace(FROM, temperature=1.7),
    "top_k": replace(FROM, temperature=0.6, top_k=4),
    "all filters": replace(FROM, temperature=1.4, top_k=30, top_p=0.9, min_p=0.02),
    "greedy": replace(FROM, temperature=0, top_k=3),
    "greedy, penalized": replace(FROM, temperature=0, presence_penalty=1.5, frequency_penalty=0.5),
    "penalties": replace(FROM, repetition_penalty=1.4, top_p=0.8),
    "bias": replace(FROM, logit_bias={7: 4.0, 8: -3.0}, top_k=20),
    "bans": replace(FROM, bad_words=[[9], [10, 11]], min_p=0.05),
    "allowed": replace(FROM, allowed_token_ids=(5, 6, 7, 30), temperature=2.0),
    "two answers": replace(FROM, n=2, top_k=3, temperature=3.0),
}


def check_drawn_from(model: Any, prompt: list[int], answer: CompletionOutput, params: Params) -> None:
    exact = drawn_from(model, prompt, list(answer.token_ids), params)
    assert answer.logprobs is not None
    assert [token.token_id for token in answer.logprobs] == list(answer.token_ids)
    for row, token in zip(exact, answer.logprobs, strict=True):
        assert token.logprob == pytest.approx(float(row[token.token_id]), abs=2e-4)
        assert token.rank == int((row > row[token.token_id]).sum()) + 1
        best = row.topk(min(params.logprobs or 0, int((row > -torch.inf).sum())))
        assert [t for t, _ in token.top] == best.indices.tolist()
        assert [p for _, p in token.top] == pytest.approx(best.values.tolist(), abs=2e-4)
        if len(token.top) < (params.logprobs or 0):  # nothing else could be drawn
            assert sum(math.exp(p) for _, p in token.top) == pytest.approx(1.0, abs=1e-5)


def test_logprobs_of_what_tokens_were_drawn_from_are_those_of_transformers(runtime: Runtime, model: Any) -> None:
    """All kinds at once, beside raw ones and requests without any; cold, then from the cache; then alone."""
    params = [
        replace(FROM, logprobs=None, presence_penalty=1.0),
        replace(FROM, logprobs_mode="raw_logprobs", top_k=2),
        *DRAWN_FROM.values(),
    ]
    prompts = [[*PROMPT[: 3 + i % 4], 20 + i] for i in range(len(params))]
    for _ in range(2):
        outputs = runtime.generate(prompts, params)
        for prompt, own, output in zip(prompts, params, outputs, strict=True):
            for answer in output.outputs if own.wants_processed_logprobs else ():
                check_drawn_from(model, prompt, answer, own)
        without, raw, *_ = outputs
        exact = dense_logprobs(model, [*prompts[1], *raw.token_ids])[len(prompts[1]) - 1 :]
        assert raw.logprobs is not None
        for i, token in enumerate(raw.logprobs):
            assert token.logprob == pytest.approx(float(exact[i, token.token_id]), abs=1e-4)
            assert len(token.top) == 6
        assert without.logprobs is None
    for prompt, own, output in zip(prompts, params, outputs, strict=True):
        alone = runtime.generate(prompt, own)
        assert [answer.token_ids for answer in alone.outputs] == [answer.token_ids for answer in output.outputs]
        if own.wants_processed_logprobs:
            check_drawn_from(model, prompt, alone.outputs[0], own)


@pytest.mark.parametrize("kind", DRAWN_FROM)
def test_asking_for_log_probabilities_changes_no_token(runtime: Runtime, kind: str) -> None:
    """A stream gives the same, too."""
    params = DRAWN_FROM[kind]
    output = runtime.generate(PROMPT, params)
    for other in (replace(params, logprobs_mode="raw_logprobs"), replace(params, logprobs=None)):
        again = runtime.generate(PROMPT, other)
        assert [answer.token_ids for answer in again.outputs] == [answer.token_ids for answer in output.outputs]
    if params.n == 1:
        *_, last = runtime.stream(PROMPT, replace(params, detokenize=False))
        assert last.output is not None
        assert last.output.token_ids == output.token_ids
        assert last.output.logprobs is not None
        for token, same in zip(last.output.logprobs, output.logprobs or (), strict=True):
            assert token.logprob == pytest.approx(same.logprob, abs=1e-4)


def test_records_of_a_batch_hold_no_infinite_number(runtime: Runtime, tmp_path: Path) -> None:
    asked = {"logprobs": 5, "logprobs_mode": "processed_logprobs", "top_k": 2, "max_tokens": 4, "ignore_eos": True}
    lines = [{"token_ids": PROMPT, **asked}, {"token_ids": PROMPT, "sampling_params": {**asked, "n": 2}}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    run_batch(runtime, tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    written = (tmp_path / "out.jsonl").read_text("utf-8")
    assert "Infinity" not in written
    records = [json.loads(line) for line in written.splitlines()]
    assert [record["error"] for record in records] == [None, None]
    for own in (records[0], *records[1]["outputs"]):
        assert len(own["logprobs"]) == 4
        for token in own["logprobs"]:
            assert sum(math.exp(logprob) for _, logprob in token["top"]) == pytest.approx(1.0, abs=1e-5)
            assert token["token_id"] in [token_id for token_id, _ in token["top"]]


@pytest.mark.each_once
@pytest.mark.parametrize("chunk", [3, 2048])
@pytest.mark.parametrize("start", [0, 1, 20, 39])
def test_prompt_logprobs_equal_a_dense_pass_though_the_cache_is_warm(
    folder: Path, model: Any, chunk: int, start: int
) -> None:
    prompt = [int(i) for i in np.random.default_rng(1).integers(3, VOCAB_SIZE, 40)]
    exact = dense_logprobs(model, prompt)
    params = Params(max_new_tokens=2, ignore_eos=True, prompt_logprobs=2, prompt_logprobs_start=start)
    options: dict[str, Any] = {"device": torch.get_default_device(), "max_total_tokens": 500}
    with Runtime(folder, chunked_prefill_size=chunk, **options) as runtime:
        runtime.generate(prompt, GREEDY)
        output = runtime.generate(prompt, params)
    first = max(1, start)
    assert output.usage.cached_tokens == first - 1
    assert output.prompt_logprobs is not None
    assert [token.token_id for token in output.prompt_logprobs] == prompt[first:]
    for i, token in enumerate(output.prompt_logprobs, start=first):
        assert token.logprob == pytest.approx(float(exact[i - 1, prompt[i]]), abs=1e-4)
        assert [t for t, _ in token.top] == exact[i - 1].topk(2).indices.tolist()


def test_score_computes_each_context_once(runtime: Runtime, model: Any) -> None:
    context = [int(i) for i in np.random.default_rng(2).integers(3, VOCAB_SIZE, 50)]
    choices = [[4], [5, 6], [7, 8, 9], [5, 6, 7]]
    (scores,) = runtime.score([context], [choices])
    assert isinstance(scores, list)
    for score, choice in zip(scores, choices, strict=True):
        exact = dense_logprobs(model, context + choice)
        rows = range(len(context) - 1, len(context) + len(choice) - 1)
        expected = sum(float(exact[row, token]) for row, token in zip(rows, choice, strict=True))
        assert score.logprob == pytest.approx(expected, abs=1e-4)
        assert score.is_greedy == all(int(exact[r].argmax()) == t for r, t in zip(rows, choice, strict=True))
    computed = sum(score.usage.computed_tokens for score in scores)
    assert computed <= 50 + sum(len(choice) for choice in choices) + 3  # the context's last token for each
    best = runtime.generate(context, Params(temperature=0, max_new_tokens=1, ignore_eos=True)).token_ids[0]
    single = runtime.score([context], [[best]])[0]
    assert not isinstance(single, list)
    assert single.is_greedy


def test_score_of_text(builtin: Runtime) -> None:
    questions = [example.question for example in make_questions(EXAMPLES_SEED)[:6]]
    choices = [[f" {question.answer}", " Oslo", " 123"] for question in questions]
    scored = builtin.score([question.prompt for question in questions], choices)
    for own in scored:
        assert isinstance(own, list)
        assert own[0].is_greedy
        assert own[0].logprob > max(own[1].logprob, own[2].logprob)


def test_what_cannot_be_scored(runtime: Runtime) -> None:
    with pytest.raises(ParameterError, match="1 continuations for 2 prompts"):
        runtime.score([[3], [4]], [[5]])
    with pytest.raises(PromptError, match="prompt 1 must be text with a text continuation"):
        runtime.score([[3], [4]], [[5], "text"])
    with pytest.raises(PromptError, match="prompt 0 has no continuations"):
        runtime.score([[3], [4]], [[], [5]])
    with torch.no_grad():
        runtime.parts.model.decoder.embedding.weight[50] = float("nan")
    with pytest.raises(
        PassError, match="prompt 1 cannot be scored: the model computed values that are not finite"
    ):
        runtime.score([[3], [4]], [[5], [50, 6]])


def test_a_score_that_is_aborted_is_an_error(folder: Path) -> None:
    context = [int(i) for i in np.random.default_rng(2).integers(3, VOCAB_SIZE, 200)]
    errors: list[Exception] = []

    def score() -> None:
        try:
            runtime.score([context] * 4, [[[5], [6, 7]]] * 4)
        except PassError as error:
            errors.append(error)

    with Runtime(folder, device=torch.get_default_device(), chunked_prefill_size=1) as runtime:
        thread = threading.Thread(target=score)
        thread.start()
        while not runtime.num_running:
            thread.join(0.001)
        assert not any(runtime.abort(guessed) for guessed in range(20))
        assert runtime.abort_all() == 8
        thread.join(60)
        assert runtime.abort_all() == 0
    assert runtime.abort_all() == 0
    assert [str(error) for error in errors] == [
        "prompt 0 cannot be scored: the request was ended before its answer was whole"
    ]


# -- calls -------------------------------------------------------------------------------------------------


def test_stream_is_the_text_in_pieces(builtin: Runtime) -> None:
    question = make_questions(EXAMPLES_SEED)[3].question
    chunks = list(builtin.stream(question.prompt, Params(temperature=0, max_new_tokens=8)))
    output = chunks[-1].output
    assert output is not None
    assert all(chunk.output is None for chunk in chunks[:-1])
    assert "".join(chunk.text for chunk in chunks) == output.text
    assert output.text.strip() == question.answer
    assert tuple(t for chunk in chunks for t in chunk.token_ids) == output.token_ids


@pytest.mark.parametrize(("interval", "sizes"), [(1, [1] * 12), (5, [1, 5, 5, 1]), (100, [1, 11])])
def test_a_stream_tells_of_so_many_tokens_at_a_time(builtin: Runtime, interval: int, sizes: list[int]) -> None:
    expected = builtin.generate("Mira likes", GREEDY)
    chunks = list(builtin.stream("Mira likes", GREEDY, stream_interval=interval))

    async def streamed() -> list[int]:
        chunks = builtin.async_stream("Mira likes", GREEDY, stream_interval=interval)
        return [len(chunk.token_ids) async for chunk in chunks]

    assert [len(chunk.token_ids) for chunk in chunks] == sizes
    told = asyncio.run(streamed())  # of a loop that is behind, more at a time
    assert sum(told) == sum(sizes)
    assert all(size >= interval for size in told[1:-1])
    assert "".join(chunk.text for chunk in chunks) == expected.text
    assert chunks[-1].output is not None
    assert chunks[-1].output.token_ids == expected.token_ids
    with pytest.raises(ParameterError, match="stream_interval is 0"):
        next(builtin.stream("Mira likes", GREEDY, stream_interval=0))


HELD = tuple(f"{letter}\x01" for letter in "abcdefghijklmnopqrstuvwxyz0123456789")  # any could begin one


@pytest.mark.parametrize(
    ("interval", "is_late", "options"),
    [
        (1, False, {}),
        pytest.param(1, False, {"stop": ("9", "4"), "ignore_eos": True}, marks=pytest.mark.long),
        (4, True, {"stop": ("9", "4"), "ignore_eos": True}),  # lengths 24, 24, 24, 13, 22
        (3, False, {"stop": HELD, "stop_token_ids": (1148,), "ignore_eos": True, "seed": 0}),  # 4, 4, 24, 24, 24
    ],
)
def test_a_stream_of_several_answers(
    builtin: Runtime, interval: int, is_late: bool, options: dict[str, Any]
) -> None:
    """Each answer's pieces join to it, whenever it ends; its end is told once. The last one has the output, also
    where the consumer is late.
    """
    params = Params(**{"n": 5, "temperature": 2.0, "seed": 6, "max_new_tokens": 24, "logprobs": 1, **options})
    expected = builtin.generate("Mira likes", params)
    stream = builtin.stream("Mira likes", params, stream_interval=interval)
    chunks = [next(stream)]
    if is_late:
        builtin.generate("Hugo", Params(max_new_tokens=60, ignore_eos=True))
    chunks += stream
    assert all(chunk.output is None for chunk in chunks[:-1])
    assert chunks[-1].output is not None
    if is_late:  # what has run beside changes bits, on some CPUs
        expected = chunks[-1].output
    assert chunks[-1].output.outputs == expected.outputs
    ends = []
    for answer in expected.outputs:
        own = [chunk for chunk in chunks if chunk.index == answer.index]
        assert "".join(chunk.text for chunk in own) == answer.text
        assert tuple(token for chunk in own for token in chunk.token_ids) == answer.token_ids
        assert tuple(token for chunk in own for token in chunk.logprobs or ()) == answer.logprobs
        assert [chunk.finish_reason for chunk in own[:-1]] == [None] * (len(own) - 1)
        assert (own[-1].finish_reason, own[-1].matched) == (answer.finish_reason, answer.matched)
        ends.append(chunks.index(own[-1]))
    if options and not is_late:
        assert min(ends) < len(chunks) - 5  # it is told before the others have ended


def test_leaving_a_stream_ends_its_request(builtin: Runtime) -> None:
    stream = builtin.stream("Mira likes", Params(max_new_tokens=500, ignore_eos=True))
    next(stream)
    stream.close()
    assert not builtin.has_work
    with pytest.raises(PromptError, match="the prompt is empty: it has no tokens"):
        next(builtin.stream([]))


def test_streams_advance_together(builtin: Runtime) -> None:
    questions = [example.question for example in make_questions(EXAMPLES_SEED)[:3]]
    streams = [builtin.stream(q.prompt, Params(temperature=0, max_new_tokens=8)) for q in questions]
    texts = ["", "", ""]
    alive = set(range(3))
    while alive:
        for i in sorted(alive):
            try:
                texts[i] += next(streams[i]).text
            except StopIteration:
                alive.remove(i)
    assert [text.strip() for text in texts] == [q.answer for q in questions]


def test_generate_iter_gives_outputs_as_they_come(runtime: Runtime) -> None:
    params = [Params(temperature=0, max_new_tokens=n, ignore_eos=True) for n in (30, 1, 10)]
    outputs = list(runtime.generate_iter([[5], [6], [7]], params))
    assert [output.index for output in outputs] == [1, 2, 0]
    assert [output.token_ids for output in sorted(outputs, key=lambda o: o.index)] == [
        output.token_ids for output in runtime.generate([[5], [6], [7]], params)
    ]


def test_on_error_return(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = runtime.generate([[5, 6], [-1], [7]], GREEDY, on_error="return")
    assert [output.finish_reason for output in outputs] == [
        FinishReason.LENGTH,
        FinishReason.ERROR,
        FinishReason.LENGTH,
    ]
    assert outputs[1].error == "the prompt holds token id -1; the model's ids are 0 to 100"
    with pytest.raises(ParameterError, match="on_error is 'ignore'"):
        runtime.generate([[5]], on_error="ignore")  # type: ignore[arg-type]

    def failing(*_: Any) -> Any:
        raise MemoryError("no memory left")

    monkeypatch.setattr(runtime.parts.engine.runner, "launch", failing)
    (output,) = runtime.generate([[5, 6]], GREEDY, on_error="return")
    assert output.error is not None
    assert "MemoryError" in output.error
    with pytest.raises(PassError):
        runtime.generate([[5, 6]], GREEDY)


def test_dicts_in_the_spelling_of_either_engine(runtime: Runtime) -> None:
    ours = runtime.generate(PROMPT, Params(temperature=0, max_new_tokens=5, ignore_eos=True)).token_ids
    for params in (
        {"temperature": 0, "max_tokens": 5, "ignore_eos": True},
        {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True, "sampling_seed": 3},
    ):
        assert runtime.generate(PROMPT, params).token_ids == ours
    with pytest.raises(PromptError, match="temprature"):
        runtime.generate(PROMPT, {"temprature": 0})


def test_to_dict_has_the_shape_of_an_engine_output(builtin: Runtime) -> None:
    output = builtin.generate(
        "Mira likes Oslo.", Params(temperature=0, max_new_tokens=3, logprobs=1, ignore_eos=True)
    )
    as_dict = output.to_dict()
    assert as_dict["text"] == output.text
    assert as_dict["output_ids"] == list(output.token_ids)
    meta = as_dict["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 3}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (output.usage.prompt_tokens, 3)
    assert [entry[1] for entry in meta["output_token_logprobs"]] == list(output.token_ids)
    assert all(len(top) == 1 for top in meta["output_top_logprobs"])
    assert [one.token_ids for one in output.split()] == [output.token_ids]


def test_threads_share_the_engine(runtime: Runtime) -> None:
    prompts = [[i, i + 1, i + 2] for i in range(5, 45, 5)]
    expected = [output.token_ids for output in runtime.generate(prompts, GREEDY)]
    runtime.flush_cache()
    got: dict[int, Any] = {}

    def ask(i: int) -> None:
        got[i] = runtime.generate(prompts[i], GREEDY).token_ids

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[i] for i in range(len(prompts))] == expected


def test_async_calls_run_together(builtin: Runtime) -> None:
    questions = [example.question for example in make_questions(EXAMPLES_SEED)[:5]]
    params = Params(temperature=0, max_new_tokens=8)

    async def stream(prompt: str) -> str:
        return "".join([chunk.text async for chunk in builtin.async_stream(prompt, params)])

    async def everything() -> tuple[list[Any], list[str]]:
        answers = asyncio.gather(*(builtin.async_generate(q.prompt, params) for q in questions))
        streams = asyncio.gather(*(stream(q.prompt) for q in questions))
        return await answers, await streams

    answers, texts = asyncio.run(everything())
    assert [answer.text.strip() for answer in answers] == [q.answer for q in questions]
    assert [text.strip() for text in texts] == [q.answer for q in questions]


def test_abort_and_close_from_another_thread(folder: Path) -> None:
    runtime = Runtime(folder, device=torch.get_default_device(), max_total_tokens=2000)
    endless = Params(max_new_tokens=240, ignore_eos=True)
    outputs: list[Any] = []
    errors: list[Exception] = []

    def run() -> None:
        outputs.append(runtime.generate(PROMPT, endless, request_ids="first"))
        try:
            outputs.extend(runtime.generate([PROMPT] * 4, endless))
        except RadixrtError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while not runtime.abort("first"):
        pass
    while not outputs:
        thread.join(0.01)
    assert outputs[0].finish_reason is FinishReason.ABORT
    while not runtime.has_work:
        thread.join(0.01)
    runtime.close()
    thread.join(60)
    assert not thread.is_alive()
    # Whether it waits for the lock just then, or looks at its outputs, decides which it gets.
    assert [str(error) for error in errors] in ([], ["the runtime is closed"])
    assert {output.finish_reason for output in outputs} <= {FinishReason.ABORT, FinishReason.LENGTH}
    assert len(outputs) + 4 * len(errors) == 5
    with pytest.raises(RadixrtError, match="the runtime is closed"):
        runtime.generate(PROMPT)
    with pytest.raises(RadixrtError, match="the runtime is closed"):
        runtime.parts  # noqa: B018


def test_new_weights_match_nothing_stale(folder: Path, tmp_path: Path) -> None:
    with torch.device("cpu"):
        other_model = llama(seed=11)
    other = write(other_model, tmp_path / "other")
    options: dict[str, Any] = {"device": torch.get_default_device(), "max_total_tokens": 500}
    with Runtime(folder, **options) as runtime, Runtime(other, **options) as fresh:
        before = runtime.generate(PROMPT, GREEDY)
        with torch.device("cpu"):
            unlike = write(llama(hidden_size=64), tmp_path / "unlike")
        with pytest.raises(ModelError, match="hidden_size is 64, not 32"):
            runtime.update_weights(unlike)
        assert runtime.generate(PROMPT, GREEDY).token_ids == before.token_ids
        request = runtime.prepare(PROMPT, GREEDY)
        runtime.submit(request)
        runtime.update_weights(other)  # what runs ends with the old weights
        assert runtime.step()[0].token_ids == before.token_ids
        after = runtime.generate(PROMPT, GREEDY)
        assert after.usage.cached_tokens == 0
        assert after.token_ids == fresh.generate(PROMPT, GREEDY).token_ids != before.token_ids


def test_weights_that_changed_in_part_match_nothing_stale(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.device("cpu"):
        other = write(llama(seed=11), tmp_path / "other")
    opened = []

    @contextmanager
    def cut_short(file: Path, **options: Any) -> Iterator[Any]:
        opened.append(file)
        with safe_open(file, **options) as tensors:
            yield tensors
        if len(opened) == 2:  # names and shapes have been checked by the headers
            raise OSError("the disk is gone")

    with Runtime(folder, device=torch.get_default_device(), max_total_tokens=500) as runtime:
        runtime.generate(PROMPT, GREEDY)
        fingerprint = runtime.parts.model.identity()
        with monkeypatch.context() as patch:
            patch.setattr(weight_files, "safe_open", cut_short)
            with pytest.raises(
                RadixrtError, match=r"those of before: .* cannot be read: the disk is gone"
            ) as raised:
                runtime.update_weights(other)
        assert not isinstance(raised.value, ModelError), "that would mean that nothing has changed"
        assert runtime.parts.model.identity() != fingerprint
        assert runtime.generate(PROMPT, GREEDY).usage.cached_tokens == 0


def test_the_tree_can_be_looked_at(builtin: Runtime, capsys: pytest.CaptureFixture[str]) -> None:
    builtin.flush_cache()
    builtin.generate(["Mira likes Oslo. Q", "Mira likes Rome. Q"], Params(max_new_tokens=1), tenant="alice")
    builtin.print_tree()
    printed = capsys.readouterr().out
    assert "cached tokens" in printed
    assert "tenant alice" in printed
    assert "Mira likes" in printed
    builtin.print_tree(max_nodes=2)
    assert "more nodes" in capsys.readouterr().out
    builtin.generate(" :smile: [/b]", Params(max_new_tokens=1))
    builtin.print_tree()
    assert " :smile: [/b]" in capsys.readouterr().out


def test_what_is_cached_of_a_prompt(builtin: Runtime) -> None:
    prompt = builtin.generate("Mira likes Oslo.", Params(max_new_tokens=1)).prompt_token_ids
    for ids in (prompt, list(prompt), np.array(prompt), np.array(prompt, np.int32)):
        assert builtin.cached_len(ids) == len(prompt)
    assert builtin.cached_len("Mira likes Oslo.") == len(prompt)
    for bad in ([1.0, 2.0], np.array([1.5]), [[1]], [10**9], []):
        with pytest.raises(PromptError, match=r"^the prompt "):
            builtin.cached_len(bad)  # type: ignore[arg-type]


# -- what a review found -----------------------------------------------------------------------------------


def test_what_is_of_a_wrong_type_is_refused_and_nothing_breaks(builtin: Runtime) -> None:
    anything: Any = builtin
    for prompts in (b"bytes", {"role": "user", "content": "hi"}, None, 5, (p for p in [b"a"])):
        with pytest.raises(PromptError):
            anything.generate(prompts)
    for prompts, continuations in (
        ("abc", "xyz"),
        (["a"], [b"ab"]),
        (["a"], [None]),
        ([1, 2], [3, 4]),
        (None, []),
    ):
        with pytest.raises(PromptError):
            anything.score(prompts, continuations)
    with pytest.raises(ParameterError, match="tenant is"):
        anything.generate("a", tenant=["t"])
    with pytest.raises(PromptError, match="priority is b'x'"):
        anything.generate(["a"], priority=b"x")
    for options, message in (({"index": 1.5}, "index is 1.5"), ({"yields": "no"}, "yields is 'no'")):
        with pytest.raises(ParameterError, match=message):
            anything.prepare("a", **options)
    for request in (1.5, None, True, [1]):
        with pytest.raises(ParameterError, match="it must be a Request or its id"):
            anything.abort(request)
    with pytest.raises(ParameterError, match="max_nodes is 0"):
        builtin.print_tree(max_nodes=0)
    (output,) = anything.generate(["a"], {"bad_words": ["\ud800"]}, on_error="return")
    assert "bad_words holds what cannot be encoded" in str(output.error)
    with pytest.raises(PromptError, match="prompt_logprobs_start is 999, but the prompt has"):
        builtin.generate("a", {"prompt_logprobs": 0, "prompt_logprobs_start": 999})
    assert builtin.generate("Mira", {"max_tokens": 1, "stop": None}).usage.completion_tokens == 1


def test_score_names_the_prompt_that_is_too_long(builtin: Runtime) -> None:
    with pytest.raises(PromptError, match="1 of 2 prompts cannot be run:\nprompt 1 has"):
        builtin.score(["Mira", "Hugo"], [[" a", " b", " c"], [" likes" * 2000]])


def test_nothing_left_to_draw_is_an_error_and_no_other_token(runtime: Runtime) -> None:
    params = replace(GREEDY, allowed_token_ids=(5,), bad_words=[[5, 5]])
    output = runtime.generate(PROMPT, params)
    assert output.finish_reason is FinishReason.ERROR
    assert set(output.token_ids) <= {5}
    assert "left no token to draw" in str(output.error)


def test_requests_are_submitted_all_or_none(runtime: Runtime) -> None:
    request = runtime.prepare(PROMPT, GREEDY)
    with pytest.raises(ValueError, match="submitted twice"):
        runtime.submit(request, request)
    assert not runtime.has_work
    runtime.submit(request)
    with pytest.raises(ValueError, match="another request that has not ended"):
        runtime.submit(runtime.prepare(PROMPT, GREEDY), request)
    outputs = []
    while runtime.has_work:
        outputs += runtime.step()
    assert len(outputs) == 1


def test_a_stream_that_is_forgotten_in_the_middle_of_a_step_does_not_lock_up(
    builtin: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten = builtin.stream("Mira likes", Params(max_new_tokens=200, ignore_eos=True))
    next(forgotten)
    runner = builtin.parts.engine.runner
    launch = runner.launch

    def collected(batch: Any) -> Any:
        forgotten.close()  # as the garbage collector may, at any time
        return launch(batch)

    monkeypatch.setattr(runner, "launch", collected)
    assert builtin.generate("Hugo", Params(max_new_tokens=3, ignore_eos=True)).usage.completion_tokens == 3
    monkeypatch.setattr(runner, "launch", launch)
    assert builtin.generate("Hugo", Params(max_new_tokens=3, ignore_eos=True)).usage.completion_tokens == 3
    assert not builtin.has_work


def test_an_interrupt_delivers_what_has_ended_to_others(builtin: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    request = builtin.prepare("Hugo", Params(max_new_tokens=2, ignore_eos=True))
    builtin.submit(request)
    runner = builtin.parts.engine.runner
    collect = runner.collect

    def interrupted(handle: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return collect(handle)

    monkeypatch.setattr(runner, "collect", interrupted)
    interrupts = 0
    while builtin.num_running or builtin.num_waiting:
        try:
            builtin.step()
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts > 0
    monkeypatch.setattr(runner, "collect", collect)
    outputs = builtin.step()
    assert [output.id for output in outputs] == [request.id]
    assert builtin.generate("Hugo", Params(max_new_tokens=2)).error is None


def test_an_end_token_that_only_the_tokenizer_names_ends_answers(tmp_path: Path, device: torch.device) -> None:
    """As of a chat model whose config.json is the base model's; by whatever way a prompt comes in."""
    folder = tmp_path / "model"
    with torch.device("cpu"):
        write(llama(vocab_size=420), folder, eos=1)
    tokenizer = chat_tokenizer(folder)
    told = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**told, "eos_token": "<|im_end|>"}))
    (end,) = tokenizer.encode("<|im_end|>", add_special_tokens=False).tolist()
    params: dict[str, Any] = {"max_tokens": 5, "logit_bias": {end: 100.0}, "seed": 1}
    chat = [{"role": "user", "content": "Hello"}]
    assert builder_without_weights(folder).end_ids == (1, 2, end)  # 2 is config.json's
    (tmp_path / "in.jsonl").write_text(json.dumps({"messages": chat, "sampling_params": params}) + "\n")
    with Runtime(folder, device=torch.get_default_device(), max_total_tokens=2000) as runtime:
        found = [
            runtime.generate("Hello", params),
            runtime.generate([chat], params)[0],
            [*runtime.stream(chat, params)][-1].output,
            Conversation(runtime, sampling_params=params).say("Hello"),
        ]
        assert all(one is not None and one.token_ids == (end,) for one in found)
        assert {one.finish_reason for one in found if one is not None} == {FinishReason.STOP}
        assert runtime.generate("Hello", {**params, "choice": ["Mira", "Mira likes"]}).text == "Mira"
        run_batch(runtime, tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    (record,) = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert (record["finish_reason"], record["usage"]["completion_tokens"]) == ("stop", 1)
