"""Requests and their ids; what is refused is in tests/test_runtime.py and tests/test_generation.py."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from radixrt.builtin import MODEL_PATH
from radixrt.errors import ContextLengthError, ParameterError, PromptError
from radixrt.forms.compiler import form_compiler
from radixrt.forms.matcher import mask_words
from radixrt.frontend.arguments import Call, listed_prompts
from radixrt.frontend.request_builder import RequestBuilder, builder_without_weights
from radixrt.planning.simulated import NoWeights
from radixrt.request_list import FEWEST, TokenRequests, request_list
from radixrt.sampling_params import SamplingParams
from radixrt.schedule.logits_processors import LogitsProcessors
from radixrt.text.chat import Chat
from radixrt.text.tokenizer import Tokenizer, load_tokenizer
from tests.support.small_tokenizers import byte_level, chat_tokenizer, small_tokenizer


@pytest.fixture
def builder() -> RequestBuilder:
    return RequestBuilder(NoWeights(50).config, None, context_length=20, seed=0)


def test_a_request_has_one_id(builder: RequestBuilder) -> None:
    prompts, ids = [[1], [99], [2]], ["a", "b", "c"]
    refused, requests = builder.build_all(prompts, None, Call(request_ids=ids, on_error="return"))
    assert [(request.index, request.id) for request in requests] == [(0, "a"), (2, "c")]
    assert [(output.index, output.id) for output in refused] == [(1, "b")]
    assert refused[0].error == "the prompt holds token id 99; the model's ids are 0 to 49"
    refused, _ = builder.build_all(prompts, [None, None, {"n": 0}], Call(request_ids=ids, on_error="return"))
    assert refused[1].error == "the prompt: n is 0; it must be a whole number from 1 to 4096"
    with pytest.raises(PromptError, match="1 of 3 prompts cannot be run:\nprompt 1 holds token id 99"):
        builder.build_all(prompts, None, Call(request_ids=ids))
    params = {"allowed_token_ids": [99]}
    with pytest.raises(PromptError, match="prompt 1: allowed_token_ids holds 99; the model's ids are below 50"):
        builder.build_all([[1], [2]], [None, params], Call())
    with pytest.raises(PromptError, match=r"^the prompt holds token id 99; the model's ids are 0 to 49$"):
        builder.build_all([[99]], None, Call(many=False))
    refused, _ = builder.build_all([[1]], params, Call(on_error="return"))
    assert refused[0].error == "the prompt: allowed_token_ids holds 99; the model's ids are below 50"
    _, numbered = builder.build_all([[1], [2]], None, Call())
    others = [*numbered, builder.build([1]), builder.build([1])]
    assert len({request.id for request in others}) == 4
    assert all(isinstance(request.id, int) for request in others)
    again = RequestBuilder(builder.config, None, context_length=builder.context_length).build([1])
    assert again.id not in {request.id for request in others}  # nor can they be guessed
    assert builder.build([1], request_id="c").id == "c"


def test_request_ids_are_compared_once_each(builder: RequestBuilder) -> None:
    compared: list[str] = []

    class Compared(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            compared.append(self)
            return str.__eq__(self, str(other))

    ids = [*map(str, range(1000)), Compared("999"), Compared("1000")]
    with pytest.raises(ParameterError, match="request_ids holds '999' twice"):
        builder.build_all([[1]] * len(ids), None, Call(request_ids=ids))
    assert len(compared) < 100


@pytest.mark.parametrize("kind", ["wordpiece", "bare, with BOS blanks removed"])
def test_a_bad_word_without_tokens_is_refused(kind: str) -> None:
    """It would fail in the pass that admits it, and with that all other requests."""
    tokenizer = small_tokenizer(kind)
    builder = RequestBuilder(NoWeights(tokenizer.vocab_size).config, tokenizer, context_length=20)
    with pytest.raises(ParameterError, match="bad_words holds ' ', of which this model's tokenizer makes no"):
        builder.build([1], {"bad_words": ["the", " "]})
    assert builder.build([1], {"bad_words": ["the"]}).bad_words


def test_priorities_are_one_for_all_or_one_each(builder: RequestBuilder) -> None:
    def built(prompts: list[Any], priority: Any, *, many: bool = True) -> list[int]:
        _, requests = builder.build_all(prompts, None, Call(many=many, priority=priority))
        return [request.priority for request in requests]

    assert built([[1], [2]], 0) == [0, 0]
    assert built([[1], [2]], -7) == [-7, -7]
    assert built([[1], [2]], (number for number in (3, -1))) == [3, -1]
    assert built([[1], [2]], np.array([3, -1])) == [3, -1]
    assert built([[1]], 5, many=False) == [5]
    with pytest.raises(ParameterError, match="there are 3 priorities for 2 prompts; give one, or one each"):
        built([[1], [2]], [1, 2, 3])
    for wrong in ("high", None, 0.5, True, [None, 1], 2**31):
        with pytest.raises(PromptError, match=r"prompt 0: priority is .*; it must be a whole number from"):
            built([[1], [2]], wrong)
    with pytest.raises(PromptError, match=r"priority is \[1\]; it must be a whole number"):
        built([[1]], [1], many=False)
    with pytest.raises(ParameterError, match="priority is None; it must be"):
        builder.build_streamed([1], {"detokenize": False}, priority=None)  # type: ignore[arg-type]


def test_seeds_that_journals_rely_on(builder: RequestBuilder) -> None:
    """A batch that goes on with this version draws what it would have drawn with the one before."""
    seeds = [builder.build([1], index=index).seed for index in (0, 1, 10**6)]
    assert seeds == [2928822574489494037, 7359998640416684799, 3375980895025787012]
    calls = [builder.build([1], index=index, call=call).seed for index in range(4) for call in range(4)]
    assert len(set(calls)) == 16
    assert {builder.build([1], {"seed": 7}, call=call).seed for call in range(4)} == {7}


def test_a_stream_needs_a_tokenizer(builder: RequestBuilder) -> None:
    with pytest.raises(ParameterError, match="streams need a tokenizer"):
        builder.build_streamed([1], request_id="a")


def test_scored_requests_know_their_prompts(builder: RequestBuilder) -> None:
    requests = builder.build_scored([[1, 2], [3]], [[[4], [5, 6]], [7]], None)
    assert [request.prompt_ids.tolist() for request in requests] == [[1, 2, 4], [1, 2, 5, 6], [3, 7]]
    assert [request.params.prompt_logprobs_start for request in requests] == [2, 2, 1]


@pytest.mark.parametrize("none", [[], (), {}, b"x", 7, None])
def test_a_prompt_without_continuations_is_named(builder: RequestBuilder, none: Any) -> None:
    with pytest.raises(PromptError, match="1 of 2 prompts cannot be run:\nprompt 1 has no continuations"):
        builder.build_scored([[1], [2]], [[3], none], None)


def test_parameters_are_read_and_checked_once_for_many_prompts(builder: RequestBuilder) -> None:
    given = {"max_tokens": 3, "bad_words": [[4]]}
    _, requests = builder.build_all([[1], [2]], given, Call())
    assert requests[0].params is requests[1].params
    assert requests[0].bad_words is requests[1].bad_words
    assert builder.build([1], requests[0].params).bad_words is requests[0].bad_words
    for number in range(200):  # more than are remembered
        assert builder.build([1], {"max_tokens": 3, "bad_words": [[number % 50]]}).bad_words == ((number % 50,),)
    assert builder.build([1], requests[0].params).bad_words == ((4,),)


def rows(count: int) -> Iterator[list[int]]:
    yield from ([number] for number in range(count))


class Column:
    """A column of a table, as pandas' Series: it yields its values, and is no sequence."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __iter__(self) -> Iterator[Any]:
        yield from self.values


@pytest.mark.parametrize(
    ("given", "listed"),
    [
        (rows(2), [[0], [1]]),
        (Column("a", "b"), ["a", "b"]),
        (Column(), []),
        (np.array(["a", "b"], dtype=object), ["a", "b"]),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        ([{"prompt": "a"}, {"prompt_token_ids": [1]}], [{"prompt": "a"}, {"prompt_token_ids": [1]}]),
        ([[]], [[]]),
        ([], []),
    ],
)
def test_many_prompts(given: Any, listed: list[Any]) -> None:
    found, many = listed_prompts(given)
    assert [one.tolist() if isinstance(one, np.ndarray) else one for one in found] == listed
    assert many


@pytest.mark.parametrize(
    "given",
    [
        "a",
        [1, 2],
        range(3),
        Column(1, 2),
        np.array([1, 2]),
        {"prompt": "a"},
        [{"role": "user", "content": "a"}],
    ],
)
def test_one_prompt(given: Any) -> None:
    found, many = listed_prompts(given)
    assert len(found) == 1
    assert not many


@pytest.mark.parametrize("given", [7, None, {"a": 1}, b"a", np.array(3)])
def test_what_is_no_prompt(given: Any) -> None:
    with pytest.raises(PromptError, match="they must be one prompt or a list of prompts"):
        listed_prompts(given)


def test_prompts_as_dicts_and_empty_ones(builder: RequestBuilder) -> None:
    dicts = [
        {"prompt_token_ids": [1, 2]},
        {"prompt": [3], "prompt_token_ids": None},
        {"prompt_token_ids": (4,), "prompt": "a"},
    ]
    _, requests = builder.build_all(dicts, None, Call())
    assert [request.prompt_ids.tolist() for request in requests] == [[1, 2], [3], [4]]
    scored = builder.build_scored([{"prompt_token_ids": [1]}], [[2]], None)
    assert scored[0].prompt_ids.tolist() == [1, 2]
    for wrong, message in (
        ({"prompt": "a", "multi_modal_data": 1}, "has 'multi_modal_data'; a dict has prompt or prompt_token_ids"),
        ({"prompt": None}, "has no prompt and no prompt_token_ids"),
        ({"prompt_token_ids": "a"}, "has text as its prompt_token_ids"),
        ({"prompt_token_ids": []}, "is empty: it has no tokens"),
        ([], "is empty: it has no tokens"),
        ((), "is empty: it has no tokens"),
    ):
        with pytest.raises(PromptError, match=message):
            builder.build(wrong)


def test_parameters_and_ids_come_from_columns_too(builder: RequestBuilder) -> None:
    each, ids = Column({"max_tokens": 3}, None), Column("a", "b")
    _, requests = builder.build_all([[1], [2]], each, Call(request_ids=ids))
    assert [(request.params.max_new_tokens, request.id) for request in requests] == [(3, "a"), (128, "b")]


def test_an_answer_that_only_the_context_ends_fits_into_the_pool(builder: RequestBuilder) -> None:
    """Otherwise no chat without a maximum could run where the pool is smaller than the context."""
    builder.pool_tokens = 12
    builder.refusal = lambda request: "is too long" if request.max_slots > 12 else None
    for length, most in ((1, 12), (5, 8), (12, 1)):
        params = SamplingParams(max_new_tokens=None)
        _, listed = request_list(builder, [[1] * length] * FEWEST, params, Call())
        assert isinstance(listed, TokenRequests)
        for request in (builder.build([1] * length, params), listed[0], listed[FEWEST - 1]):
            assert (request.max_new_tokens, request.max_slots) == (most, 12)
    assert builder.build([1], {"max_tokens": 3}).max_new_tokens == 3
    with pytest.raises(PromptError, match=r"^is too long$"):
        builder.build([1], {"max_tokens": 13})
    with pytest.raises(ContextLengthError, match="maximum context length"):
        builder.build([1] * 13, {"max_tokens": None})


def test_prompts_that_are_all_too_long_are_told_as_that(builder: RequestBuilder) -> None:
    for prompts, kind in (([[1] * 20], ContextLengthError), ([[1] * 20, [99]], PromptError)):
        with pytest.raises(PromptError) as error:
            builder.build_all(prompts, None, Call())
        assert type(error.value) is kind
    with pytest.raises(ContextLengthError, match="the prompt has 20 tokens, but this model's max"):
        builder.build_streamed([1] * 20)


def test_a_text_far_too_long_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, encode = [], Tokenizer.encode

    def noted(self: Tokenizer, text: str, **options: bool) -> Any:
        lengths.append(len(text))
        return encode(self, text, **options)

    tokenizer = load_tokenizer(MODEL_PATH)
    builder = RequestBuilder(NoWeights(tokenizer.vocab_size).config, tokenizer, context_length=20)
    monkeypatch.setattr(Tokenizer, "encode", noted)
    with pytest.raises(PromptError, match="has 3,000,000 characters and by far more tokens than fit: this model"):
        builder.build("ab " * 10**6)
    assert max(lengths) < 1000
    cut = builder.build("ab " * 2000, {"truncate_prompt_tokens": 5})
    assert cut.prompt_len == 5


def test_a_chat_far_too_long_is_neither_rendered_nor_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = chat_tokenizer(tmp_path)
    builder = RequestBuilder(NoWeights(tokenizer.vocab_size).config, tokenizer, context_length=20)
    encoded, rendered = [], []
    encode, render = Tokenizer.encode_batch, Tokenizer.chat_texts

    def noted(self: Tokenizer, texts: Sequence[str], **options: bool) -> Any:
        encoded.extend(map(len, texts))
        return encode(self, texts, **options)

    def rendering(self: Tokenizer, chats: Sequence[Chat]) -> Any:
        rendered.extend(chats)
        return render(self, chats)

    monkeypatch.setattr(Tokenizer, "encode_batch", noted)
    monkeypatch.setattr(Tokenizer, "chat_texts", rendering)
    long = "ab " * 10**5
    for messages in (
        [{"role": "user", "content": long}],
        [{"role": "system", "content": long}, {"role": "user", "content": [{"type": "text", "text": "a"}]}],
    ):
        refusal = r"has \d{3},\d{3} characters in its messages .* maximum context length is 20 tokens"
        with pytest.raises(PromptError, match=refusal):
            builder.build(messages)
    with pytest.raises(PromptError, match="in its messages"):
        builder.build_scored([messages], [[3]], None)
    assert not rendered
    # What the assistant has thought may be left out by the template: here it is not.
    said = [{"role": "assistant", "content": f"<think>{long}</think>a"}, {"role": "user", "content": "a"}]
    with pytest.raises(ContextLengthError, match=r"has 300,\d+ characters and by far more tokens"):
        builder.build(said)
    assert len(rendered) == 1
    assert max(encoded) < 1000
    with pytest.raises(ContextLengthError, match="in its messages"):
        builder.build([{"role": "assistant", "content": long}, {"role": "user", "content": "a"}])
    assert len(rendered) == 1
    assert builder.build(said, {"truncate_prompt_tokens": 5}).prompt_len == 5


@pytest.mark.parametrize(
    ("ids", "refusal"),
    [
        ([1, True, 2], "is neither a string"),
        ([True, 1], "is neither a string"),
        ([1, 2.0], "is neither a string"),
        ([1, True, 1.0, 5], "is neither a string"),  # as long as ints, for marshal
        ([1, None], "is neither a string"),
        ([1, 2**31], "holds token id 2147483648"),
        ((1, -1), "holds token id -1"),
        ([1, -(2**40)], "holds token id -1099511627776"),
        ([], "is empty"),
        ([1, np.int64(3)], None),
        ((4, 5, 0), None),
    ],
)
def test_lists_of_ints(ids: Any, refusal: str | None, builder: RequestBuilder) -> None:
    if refusal is None:
        found = builder.token_ids(ids)
        assert found.dtype == np.int32
        assert found.tolist() == list(ids)
    else:
        with pytest.raises(PromptError, match=refusal):
            builder.token_ids(ids)


NEEDS_LLGUIDANCE = pytest.mark.skipif(
    importlib.util.find_spec("llguidance") is None,
    reason="llguidance is not installed: pip install 'radixrt[test]'",
)


def test_a_form_needs_a_tokenizer_and_a_package(builder: RequestBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    for message, own in (
        ("regex needs a tokenizer, and the model's folder has none", builder),
        (
            r"a package that is not installed: pip install 'radixrt\[grammar\]'",
            builder_without_weights(MODEL_PATH),
        ),
    ):
        form_compiler.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr("radixrt.forms.compiler.find_spec", lambda name: None)
            with pytest.raises(ParameterError, match=message):
                own.build([1, 2], {"regex": "a+"})
    assert builder.build([1, 2]).form is None
    assert builder.build([1, 2], {"regex": "a+", "max_tokens": 0}).form is None


@NEEDS_LLGUIDANCE
def test_forms_of_the_built_in_model() -> None:
    own = builder_without_weights(MODEL_PATH)
    form = own.build("x", {"choice": ["yes", "no"], "stop_token_ids": [5]}).form
    assert form is not None
    mask = np.zeros((1, mask_words(own.config.vocab_size)), np.int32)
    form.joined({0: form.matcher()}).fill(mask)
    bits = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    assert {own.tokenizer.piece(i)[0] for i in bits.tolist()} - {"<"} == {"y", "n", "▁"}  # type: ignore[union-attr]
    assert form.vocab_size == own.config.vocab_size
    assert not {2, 5} & set(bits.tolist())
    with pytest.raises(ParameterError, match="Unimplemented keys"):
        own.build("x", {"json_schema": {"not": {}}})
    other = builder_without_weights(MODEL_PATH)
    other.build("x", {"choice": ["yes", "no"]})
    assert other._forms is own._forms  # what one has tried, the other need not


def test_a_stop_string_may_name_special_tokens(tmp_path: Path) -> None:
    """Which the text does not show."""
    byte_level(("<s>", "</s>", "<|turn|>")).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    builder = RequestBuilder(NoWeights(tokenizer.vocab_size).config, tokenizer, context_length=100)
    ids = tokenizer.encode("Mira<|turn|>\nTarek").tolist()

    def text_of(stop: str, **params: Any) -> tuple[str, str | None]:
        request = builder.build([1], {"stop": stop, **params})
        assert request.make_text is not None
        text = request.make_text()
        for token_id in ids:
            if text.push(token_id):
                break
        return text.finish(), text.matched

    assert text_of("<|turn|>") == ("Mira", "<|turn|>")
    assert text_of("<|turn|>\nT") == ("Mira", "<|turn|>\nT")
    assert text_of("ra<|turn|>", include_stop_str=True) == ("Mira<|turn|>", "ra<|turn|>")
    assert text_of("<|turn|>", skip_special_tokens=False) == ("Mira", "<|turn|>")
    assert text_of("</s>") == ("Mira\nTarek", None)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_end_tokens_wait_for_min_new_tokens(ignore_eos: bool) -> None:
    """Also where they end nothing: they are not drawn before."""
    builder = RequestBuilder(NoWeights(50, eos_token_ids=(2, 7)).config, None, context_length=20)
    params = {"ignore_eos": ignore_eos, "min_new_tokens": 3, "stop_token_ids": [7, 9], "max_tokens": 5}
    request = builder.build([1], params)
    assert request.stop_ids | request.late_ids == {2, 7, 9}
    assert request.stop_ids == ({7, 9} if ignore_eos else {2, 7, 9})
    assert builder.alike(request, request.prompt_ids, 1, 0, "a").late_ids == request.late_ids
    processors = LogitsProcessors.of(request)
    assert processors is not None
    assert sorted(processors.stop_bans[:, 0].tolist()) == [2, 7, 9]
    assert not builder.build([1], {"ignore_eos": ignore_eos}).late_ids
    with pytest.raises(ParameterError, match="bad_words and min_new_tokens leave none of allowed_token_ids"):
        builder.build([1], {**params, "allowed_token_ids": [2]})
