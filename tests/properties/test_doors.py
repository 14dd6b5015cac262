"""One request has one answer, by whatever door it comes and whatever runs beside it: compared bit by bit."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from hypothesis import HealthCheck, assume, given, reject, settings
from hypothesis import strategies as st

pytest.importorskip("starlette", reason="starlette is not installed: pip install 'radixrt[server]'")

from radixrt import RadixrtError, RequestOutput, Runtime, StreamChunk
from radixrt.frontend.openai import CHAT, COMPLETIONS
from radixrt.server.app import Server
from tests.support.checkpoints import llama, write
from tests.support.small_tokenizers import chat_tokenizer

VOCAB_SIZE = 325  # three more than the tokenizer has
CONTEXT = 96
HAS_FORMS = importlib.util.find_spec("llguidance") is not None

Case = tuple[Any, dict[str, Any]]  # a prompt and its parameters

TEXTS = st.lists(
    st.sampled_from(["hello again", "日本 é 😀", " ", "\n", "x", "<s>", "<tool>", "\u0301"]),
    min_size=1,
    max_size=3,
).map("".join)
TOKENS = st.integers(0, VOCAB_SIZE - 1)
CHATS = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user"]), "content": TEXTS}), min_size=1
)
PROMPTS = TEXTS | st.lists(TOKENS, min_size=1, max_size=12) | CHATS.filter(lambda chat: len(chat) < 3)
FORMS = [{}, {}, {}, {"choice": ["fox", "foxes", "日本"]}, {"regex": "[ab]{1,5}|é+😀"}] if HAS_FORMS else [{}]
DRAWS: dict[str, st.SearchStrategy[Any]] = {
    "top_k": st.sampled_from([-1, 1, 5]),
    "top_p": st.sampled_from([0.1, 0.9]),
    "min_p": st.sampled_from([0.1, 1]),
    "repetition_penalty": st.sampled_from([0.8, 1.3]),
    "presence_penalty": st.sampled_from([-1, 2]),
    "frequency_penalty": st.sampled_from([-1, 0.5]),
    "logit_bias": st.dictionaries(TOKENS.map(str), st.sampled_from([-100, 5, 20]), max_size=3),
    "allowed_token_ids": st.lists(TOKENS, min_size=10, max_size=60),
    "bad_words": st.lists(st.sampled_from(["fox", "é", [70], [68, 71]]), max_size=2),
}
TOLD: dict[str, st.SearchStrategy[Any]] = {
    "include_stop_str": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "logprobs": st.sampled_from([0, 3]),
    "logprobs_mode": st.sampled_from(["raw_logprobs", "processed_logprobs"]),
    "prompt_logprobs": st.sampled_from([0, 2]),
}
RARE: dict[str, st.SearchStrategy[Any]] = {
    "stop_regex": st.sampled_from([r"\d", "[a-z]{2}", r"\bx"]),
    "ignore_eos": st.booleans(),
    "min_new_tokens": st.integers(0, 3),
    "truncate_prompt_tokens": st.sampled_from([1, 5]),
}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    most = draw(st.sampled_from([14, 14, 14, 6, 1, 0]))
    params = {"seed": draw(st.integers(0, 2**63 - 1)), "max_new_tokens": most}
    params |= {"temperature": draw(st.sampled_from([0, 0.7, 1.5])), "n": draw(st.integers(1, 3 if most else 1))}
    params |= draw(st.fixed_dictionaries({}, optional=TOLD))
    for names in (DRAWS, RARE):
        given = draw(st.lists(st.sampled_from(sorted(names)), max_size=2, unique=True))
        params |= {name: draw(names[name]) for name in given}
    params["min_new_tokens"] = min(params.get("min_new_tokens", 0), most)
    return draw(PROMPTS), {**params, **draw(st.sampled_from(FORMS))}


class Doors(NamedTuple):
    """Two Runtimes: one computes all of each prompt; in the other one requests share, are cut and yield."""

    lone: Runtime
    narrow: Runtime
    folder: Path  # for files


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    folder = tmp_path_factory.mktemp("model")
    ends = {"bos_token_id": 0, "eos_token_id": 1}
    model = llama(3, vocab_size=VOCAB_SIZE, max_position_embeddings=CONTEXT, num_hidden_layers=1, **ends)
    assert chat_tokenizer(folder).vocab_size < VOCAB_SIZE
    make = partial(Runtime, write(model, folder), device="cpu", deterministic=True)
    narrow = {"max_total_tokens": 110, "chunked_prefill_size": 7, "max_running_requests": 4}
    with make(max_total_tokens=1000, enable_prefix_cache=False) as lone, make(**narrow) as other:
        yield Doors(lone, other, tmp_path_factory.mktemp("files"))


def told(output: RequestOutput) -> Any:
    """All that does not depend on when and beside what it ran."""
    usage = output.usage
    assert usage.cached_tokens + usage.computed_tokens == usage.prompt_tokens
    counts = usage.prompt_tokens, usage.completion_tokens
    return output.outputs, output.prompt_token_ids, output.prompt_logprobs, counts


def asked_alone(runtime: Runtime, asked: Sequence[Case]) -> list[RequestOutput]:
    """Outputs of each by itself. What is refused or runs into a dead end, as forms with bans do, is no example."""
    try:
        outputs = [runtime.generate(prompt, params) for prompt, params in asked]
    except RadixrtError:
        reject()
    assume(all(output.failure is None for output in outputs))
    return outputs


def with_ends(runtime: Runtime, data: st.DataObject, case: Case) -> Case:
    """The case with a stop string or a token that ends one of its answers, or both."""
    prompt, params = case
    (free,) = asked_alone(runtime, [case])
    answer = data.draw(st.sampled_from(free.outputs))
    if answer.text and data.draw(st.booleans()):
        start = data.draw(st.integers(0, len(answer.text) - 1))
        params = {**params, "stop": [answer.text[start : start + data.draw(st.integers(1, 4))], "a"]}
    if answer.token_ids and data.draw(st.booleans()):
        params = {**params, "stop_token_ids": [data.draw(st.sampled_from(answer.token_ids)), 9]}
    return prompt, params


def check_pieces(chunks: Sequence[StreamChunk], outputs: Sequence[RequestOutput]) -> None:
    """They join to the answers, and the last of each prompt has its output."""
    for place, output in enumerate(outputs):
        own = [chunk for chunk in chunks if chunk.prompt_index == place]
        assert [told(chunk.output) for chunk in own if chunk.output is not None] == [told(output)]
        for answer in output.outputs:
            pieces = [chunk for chunk in own if chunk.index == answer.index]
            assert "".join(piece.text for piece in pieces) == answer.text
            assert sum((piece.token_ids for piece in pieces), ()) == answer.token_ids
            if answer.logprobs is not None:
                assert sum((piece.logprobs or () for piece in pieces), ()) == answer.logprobs
            ends = [piece.finish_reason for piece in pieces if piece.finish_reason is not None]
            assert (ends, pieces[-1].matched) == ([answer.finish_reason], answer.matched)


async def gathered(runtime: Runtime, asked: Sequence[Case]) -> tuple[list[RequestOutput], list[StreamChunk]]:
    """A list and a stream of it side by side."""
    prompts, params = [prompt for prompt, _ in asked], [own for _, own in asked]

    async def streamed() -> list[StreamChunk]:
        return [chunk async for chunk in runtime.async_stream_all(prompts, params)]

    return await asyncio.gather(runtime.async_generate(prompts, params), streamed())


def body_of(case: Case) -> tuple[str, dict[str, Any]]:
    """A case as OpenAI's endpoints take it, which score no prompts, and the endpoint."""
    prompt, params = case
    body = {name: value for name, value in params.items() if name not in ("max_new_tokens", "prompt_logprobs")}
    body["max_tokens"] = params["max_new_tokens"]
    if not (isinstance(prompt, list) and isinstance(prompt[0], dict)):
        return COMPLETIONS, {"prompt": prompt, **body}
    if "logprobs" in body:
        body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
    return CHAT, {"messages": prompt, **body}


def line_of(case: Case) -> dict[str, Any]:
    """A case as a line of radixrt's own."""
    prompt, params = case
    return {("messages" if body_of(case)[0] == CHAT else "prompt"): prompt, **params}


def logprobs_of(told: dict[str, Any] | None) -> list[float] | None:
    """Those of the tokens of a choice; None where it tells none."""
    if told is None:
        return None
    return [each["logprob"] for each in told["content"]] if "content" in told else told["token_logprobs"]


def choices_of(case: Case, output: RequestOutput) -> list[Any]:
    """What OpenAI's endpoints are to answer."""
    keeps_stop, choices = case[1].get("include_stop_str", False), []
    for answer in output.outputs:
        logprobs = None if answer.logprobs is None else [max(-9999.0, token.logprob) for token in answer.logprobs]
        if logprobs and isinstance(answer.matched, int) and not keeps_stop:
            logprobs.pop()
        choices.append((answer.index, answer.text, str(answer.finish_reason), logprobs))
    return choices


def told_choices(body: dict[str, Any]) -> list[Any]:
    return [
        (
            choice["index"],
            choice["message"]["content"] if "message" in choice else choice["text"],
            choice["finish_reason"],
            logprobs_of(choice["logprobs"]),
        )
        for choice in body["choices"]
    ]


def joined(events: str, num_answers: int) -> list[Any]:
    """The choices that a stream tells."""
    *told, end = events.removesuffix("\n\n").split("\n\n")
    assert end == "data: [DONE]"
    pieces = [json.loads(event.removeprefix("data: "))["choices"][0] for event in told]
    found = []
    for index in range(num_answers):
        own = [piece for piece in pieces if piece["index"] == index]
        text = "".join(piece["delta"].get("content") or "" if "delta" in piece else piece["text"] for piece in own)
        *others, last = [piece["finish_reason"] for piece in own]
        assert set(others) <= {None}
        logprobs = [each for piece in own for each in logprobs_of(piece["logprobs"]) or ()]
        found.append((index, text, last, logprobs))
    return found


EXAMPLES = partial(settings, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])


@EXAMPLES(max_examples=14)
@given(data=st.data(), asked=st.lists(cases(), min_size=1, max_size=4))
def test_answers_do_not_depend_on_company(doors: Doors, data: st.DataObject, asked: list[Case]) -> None:
    """In lists of any order and priority, and in streams, with little memory and with cuts."""
    asked = [with_ends(doors.lone, data, case) for case in asked]
    asked = data.draw(st.permutations([*asked, asked[0]]))
    outputs, prompts, params = (
        asked_alone(doors.lone, asked),
        [case[0] for case in asked],
        [case[1] for case in asked],
    )
    urgencies = data.draw(st.lists(st.integers(-1, 1), min_size=len(asked), max_size=len(asked)))
    assert list(map(told, doors.narrow.generate(prompts, params, priority=urgencies))) == list(map(told, outputs))
    listed, chunks = asyncio.run(gathered(doors.narrow, asked))
    assert list(map(told, listed)) == list(map(told, outputs))
    check_pieces(chunks, outputs)
    interval, left_after = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    for chunk in itertools.islice(stream := doors.narrow.stream(*asked[-1]), left_after):
        assert chunk.request_id != -1
    stream.close()
    check_pieces([*doors.narrow.stream(*asked[0], stream_interval=interval)], outputs[:1])


@EXAMPLES(max_examples=12)
@given(data=st.data(), asked=st.lists(cases(), min_size=1, max_size=3))
def test_protocols_tell_the_same_answers(doors: Doors, data: st.DataObject, asked: list[Case]) -> None:
    """Both formats of a batch's lines, and OpenAI's endpoints with and without a stream."""
    asked = [with_ends(doors.lone, data, case) for case in asked]
    outputs, bodies = asked_alone(doors.lone, asked), list(map(body_of, asked))
    lines = list(map(line_of, asked))
    for number, (url, body) in enumerate(bodies):
        lines.append({"custom_id": str(number), "method": "POST", "url": url, "body": body})
    source, out = doors.folder / "in.jsonl", doors.folder / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert doors.narrow.run_batch(source, out, overwrite=True).errors == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    for record, output in zip(records, outputs, strict=False):
        answers = record.get("outputs", [record])
        assert [answer["text"] for answer in answers] == [answer.text for answer in output.outputs]
        assert [tuple(answer["token_ids"]) for answer in answers] == [
            answer.token_ids for answer in output.outputs
        ]
        for name, own in (("logprobs", output.logprobs), ("prompt_logprobs", output.prompt_logprobs)):
            assert record.get(name) == (None if own is None else json.loads(json.dumps(list(map(vars, own)))))
    bodies_told = [record["response"]["body"] for record in records[len(asked) :]]

    async def ask() -> list[tuple[dict[str, Any], str]]:
        transport = httpx.ASGITransport(Server(doors.narrow, "small").app())
        async with httpx.AsyncClient(transport=transport, base_url="http://small") as client:
            posts = [
                client.post(url, json={**body, **more}) for url, body in bodies for more in ({}, {"stream": True})
            ]
            whole = await asyncio.gather(*posts)
            return [(one.json(), stream.text) for one, stream in zip(whole[::2], whole[1::2], strict=True)]

    for case, output, record, (body, events) in zip(asked, outputs, bodies_told, asyncio.run(ask()), strict=True):
        expected = choices_of(case, output)
        counts = output.usage.prompt_tokens, output.usage.completion_tokens
        for whole in (record, body):
            assert told_choices(whole) == expected
            assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == counts
        assert joined(events, len(expected)) == [(*choice[:-1], choice[-1] or []) for choice in expected]


@EXAMPLES(max_examples=18)
@given(data=st.data(), case=cases())
def test_answers_to_nearly_the_same(doors: Doors, data: st.DataObject, case: Case) -> None:
    """A longer limit goes on, the first of n answers is the one alone, and a stop cuts what comes without it."""
    prompt, params = with_ends(doors.lone, data, case)
    params |= {"min_new_tokens": 0, "stop_regex": []}
    others = {"max_new_tokens": params["max_new_tokens"] + 3}, {"n": 1}, {"stop": []}
    asked = [(prompt, params), *((prompt, {**params, **other}) for other in others)]
    output, longer, single, free = asked_alone(doors.lone, asked)
    assert output.outputs[0] == single.outputs[0]
    stops = [stop for stop in params.get("stop", ()) if "\ufffd" not in stop]  # which may yet become a character
    assume(stops == params.get("stop", []))
    for answer, more, whole in zip(output.outputs, longer.outputs, free.outputs, strict=True):
        count = len(answer.token_ids)
        assert more.token_ids[:count] == answer.token_ids == whole.token_ids[:count]
        found = [(start + len(stop), start, stop) for stop in stops if (start := whole.text.find(stop)) >= 0]
        is_kept = params.get("include_stop_str", False)
        if is_kept and isinstance(answer.matched, int):
            assert answer == whole
        elif found:
            end, start, stop = min(found)
            assert (answer.text, answer.matched) == (whole.text[: end if is_kept else start], stop)
        else:
            assert answer == whole
