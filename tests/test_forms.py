"""Answers in a form, end to end: rules over token ids in the place of grammars."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from radixrt import FinishReason, Runtime
from radixrt import SamplingParams as Params
from radixrt.errors import PassError
from radixrt.execution.model_runner import ModelRunner
from radixrt.execution.pass_builder import PassBuilder
from radixrt.forms.matcher import Form, Matchers, OneByOne
from radixrt.output import RequestOutput
from radixrt.schedule import booking
from radixrt.schedule.passes import Pass
from radixrt.schedule.request import Request
from tests.support.checkpoints import VOCAB_SIZE, llama, write
from tests.support.forms import RuleForm, RuleMatcher, fill_row

pytestmark = pytest.mark.usefixtures("device")

GREEDY = Params(temperature=0, max_new_tokens=12, ignore_eos=True)
RANDOM = Params(temperature=1.5, top_k=20, top_p=0.9, min_p=0.01, max_new_tokens=12, ignore_eos=True, seed=7)
PROMPTS = [[*[5, 6, 7, 8, 9, 10, 11][:length], length] for length in (7, 7, 3, 5, 7, 1)]


def steps(tokens: Sequence[int]) -> set[int]:
    """Each token is a little greater than the one before; nothing follows beyond 60."""
    last = tokens[-1] if tokens else 20
    return set() if last > 60 else set(range(last + 1, last + 9))


STEPS = RuleForm(VOCAB_SIZE, steps)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> Path:
    with torch.device("cpu"):
        return write(llama(seed=4), tmp_path_factory.mktemp("llama"))


@contextmanager
def runtime_of(folder: Path, **options: Any) -> Iterator[Runtime]:
    options = {"max_total_tokens": 2000} | options
    with Runtime(folder, device=torch.get_default_device(), **options) as runtime:
        yield runtime


def generate(
    runtime: Runtime, prompts: list[list[int]], params: Any, forms: Mapping[int, Form] = {}
) -> list[RequestOutput]:
    """With forms, by the places of prompts."""
    builder, build = runtime.parts.builder, runtime.parts.builder.build

    def with_form(*arguments: Any, **options: Any) -> Request:
        request = build(*arguments, **options)
        return replace(request, form=forms.get(request.index))

    builder.build = with_form  # type: ignore[method-assign]
    try:
        return runtime.generate(prompts, params)
    finally:
        del builder.build


def assert_formed(tokens: Sequence[int]) -> None:
    for count in range(len(tokens)):
        assert tokens[count] in steps(tokens[:count])


@pytest.mark.parametrize("params", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_a_form_that_never_ends_is_a_list_of_allowed_tokens(folder: Path, params: Params) -> None:
    """And nobody beside it gets other tokens."""
    allowed = (3, 31, 32, 40, 41, 63, 64, 90)
    form = RuleForm(VOCAB_SIZE, lambda tokens: set(allowed))
    lists = [replace(params, allowed_token_ids=allowed if place % 2 else None) for place in range(len(PROMPTS))]
    with runtime_of(folder) as runtime:
        expected = runtime.generate(PROMPTS, lists)
        runtime.flush_cache()
        found = generate(runtime, PROMPTS, params, {1: form, 3: form, 5: form})
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    assert {output.finish_reason for output in found} == {FinishReason.LENGTH}


@pytest.mark.each_once
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": False},
        {"chunked_prefill_size": 3},
        {"max_running_requests": 2},
        {"max_total_tokens": 40},
        {"deterministic": True},
        {"enable_prefix_cache": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("params", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_answers_have_their_form_however_they_run(
    folder: Path, device: torch.device, options: dict[str, Any], params: Params
) -> None:
    if device.type == "cuda" and "deterministic" in options:
        options = {**options, "dtype": "bfloat16"}
    forms = {0: STEPS, 2: STEPS, 3: STEPS, 4: STEPS}
    with runtime_of(folder, **options) as runtime:
        found = generate(runtime, PROMPTS, params, forms)
    for place in forms:
        tokens, output = found[place].token_ids, found[place]
        assert_formed(tokens)
        is_complete = not steps(tokens)
        assert output.finish_reason is (FinishReason.STOP if is_complete else FinishReason.LENGTH)
        assert is_complete or len(tokens) == params.max_new_tokens
    assert len(found[1].token_ids) == len(found[5].token_ids) == params.max_new_tokens
    if device.type == "cpu":
        with runtime_of(folder) as runtime:
            again = generate(runtime, PROMPTS, params, forms)
        assert [output.token_ids for output in again] == [output.token_ids for output in found]


def test_each_of_n_answers_has_the_form(folder: Path) -> None:
    params = replace(RANDOM, n=5, max_new_tokens=20)
    with runtime_of(folder) as runtime:
        (output,) = generate(runtime, PROMPTS[:1], params, {0: STEPS})
    assert len({tuple(one.token_ids) for one in output.outputs}) > 1
    for one in output.outputs:
        assert_formed(one.token_ids)
        assert not steps(one.token_ids)
        assert one.finish_reason is FinishReason.STOP


def test_a_form_that_ends_with_the_last_token_is_complete(folder: Path) -> None:
    form = RuleForm(VOCAB_SIZE, lambda tokens: {9} if len(tokens) < 3 else set())
    with runtime_of(folder) as runtime:
        (output,) = generate(runtime, PROMPTS[:1], replace(GREEDY, max_new_tokens=3), {0: form})
    assert (output.token_ids, output.finish_reason) == ((9, 9, 9), FinishReason.STOP)


def test_log_probabilities_of_what_was_drawn_leave_the_rest_out(folder: Path) -> None:
    params = replace(RANDOM, logprobs=30, logprobs_mode="processed_logprobs", max_new_tokens=4)
    with runtime_of(folder) as runtime:
        (output,) = generate(runtime, PROMPTS[:1], params, {0: STEPS})
        (plain,) = generate(runtime, PROMPTS[:1], replace(params, logprobs_mode="raw_logprobs"), {0: STEPS})
    assert plain.token_ids == output.token_ids
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    for count, token in enumerate(logprobs):
        assert {other for other, _ in token.top} <= steps(output.token_ids[:count])
        assert np.isclose(sum(np.exp(logprob) for _, logprob in token.top), 1.0, atol=1e-3)


def test_bans_and_a_form_that_leave_nothing_are_an_error(folder: Path) -> None:
    form = RuleForm(VOCAB_SIZE, lambda tokens: {9})
    with runtime_of(folder) as runtime:
        params = [replace(GREEDY, bad_words=[[9]]), GREEDY]
        bad, good = generate(runtime, PROMPTS[:2], params, {0: form})
    assert bad.finish_reason is FinishReason.ERROR
    assert "its form, allowed_token_ids, bad_words and min_new_tokens left no token to draw" in str(bad.error)
    assert good.finish_reason is FinishReason.LENGTH


def test_a_mask_that_cannot_be_filled_costs_its_pass_alone(folder: Path) -> None:
    class Failing(RuleForm):
        def joined(self, matchers: Mapping[int, Any]) -> Matchers:
            def fill(matcher: RuleMatcher, masks: np.ndarray, row: int) -> None:
                if len(matcher.tokens) == 2:
                    raise RuntimeError("no mask for this")
                fill_row(matcher, masks, row)

            return OneByOne(matchers, fill)

    with runtime_of(folder) as runtime:
        with pytest.raises(PassError, match="prompt 0: its pass failed: RuntimeError: no mask for this"):
            generate(runtime, PROMPTS[:2], GREEDY, {0: Failing(VOCAB_SIZE, lambda tokens: {9, 10})})
        (after,) = generate(runtime, PROMPTS[2:3], GREEDY, {0: STEPS})
    assert_formed(after.token_ids)


@pytest.mark.parametrize("count", [1, 8])
def test_a_form_that_cannot_begin_costs_its_pass_alone(folder: Path, count: int) -> None:
    class Failing(RuleForm):
        def matcher(self) -> RuleMatcher:
            raise RuntimeError("no beginning of this")

    failing = Failing(VOCAB_SIZE, lambda tokens: {9})
    with runtime_of(folder) as runtime:
        with pytest.raises(PassError, match="its pass failed: RuntimeError: no beginning of this"):
            generate(runtime, many_prompts(count), GREEDY, dict.fromkeys(range(count), failing))
        (after,) = generate(runtime, PROMPTS[2:3], GREEDY, {0: STEPS})
    assert_formed(after.token_ids)


def test_a_form_that_cannot_take_tokens_costs_nobody_else(folder: Path) -> None:
    class Failing(RuleForm):
        def joined(self, matchers: Mapping[int, Any]) -> Matchers:
            class Joined(OneByOne):
                def push(self, token_ids: np.ndarray) -> dict[int, Exception | None]:
                    raise RuntimeError("no token for this")

            return Joined(matchers, fill_row)

    with runtime_of(folder) as runtime:
        form = Failing(VOCAB_SIZE, lambda tokens: {9, 10})
        bad, beside = generate(runtime, PROMPTS[:2], GREEDY, {0: form})
        (after,) = generate(runtime, PROMPTS[2:3], GREEDY, {0: STEPS})
    assert bad.finish_reason is FinishReason.ERROR
    assert "no token for this" in str(bad.error)
    assert beside.finish_reason is FinishReason.LENGTH
    assert_formed(after.token_ids)


def test_a_form_that_cannot_say_what_it_forces_costs_nobody_else(folder: Path) -> None:
    def failing(tokens: Sequence[int]) -> set[int]:
        if len(tokens) == 2:
            raise RuntimeError("no rule for this")
        return {9}

    with runtime_of(folder) as runtime:
        bad, beside = generate(runtime, PROMPTS[:2], GREEDY, {0: RuleForm(VOCAB_SIZE, failing)})
    assert bad.finish_reason is FinishReason.ERROR
    assert "its answer cannot go on: no rule for this" in str(bad.error)
    assert beside.finish_reason is FinishReason.LENGTH


def many_prompts(count: int) -> list[list[int]]:
    return [[5, 6, 7, place % 30 + 1, place % 7 + 1] for place in range(count)]


def test_the_next_pass_is_prepared_before_the_masks_are_awaited(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the draws are launched, and the pass after them. It is the one that was prepared."""
    called: list[str] = []

    def watch(name: str) -> None:
        method = getattr(ModelRunner, name)
        monkeypatch.setattr(ModelRunner, name, lambda *given: (called.append(name), method(*given))[1])

    for name in ("prepare", "launch", "draw_masked", "collect"):
        watch(name)
    build, built = PassBuilder.build, []
    monkeypatch.setattr(PassBuilder, "build", lambda self, pass_: (built.append(pass_), build(self, pass_))[1])
    with runtime_of(folder) as runtime:
        generate(runtime, many_prompts(8), RANDOM, dict.fromkeys(range(8), STEPS))
    after = ["prepare", "draw_masked", "launch", "collect"]  # `collect` of the pass whose draws were launched
    assert called[: 1 + 4 * 5] == ["launch", *after * 5]
    assert len(built) == called.count("launch")


def test_matchers_are_made_by_the_thread_that_steps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That which fills masks would make others beside it."""
    makers, make, this = [], RuleForm.matcher, threading.current_thread
    monkeypatch.setattr(RuleForm, "matcher", lambda self: (makers.append(this()), make(self))[1])
    with runtime_of(folder, chunked_prefill_size=16) as runtime:
        generate(runtime, many_prompts(12), RANDOM, dict.fromkeys(range(12), STEPS))
    assert makers == [this()] * 12


def test_a_pass_that_cannot_be_prepared_ends_its_own_answers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, prepare, fails = PassBuilder.build, ModelRunner.prepare, [False]

    def failing(self: PassBuilder, pass_: Pass) -> Any:
        if fails[0]:
            raise RuntimeError("no plan for this")
        return build(self, pass_)

    def watched(self: ModelRunner, pass_: Pass) -> None:
        fails[0] = not pass_.extended_tokens
        prepare(self, pass_)
        fails[0] = False

    monkeypatch.setattr(PassBuilder, "build", failing)
    monkeypatch.setattr(ModelRunner, "prepare", watched)
    with runtime_of(folder) as runtime:
        with pytest.raises(PassError, match="its pass failed: RuntimeError: no plan for this"):
            generate(runtime, many_prompts(8), GREEDY, dict.fromkeys(range(8), STEPS))
        monkeypatch.setattr(PassBuilder, "build", build)
        after = generate(runtime, many_prompts(8), GREEDY, dict.fromkeys(range(8), STEPS))
    for output in after:
        assert_formed(output.token_ids)


@pytest.mark.gpu
def test_captured_passes_have_masks(folder: Path) -> None:
    """As many answers as make captured decodes of several sizes, some of them with a form."""
    prompts = many_prompts(70)
    forms = dict.fromkeys(range(0, 70, 3), STEPS)
    with Runtime(folder, device="cuda", max_total_tokens=4000) as runtime:
        found = generate(runtime, prompts, RANDOM, forms)
        assert runtime.parts.engine.runner.executor.graphs  # type: ignore[attr-defined]
    for place in forms:
        assert_formed(found[place].token_ids)


def test_masks_of_more_and_of_fewer_answers(folder: Path) -> None:
    """Their memory moves while passes are in flight; draws are those of answers that are alone."""
    params = [replace(RANDOM, seed=place, max_new_tokens=2 + place % 9) for place in range(40)]
    with runtime_of(folder, dtype="float32", max_running_requests=40) as runtime:
        found = []
        for count in (3, 40, 7, 40):
            forms = dict.fromkeys(range(0, count, 1 + (count == 7)), STEPS)
            found.append(generate(runtime, many_prompts(count), params[:count], forms))
            for place in forms:
                assert_formed(found[-1][place].token_ids)
        (alone,) = generate(runtime, many_prompts(40)[39:], params[39:], {0: STEPS})
    assert alone.token_ids == found[1][39].token_ids == found[3][39].token_ids
    assert [output.token_ids for output in found[1]] == [output.token_ids for output in found[3]]


def test_passes_without_forms_are_drawn_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(ModelRunner, "draw_masked", lambda *_: called.append(1))
    with runtime_of(folder) as runtime:
        generate(runtime, PROMPTS, GREEDY)
    assert not called


# --- grammars ---------------------------------------------------------------------------------------------

# --- forced tokens ---


def template(tokens: Sequence[int]) -> set[int]:
    """Three times: six tokens that are forced, and a choice of four, which decides about the next six."""
    field_number, place = divmod(len(tokens), 7)
    if field_number == 3:
        return set()
    before = tokens[-1 - place] if tokens and place < len(tokens) else 20
    return {before % 40 + 10 + place} if place < 6 else {60, 61, 70, 71}


TEMPLATE = RuleForm(VOCAB_SIZE, template)


def one_by_one(patch: pytest.MonkeyPatch) -> None:
    """Draw forced tokens, too."""
    patch.setattr(booking, "MIN_FORCED", 10**9)


@pytest.mark.long_unless(
    kept=lambda given: given["options"] in ({}, {"chunked_prefill_size": 3}, {"max_total_tokens": 48})
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": False},
        {"chunked_prefill_size": 3},
        {"max_running_requests": 2},
        {"max_total_tokens": 48},
        {"enable_prefix_cache": False},
    ],
    ids=str,
)
def test_forced_tokens_are_extended_over_and_change_no_answer(
    folder: Path, device: torch.device, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = replace(RANDOM, max_new_tokens=30)
    lists = [replace(params, n=1 + place % 2) for place in range(len(PROMPTS))]
    forms = dict.fromkeys((0, 1, 3, 4), TEMPLATE)
    found = []
    for _ in range(2):
        with runtime_of(folder, dtype="float32", **options) as runtime:
            outputs = generate(runtime, PROMPTS, lists, forms)
        found.append([[one.token_ids for one in output.outputs] for output in outputs])
        for place in forms:
            for one in outputs[place].outputs:
                assert len(one.token_ids) == 21
                assert one.finish_reason is FinishReason.STOP
        one_by_one(monkeypatch)
    assert found[0] == found[1]
    assert len({tuple(ids) for place in forms for ids in found[0][place]}) > 1


def test_a_run_of_forced_tokens_takes_two_passes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that draws the first of them, which is in flight already, and the one that extends over them."""
    params, passes = replace(RANDOM, max_new_tokens=30), []
    for _ in range(2):
        with runtime_of(folder) as runtime:
            generate(runtime, PROMPTS[:1], params, {0: TEMPLATE})
            passes.append(runtime.activity().passes)
        one_by_one(monkeypatch)
    assert passes[1] >= 21
    assert passes[1] - passes[0] == 3 * 5


@pytest.mark.parametrize(("length", "stops"), [(4, ()), (10, ()), (20, (33,))])
def test_an_answer_may_end_among_forced_tokens(
    folder: Path, length: int, stops: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = replace(RANDOM, max_new_tokens=length, stop_token_ids=stops)
    ends = []
    for _ in range(2):
        with runtime_of(folder, dtype="float32") as runtime:
            (output,) = generate(runtime, PROMPTS[:1], params, {0: TEMPLATE})
            (follow,) = runtime.generate([[*PROMPTS[0], *output.token_ids, 9]], GREEDY)  # reads what is cached
        ends.append((output.token_ids, output.finish_reason, follow.token_ids))
        one_by_one(monkeypatch)
    assert ends[0] == ends[1]
    assert ends[0][1] is (FinishReason.STOP if stops else FinishReason.LENGTH)


def test_tokens_whose_log_probabilities_are_wanted_are_drawn(folder: Path) -> None:
    params = replace(RANDOM, max_new_tokens=30, logprobs=1)
    with runtime_of(folder, dtype="float32") as runtime:
        (output,) = generate(runtime, PROMPTS[:1], params, {0: TEMPLATE})
    assert output.logprobs is not None
    assert [one.token_id for one in output.logprobs] == list(output.token_ids)


POINT = {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}}, "required": ["x"]}
SCHEMAS: dict[str, Any] = {
    "types": {"type": ["string", "null", "boolean"], "maxLength": 12},
    "object": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "nested": {"type": "object", "properties": {"a": POINT, "b": POINT}, "required": ["a", "b"]},
    "array": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
    "enum": {"enum": ["rot", "grün", 3, None, [1, 2]]},
    "const": {"const": {"kind": "fixed", "n": 1}},
    "refs": {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer"},
                    "next": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]},
                },
                "required": ["value"],
                "additionalProperties": False,
            }
        },
    },
    "any of": {"anyOf": [{"type": "integer", "minimum": 5}, {"type": "string", "pattern": "^[a-c]{2,4}$"}]},
    "format": {"type": "string", "format": "date"},
    "pattern": {"type": "string", "pattern": "^[A-Z][a-z]+-\\d{3}$"},
    "unicode": {"type": "object", "properties": {"straße": {"enum": ["löwe", "東京"]}}, "required": ["straße"]},
    "bounds": {"type": "number", "minimum": -1.5, "exclusiveMaximum": 2.5},
}


def check_answers(count: int) -> None:
    """Answers of the built-in model at a high temperature; those that ended by themselves have their form."""
    pytest.importorskip("llguidance", reason="llguidance is not installed: pip install 'radixrt[grammar]'")
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed: pip install jsonschema")
    prompt = "Mira likes Oslo. Tarek counts 374.\nQ: Mira likes?\nA:"
    regex, choices = r"(ab|c)+-[0-9]{2,5}", ("Oslo", "Os", "Rome is far")
    kinds: list[dict[str, Any]] = [{"json_schema": schema} for schema in SCHEMAS.values()]
    kinds += [
        {"regex": regex},
        {"choice": choices},
        {"json_object": True},
        {"grammar": 'root ::= ("x" root) | "y"'},
    ]
    params = [
        Params(**kinds[place % len(kinds)], temperature=1.5, max_new_tokens=160, seed=place, n=1 + place % 2)
        for place in range(count)
    ]
    complete = 0
    with Runtime(device=torch.get_default_device(), seed=1, max_total_tokens=40_000) as runtime:
        for own, output in zip(params, runtime.generate([prompt] * count, params), strict=True):
            for answer in output.outputs:
                assert answer.finish_reason in (FinishReason.STOP, FinishReason.LENGTH), output.error
                if answer.finish_reason is FinishReason.LENGTH:
                    continue
                complete += 1
                if own.json_schema is not None:
                    jsonschema.validate(json.loads(answer.text), json.loads(own.json_schema))
                elif own.json_object:
                    assert isinstance(json.loads(answer.text), dict)
                elif own.regex:
                    assert re.fullmatch(regex, answer.text)
                elif own.choice:
                    assert answer.text in choices
                else:
                    assert re.fullmatch("x*y", answer.text)
    assert complete > 0.7 * count


def test_answers_validate() -> None:
    check_answers(32)


@pytest.mark.long
def test_two_thousand_answers_validate() -> None:
    check_answers(2000)
