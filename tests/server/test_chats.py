"""What chats of agents hold and leave out, asked over HTTP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from radixrt.frontend.openai import CHAT, COMPLETIONS
from radixrt.runtime import Runtime
from radixrt.server.app import Server
from tests.support.serving import QUESTIONS, Serving, client_of

USER = {"role": "user", "content": "Oslo?"}
ASK: dict[str, Any] = {"messages": [USER], "temperature": 0, "max_tokens": 4}
FUNCTION = {"name": "weather", "parameters": {"type": "object", "properties": {}}, "strict": None}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Os'}}
SAID: Any = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "dry"}


def ask(url: str, **more: Any) -> httpx.Response:
    return httpx.post(f"{url}{CHAT}", json={**ASK, **more}, timeout=60)


TAKEN: list[dict[str, Any]] = [
    {"messages": [{**USER, "name": "Mira", "cache_control": {"type": "ephemeral"}}]},
    {
        "messages": [
            {**USER, "content": [{"type": "text", "text": "Oslo?", "cache_control": {"type": "ephemeral"}}]}
        ]
    },
    {"messages": [USER, {"role": "assistant", "content": "a", "refusal": None, "audio": None, "annotations": []}]},
    {"messages": [USER, {"role": "assistant", "content": "a", "thinking_blocks": [{"type": "thinking"}]}]},
    {"messages": [USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "I do not."}]}]},
    {"messages": [USER, SAID, RESULT]},
    {"messages": [USER, SAID, {**RESULT, "name": "weather"}], "tools": [TOOL]},
    {"tools": [{**TOOL, "cache_control": {"type": "ephemeral"}, "strict": True}]},
    {"tools": [{**TOOL, "function": {**FUNCTION, "cache_control": {}, "returns": {}}}]},
    {"reasoning_effort": "low"},
    {"verbosity": "medium"},
]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_what_changes_nothing_is_taken(is_streamed: bool, serving: Serving) -> None:
    url = serving()
    for more in TAKEN:
        response = ask(url, **more, stream=is_streamed)
        assert response.status_code == 200, (more, response.text)
    plain = httpx.post(f"{url}/tokenize", json={"messages": [USER]}).json()
    assert httpx.post(f"{url}/tokenize", json=TAKEN[0]).json() == plain
    assert httpx.post(f"{url}/tokenize", json=TAKEN[1]).json() == plain


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": [USER, {**USER, "audio": {"id": "a"}}]}, "chat message 1 has 'audio', which cannot be honoured"),
    (
        {"messages": [USER, {"role": "assistant", "content": "", "function_call": {}, "x": 1, "images": [1]}]},
        "images",
    ),
    ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "other tools are not taken"),
    ({"reasoning_effort": 3}, "reasoning_effort is 3; it must be a string"),
    ({"verbosity": "low"}, "verbosity"),
]


def test_what_would_change_an_answer_is_refused_by_name(
    tmp_path: Path, serving: Serving, runtime: Runtime
) -> None:
    url = serving()
    tokenizer = runtime.tokenizer
    assert tokenizer is not None
    for more, told in REFUSED:
        response = ask(url, **more)
        assert response.status_code == 400, (more, response.text)
        assert told in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("url", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": QUESTIONS[0] * 60}]}),
        (CHAT, {"messages": [{"role": "user", "content": QUESTIONS[0] * 1000}]}),  # not even rendered
        (CHAT, {"messages": [USER, {"role": "assistant", "content": QUESTIONS[0] * 60}, USER]}),
        (COMPLETIONS, {"prompt": QUESTIONS[0] * 60}),
        (COMPLETIONS, {"prompt": QUESTIONS[0] * 1000}),
        (COMPLETIONS, {"prompt": [5] * 2000}),
        (COMPLETIONS, {"prompt": [[5] * 2000, [5] * 3000]}),
    ],
)
def test_too_long_a_context_is_told_by_openais_code(url: str, body: dict[str, Any], serving: Serving) -> None:
    """Agents look for it, and shorten what they send."""
    at = serving()
    for is_streamed in (False, True):
        response = httpx.post(f"{at}{url}", json={**body, "stream": is_streamed, "max_tokens": 4}, timeout=60)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        assert "maximum context length is 1024 tokens" in error["message"]
    with pytest.raises(openai.BadRequestError) as caught:
        client_of(at).post(url.removeprefix("/v1"), body=body, cast_to=object)
    assert caught.value.code == "context_length_exceeded"


def long_chat(runtime: Runtime) -> list[dict[str, str]]:
    """Which leaves an answer little of the context."""
    assert runtime.tokenizer is not None
    each = len(runtime.tokenizer.encode(QUESTIONS[0], add_special_tokens=False))
    return [{"role": "user", "content": QUESTIONS[0] * ((runtime.context_length - 180) // each)}]


def test_chats_without_a_maximum_have_the_rest_of_the_context(serving: Serving, runtime: Runtime) -> None:
    def tokens(at: str, url: str, **body: Any) -> tuple[int, int]:
        usage = httpx.post(f"{at}{url}", json={"ignore_eos": True, "temperature": 0, **body}, timeout=120).json()[
            "usage"
        ]
        return usage["completion_tokens"], usage["total_tokens"]

    plain, limited = serving(), serving(Server(runtime, "built-in", chat_max_tokens=5))
    rest, total = tokens(plain, CHAT, messages=long_chat(runtime))
    assert total == runtime.context_length
    assert rest > 128
    assert tokens(plain, COMPLETIONS, prompt="Oslo?")[0] == 128
    assert tokens(limited, CHAT, messages=[USER])[0] == 5
    assert tokens(limited, COMPLETIONS, prompt="Oslo?")[0] == 128
    for name in ("max_tokens", "max_completion_tokens", "max_new_tokens"):
        assert tokens(limited, CHAT, messages=[USER], **{name: 7})[0] == 7


def test_chats_of_a_batch_have_the_rest_of_the_context(tmp_path: Path, runtime: Runtime) -> None:
    body = {"messages": long_chat(runtime), "ignore_eos": True, "temperature": 0}
    lines = [{"custom_id": "a", "method": "POST", "url": CHAT, "body": body}]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for number, (options, most) in enumerate(
        [
            ({}, None),
            ({"chat_max_tokens": 3}, 3),
            ({"default_params": {"max_tokens": 4}}, 4),
            ({"default_params": {"temperature": 0}}, None),
        ]
    ):
        out = tmp_path / f"{number}.jsonl"
        runtime.run_batch(tmp_path / "in.jsonl", out, progress=False, **options)  # type: ignore[arg-type]
        usage = json.loads(out.read_text())["response"]["body"]["usage"]
        if most is None:
            assert usage["total_tokens"] == runtime.context_length
        else:
            assert usage["completion_tokens"] == most


def test_too_long_a_context_of_a_batch_has_the_same_code(tmp_path: Path, runtime: Runtime) -> None:
    body = {"messages": [{"role": "user", "content": QUESTIONS[0] * 60}]}
    line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(line))
    runtime.run_batch(tmp_path / "in.jsonl", tmp_path / "out.jsonl", progress=False)
    record = json.loads((tmp_path / "out.jsonl").read_text())
    assert record["error"]["code"] == record["response"]["body"]["error"]["code"] == "context_length_exceeded"
