"""Scanning the lines of a batch: what is found in them, and what is kept."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixrt.batch import known_lines
from radixrt.batch import scan as scan_module
from radixrt.batch.formats.line_format import LineParser
from radixrt.batch.formats.record import InputRecord, LineError, LineErrorType
from radixrt.batch.formats.source import BadLine
from radixrt.batch.known_lines import SoundLine, line_of_entry
from radixrt.batch.scan import MAX_NAMED, Scan, _Checks, scan_lines
from radixrt.builtin import MODEL_PATH
from radixrt.errors import BatchFileError, JournalError, ParameterError, PromptError
from radixrt.form_spec import FORM_ENGINES
from radixrt.frontend.request_builder import RequestBuilder
from radixrt.models.config import read_architecture
from radixrt.models.registry import find_architecture
from radixrt.planning.simulated import NoWeights
from radixrt.sampling_params import LOGPROBS_MODES, SamplingParams
from radixrt.text.chat import Chat
from radixrt.text.tokenizer import Tokenizer, load_tokenizer
from tests.support.file_limit import file_limit
from tests.support.small_tokenizers import chat_tokenizer

DEFAULTS = SamplingParams(max_new_tokens=7)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(MODEL_PATH)


@pytest.fixture(scope="module")
def builder(tokenizer: Tokenizer) -> RequestBuilder:
    config = find_architecture(read_architecture(MODEL_PATH)).config_class.from_folder(MODEL_PATH)
    return RequestBuilder(
        config, tokenizer, context_length=config.context_length, seed=0, refusal=lambda request: None
    )


def scan(lines: list[Any], folder: Path, builder: RequestBuilder, tokenizer: Tokenizer | None) -> Scan:
    def check(prompt: Any, params: SamplingParams, line: int) -> Any:
        return builder.build(prompt, params, index=line)

    numbered = enumerate(
        line if isinstance(line, (bytes, BadLine)) else json.dumps(line).encode() for line in lines
    )
    return scan_lines(numbered, folder, parser=LineParser(DEFAULTS), tokenizer=tokenizer, check=check)


LINES: list[Any] = [
    {"prompt": "Mira likes Oslo.", "custom_id": "a", "metadata": [1, None]},
    {"prompt": "half \ud800"},
    {"token_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 3, "n": 4, "temperature": 0.5}},
    b"{",
    {"token_ids": [10**6], "custom_id": "b"},  # takes no custom_id
    {"prompt": "Q:", "custom_id": "b"},
    {"prompt": "again", "custom_id": "a"},
    BadLine("the line is too long"),
    {"prompt": "x", "sampling_params": {"stop_token_ids": [10**6]}},
    {"prompt": "x " * 5000},
    {"custom_id": "o", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "Q:"}},
]
WRONG = {
    1: LineErrorType.INVALID_PROMPT,
    3: LineErrorType.INVALID_LINE,
    4: LineErrorType.INVALID_PROMPT,
    6: LineErrorType.DUPLICATE_CUSTOM_ID,
    7: LineErrorType.INVALID_LINE,
    8: LineErrorType.INVALID_PARAMETERS,
    9: LineErrorType.CONTEXT_LENGTH,
}


@pytest.mark.parametrize("at_once", [1, 3, 512])
def test_what_lines_ask_for(
    tmp_path: Path, builder: RequestBuilder, tokenizer: Tokenizer, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many are tokenised together."""
    monkeypatch.setattr(scan_module, "BLOCK_LINES", at_once)
    found = scan(LINES, tmp_path, builder, tokenizer)
    assert len(found) == len(LINES)
    assert found.lines.tolist() == list(range(len(LINES)))
    assert np.flatnonzero(found.is_bad).tolist() == sorted(WRONG)
    assert {p.line - 1: p.type for p in found.problems} == WRONG
    assert sum(found.num_problems.values()) == len(WRONG)
    parser = LineParser(DEFAULTS)
    for position, entry in enumerate(found.read(range(len(LINES)))):
        line = LINES[position]
        if position in WRONG:
            assert isinstance(entry, LineError)
            assert entry.type == WRONG[position]
            assert entry.message == next(p.message for p in found.problems if p.line == position + 1)
            assert not len(found.tokens[position])
            assert found.new_tokens[position] == 0
            continue
        record = parser.parse(json.dumps(line).encode())
        assert isinstance(entry, SoundLine)
        assert entry.sampling_params == record.sampling_params
        assert entry.reply == record.reply
        request = builder.build(record.prompt, record.sampling_params)
        np.testing.assert_array_equal(found.tokens[position], request.prompt_ids)
        assert found.new_tokens[position] == request.max_new_tokens
        assert found.num_answers[position] == record.sampling_params.n
    assert [type(entry) for entry in found.read([2, 0, 3])] == [SoundLine, SoundLine, LineError]


def test_lines_that_are_no_json_at_all_are_told_what_a_line_is(
    tmp_path: Path, builder: RequestBuilder, tokenizer: Tokenizer
) -> None:
    hint = '  a line is a JSON object, such as {"prompt": "..."}'
    assert scan([b"Who?", b"What?"], tmp_path, builder, tokenizer).summary().endswith(hint)
    assert hint not in scan([b"Who?", {"token_ids": [3]}], tmp_path, builder, tokenizer).summary()
    assert hint not in scan([{"prompt": 3}], tmp_path, builder, tokenizer).summary()


def test_hashes_tell_inputs_apart(tmp_path: Path, builder: RequestBuilder, tokenizer: Tokenizer) -> None:
    def hashes(lines: list[Any]) -> tuple[str, str]:
        found = scan(lines, tmp_path, builder, tokenizer)
        return found.input_hash, found.tokens_hash

    first = hashes([{"token_ids": [5, 6]}, {"token_ids": [7]}])
    assert hashes([{"token_ids": [5, 6]}, {"token_ids": [7]}]) == first
    others = [
        hashes([{"token_ids": [5]}, {"token_ids": [6, 7]}]),
        hashes([{"token_ids": [5, 6]}]),
        hashes([{"token_ids": [7]}, {"token_ids": [5, 6]}]),
    ]
    assert all(a != b for other in others for a, b in zip(other, first, strict=True))
    same_tokens = hashes([{"token_ids": [5, 6], "metadata": 1}, {"token_ids": [7]}])
    assert same_tokens[0] != first[0]
    assert same_tokens[1] == first[1]
    # Runs that were begun when an empty text was a bad line, in which no line has tokens, go on.
    as_text = scan([{"prompt": ""}, {"token_ids": [7]}], tmp_path, builder, tokenizer)
    assert [len(as_text.tokens[place]) for place in range(2)] == [1, 1]
    assert as_text.tokens_hash == hashes([{"token_ids": []}, {"token_ids": [7]}])[1]


def test_a_model_without_a_tokenizer(tmp_path: Path, builder: RequestBuilder) -> None:
    bare = RequestBuilder(builder.config, None, context_length=64, seed=0, refusal=lambda request: None)
    found = scan(
        [{"prompt": "a"}, {"token_ids": [3]}, {"messages": [{"role": "user", "content": "a"}]}],
        tmp_path,
        bare,
        None,
    )
    assert found.is_bad.tolist() == [True, False, True]
    assert all("no tokenizer" in problem.message for problem in found.problems)


def test_messages_without_a_template(tmp_path: Path, builder: RequestBuilder, tokenizer: Tokenizer) -> None:
    found = scan([{"messages": [{"role": "user", "content": "a"}]}, {"prompt": "a"}], tmp_path, builder, tokenizer)
    assert found.is_bad.tolist() == [not tokenizer.has_chat_template, False]


def test_nothing_at_all(tmp_path: Path, builder: RequestBuilder, tokenizer: Tokenizer) -> None:
    found = scan([], tmp_path, builder, tokenizer)
    assert len(found) == len(found.tokens) == 0
    assert list(found.read([])) == []


def test_problems_are_counted_and_the_first_kept(
    tmp_path: Path, builder: RequestBuilder, tokenizer: Tokenizer
) -> None:
    found = scan([{"token_ids": [3], "custom_id": "same"}] * 5000, tmp_path, builder, tokenizer)
    assert found.num_problems == {LineErrorType.DUPLICATE_CUSTOM_ID: 4999}
    assert [p.line for p in found.problems] == list(range(2, 2 + MAX_NAMED))


PARAMS = st.builds(
    SamplingParams,
    max_new_tokens=st.integers(1, 2**31 - 1),
    temperature=st.floats(0, 100),
    top_k=st.integers(-1, 1000),
    seed=st.none() | st.integers(0, 2**63 - 1),
    stop=st.lists(st.text(min_size=1, max_size=5), max_size=3),
    stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=3),
    allowed_token_ids=st.none() | st.lists(st.integers(0, 99), min_size=1, max_size=3),
    logit_bias=st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 100), max_size=3),
    bad_words=st.lists(st.text(min_size=1, max_size=5) | st.lists(st.integers(0, 99), min_size=1), max_size=3),
    logprobs=st.none() | st.integers(0, 128),
    logprobs_mode=st.sampled_from(LOGPROBS_MODES),
    ignore_eos=st.booleans(),
    form_engine=st.sampled_from(FORM_ENGINES),
)
FORMS = st.one_of(
    st.fixed_dictionaries({"json_schema": st.dictionaries(st.text(max_size=5), st.floats(-1, 1), max_size=3)}),
    st.fixed_dictionaries({"regex": st.text(min_size=1, max_size=5)}),
    st.fixed_dictionaries({"grammar": st.text(min_size=1, max_size=5)}),
    st.fixed_dictionaries({"choice": st.lists(st.text(min_size=1), min_size=1, max_size=3, unique=True)}),
    st.fixed_dictionaries({"json_object": st.booleans()}),
)


@given(PARAMS, FORMS)
def test_parameters_come_back_from_the_disk(params: SamplingParams, form: dict[str, Any]) -> None:
    params = replace(params, **form)
    text = json.dumps({"params": scan_module.parameters_as_json(params), "reply": {}})
    entry = line_of_entry(json.loads(text), {})
    assert isinstance(entry, SoundLine)
    assert entry.sampling_params == params


def test_files_that_cannot_be(tmp_path: Path, builder: RequestBuilder, tokenizer: Tokenizer) -> None:
    entries = tmp_path / "entries.jsonl"
    entries.mkdir()
    with pytest.raises(BatchFileError, match=r"entries\.jsonl is in the way of radixrt's own file") as caught:
        scan(LINES, tmp_path, builder, tokenizer)
    assert caught.type is BatchFileError
    entries.rmdir()
    found = scan(LINES, tmp_path, builder, tokenizer)
    entries.unlink()
    with pytest.raises(BatchFileError, match="cannot read"):
        list(found.read([0]))


@pytest.mark.parametrize("count", [1, 600])
def test_a_full_disk(tmp_path: Path, builder: RequestBuilder, tokenizer: Tokenizer, count: int) -> None:
    """Found when the entries are written, or when their file is closed."""
    lines = [{"token_ids": [3], "metadata": "x" * 5000}] * count
    refused = pytest.raises(JournalError, match=r"cannot write .*/entries\.jsonl: File too large; raise the limit")
    with file_limit(5000), refused:
        scan(lines, tmp_path, builder, tokenizer)


def test_a_full_disk_hides_no_other_error(
    tmp_path: Path, builder: RequestBuilder, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was to be written then is not wanted any more."""
    monkeypatch.setattr(scan_module, "BLOCK_LINES", 1)

    def damaged() -> Iterator[tuple[int, bytes]]:
        yield 0, json.dumps({"token_ids": [3]}).encode()
        raise BatchFileError("the input is damaged")

    parser = LineParser(DEFAULTS)
    with file_limit(1), pytest.raises(BatchFileError, match="the input is damaged"):
        scan_lines(
            damaged(),
            tmp_path,
            parser=parser,
            tokenizer=tokenizer,
            check=lambda prompt, params, line: builder.build(prompt, params, index=line),
        )


def test_a_disk_that_cannot_be_read(
    tmp_path: Path, builder: RequestBuilder, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = scan(LINES, tmp_path, builder, tokenizer)

    def fail(*args: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(known_lines, "open", fail, raising=False)
    with pytest.raises(JournalError, match=r"cannot read .*/entries\.jsonl: Input/output error; see to the disk"):
        list(found.read([0]))


_MEMORY = """
import resource, sys
from pathlib import Path
from radixrt.batch.formats.line_format import LineParser
from radixrt.batch.scan import scan_lines
from radixrt.batch.formats.source import read_lines
from radixrt.frontend.request_builder import RequestBuilder
from radixrt.sampling_params import SamplingParams

class Config:
    vocab_size, eos_token_ids = 100, (2,)

folder = Path(sys.argv[1])
builder = RequestBuilder(Config, None, context_length=2048, seed=0, refusal=lambda request: None)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = scan_lines(
    read_lines(folder / "in.jsonl"), folder, parser=LineParser(SamplingParams()), tokenizer=None,
    check=lambda prompt, params, line: builder.build(prompt, params, index=line),
)
assert len(found) == 100_000 and not found.is_bad.any() and found.tokens.offsets[-1] == 100_000_000
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.long
def test_a_hundred_thousand_lines_take_little_memory(tmp_path: Path) -> None:
    """Of 1,000 tokens each: 400 MB of tokens, of which the process holds next to nothing."""
    line = json.dumps({"token_ids": [3 + i % 90 for i in range(1000)]})
    with open(tmp_path / "in.jsonl", "w", encoding="utf-8") as file:
        file.writelines(line + "\n" for _ in range(100_000))
    done = subprocess.run(
        [sys.executable, "-c", _MEMORY, str(tmp_path), str(Path(__file__).parent)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < 200_000  # KiB


def test_a_text_far_too_long_is_not_encoded(
    tmp_path: Path, builder: RequestBuilder, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest: list[int] = []
    own = Tokenizer.encode_batch

    def encode_batch(self: Tokenizer, texts: list[str], **options: bool) -> Any:
        longest.append(max(map(len, texts), default=0))
        return own(self, texts, **options)

    monkeypatch.setattr(Tokenizer, "encode_batch", encode_batch)
    lines = [{"prompt": "ab " * 10**6, "custom_id": "long"}, {"prompt": "ab"}]
    found = scan_lines(
        enumerate(json.dumps(line).encode() for line in lines),
        tmp_path,
        parser=LineParser(DEFAULTS),
        tokenizer=tokenizer,
        check=lambda prompt, params, line: builder.build(prompt, params, index=line),
        context_length=20,
    )
    assert found.is_bad.tolist() == [True, False]
    assert found.problems[0].message == (
        "the prompt has 3,000,000 characters and by far more tokens than fit: this model's maximum context "
        "length is 20 tokens, and a prompt may have at most 19"
    )
    assert max(longest) < 1000


def test_a_chat_far_too_long_is_not_rendered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = chat_tokenizer(tmp_path)
    builder = RequestBuilder(NoWeights(tokenizer.vocab_size).config, tokenizer, context_length=80)
    rendered: list[Chat] = []
    own = Tokenizer.chat_texts

    def chat_texts(self: Tokenizer, chats: list[Chat]) -> Any:
        rendered.extend(chats)
        return own(self, chats)

    monkeypatch.setattr(Tokenizer, "chat_texts", chat_texts)
    chats = ["ab " * 10**5, "a", "ab " * 10**4]
    lines: list[dict[str, Any]] = [{"messages": [{"role": "user", "content": content}]} for content in chats]
    lines[2]["truncate_prompt_tokens"] = 5
    found = scan_lines(
        enumerate(json.dumps(line).encode() for line in lines),
        tmp_path,
        parser=LineParser(DEFAULTS),
        tokenizer=tokenizer,
        check=lambda prompt, params, line: builder.build(prompt, params, index=line),
        context_length=80,
    )
    assert found.is_bad.tolist() == [True, False, False]
    assert found.problems[0].message == (
        "the prompt has 299,999 characters in its messages and by far more tokens than fit: this model's maximum "
        "context length is 80 tokens, and a prompt may have at most 79"
    )
    assert [len(chat.messages[0]["content"]) for chat in rendered] == [1, 30_000]
    assert len(found.tokens[2]) == 5


def test_a_text_that_is_cut_may_be_long(tmp_path: Path, builder: RequestBuilder, tokenizer: Tokenizer) -> None:
    line = {"prompt": "ab " * 2000, "truncate_prompt_tokens": 5}
    found = scan_lines(
        enumerate([json.dumps(line).encode()]),
        tmp_path,
        parser=LineParser(DEFAULTS),
        tokenizer=tokenizer,
        check=lambda prompt, params, line: builder.build(prompt, params, index=line),
        context_length=20,
    )
    assert found.is_bad.tolist() == [False]
    assert len(found.tokens[0]) == 5


def test_what_is_checked_once_holds_for_shorter_prompts_alone() -> None:
    """Of equal parameters; not for other tokens, nor where it depends on the prompt's length what is allowed."""
    builder = RequestBuilder(NoWeights(100).config, None, context_length=30)
    calls: list[int] = []

    def check(prompt: Any, params: SamplingParams, line: int) -> Any:
        calls.append(line)
        return builder.build(prompt, params, index=line)

    checks = _Checks(check)

    def most(line: int, ids: list[int], **params: Any) -> int:
        record = InputRecord(ids, SamplingParams(**params), {})
        found, checked = checks.of(record, np.array(ids, np.int32), line)
        assert found.tolist() == ids
        return checked.max_new_tokens

    assert most(0, [*range(10, 20)], max_new_tokens=4) == 4
    assert most(1, [12, 13], max_new_tokens=4) == 4
    assert calls == [0], "what a longer prompt may do it may, too"
    with pytest.raises(PromptError, match="holds token id 100"):
        most(2, [12, 100], max_new_tokens=4)
    with pytest.raises(PromptError, match="has 31 tokens"):
        most(3, [12] * 31, max_new_tokens=4)
    assert most(4, [12] * 10, max_new_tokens=25) == 20, "the context ends it"
    assert most(5, [12] * 5, max_new_tokens=25) == 25
    late = {"max_new_tokens": 4, "prompt_logprobs": 0, "prompt_logprobs_start": 5}
    assert most(6, [12] * 10, **late) == 4
    with pytest.raises(ParameterError, match="prompt_logprobs_start is 5, but the prompt has 4 tokens"):
        most(7, [12] * 4, **late)
