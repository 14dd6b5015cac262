"""Many turns whose prompts begin with the tokens of all turns before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt.builtin import MODEL_PATH
from radixrt.conversation import Conversation
from radixrt.errors import ParameterError, PromptError, TokenizerError
from radixrt.output import CompletionOutput, FinishReason, RequestOutput, Timings, Usage
from radixrt.runtime import Runtime
from radixrt.sampling_params import SamplingParams
from radixrt.text.builder import TextBuilder
from radixrt.text.continuation import encode_continuation, splice
from radixrt.text.tokenizer import Tokenizer, load_tokenizer
from tests.support.small_tokenizers import CHATML, HARMONY, chat_tokenizer, small_tokenizer

SYSTEM = {"role": "system", "content": "Be brief."}


@dataclass(frozen=True)
class FakeChunk:
    text: str
    output: RequestOutput | None = None


@dataclass
class FakeRuntime:
    """Answers with what it is told to, and remembers what it was asked."""

    tokenizer: Tokenizer | None
    answers: list[tuple[list[int], FinishReason]] = field(default_factory=list)
    stop: tuple[str, ...] = ()
    prompts: list[list[int]] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    context_length: int = 4096
    default_params: SamplingParams = field(default_factory=SamplingParams)

    def will_say(self, *ids: int, reason: FinishReason = FinishReason.STOP) -> None:
        self.answers.append((list(ids), reason))

    def generate(self, prompts: list[int], sampling_params: SamplingParams, /) -> RequestOutput:
        assert self.tokenizer is not None
        self.prompts.append(list(prompts))
        self.params.append(sampling_params)
        ids, reason = self.answers.pop(0)
        builder = TextBuilder(self.tokenizer, SamplingParams(stop=self.stop))
        for token_id in ids:
            builder.push(token_id)
        count = len(prompts)
        usage = Usage(count, 0, count, len(ids))
        answer = CompletionOutput(0, builder.finish(), tuple(ids), reason)
        return RequestOutput(0, 0, (answer,), usage, Timings(0.0, 0.0, 0.0), np.array(prompts, dtype=np.int32))

    def stream(self, prompt: list[int], sampling_params: SamplingParams, /) -> Iterator[FakeChunk]:
        output = self.generate(prompt, sampling_params)
        yield FakeChunk(output.text[:2])
        yield FakeChunk(output.text[2:], output)

    def text(self, turn: int = -1) -> str:
        assert self.tokenizer is not None
        return self.tokenizer.decode(self.prompts[turn], skip_special_tokens=False)


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return chat_tokenizer(tmp_path_factory.mktemp("chatml"))


def one_by_one(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens that no tokenizer would choose: a byte each."""
    spelled = {tokenizer.piece(i): i for i in range(tokenizer.vocab_size)}
    ids: list[int] = []
    for letter in text:
        whole = tokenizer.encode(letter).tolist()
        ids += [spelled[letter]] if letter in spelled else whole
    return ids


def end_token(tokenizer: Tokenizer) -> int:
    return int(tokenizer.encode("<|im_end|>")[0])


def rendered(talk: Conversation, tokenizer: Tokenizer, turns: int) -> str:
    ids = tokenizer.encode_chat(talk.messages[:turns])
    return tokenizer.decode(ids, skip_special_tokens=False)


# -- with a chat template --------------------------------------------------------------------------------------


def test_every_prompt_begins_with_the_history(chatml: Tokenizer) -> None:
    runtime = FakeRuntime(chatml)
    talk = Conversation(runtime, [SYSTEM])
    end = end_token(chatml)
    answers = [
        [*chatml.encode("Mira likes Oslo.").tolist(), end],
        [*one_by_one(chatml, "Tarek likes Oslo."), end],
        [*one_by_one(chatml, "  hello\n again "), end],
        [end],
        [*one_by_one(chatml, "日本 é 😀👩‍👩‍👧"), end],
        [*chatml.encode("日本").tolist()[:-1], end],  # half a character
    ]
    assert answers[1][:-1] != chatml.encode("Tarek likes Oslo.").tolist()
    history: list[int] = []
    for turn, answer in enumerate(answers):
        runtime.will_say(*answer)
        output = talk.say(f"and {turn}?")
        assert runtime.prompts[-1][: len(history)] == history
        assert runtime.text() == rendered(talk, chatml, 2 * turn + 2)
        assert talk.messages[-2:] == [
            {"role": "user", "content": f"and {turn}?"},
            {"role": "assistant", "content": output.text},
        ]
        history = runtime.prompts[-1] + answer
        assert talk.token_ids == history


def test_variables_of_the_template(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if brief %}!{% endif %}"
    runtime = FakeRuntime(chat_tokenizer(tmp_path, template))
    talk = Conversation(runtime, chat_template_kwargs={"brief": True})
    for branch in (talk, *talk.fork(2)):
        runtime.will_say(5)
        branch.say("hello")
        assert runtime.text() == "hello!"
    with pytest.raises(TokenizerError, match="chat_template_kwargs have 'short', which the chat template"):
        Conversation(runtime, chat_template_kwargs={"short": True})


def test_an_answer_without_its_end_goes_on_too(chatml: Tokenizer) -> None:
    """Cut at max_new_tokens: the template writes the end token after it."""
    runtime = FakeRuntime(chatml)
    talk = Conversation(runtime)
    answer = one_by_one(chatml, "Mira lik")
    runtime.will_say(*answer, reason=FinishReason.LENGTH)
    talk.say("who?")
    runtime.will_say()
    talk.say("go on")
    history = runtime.prompts[0] + answer
    assert runtime.prompts[1][: len(history) + 1] == [*history, end_token(chatml)]
    assert runtime.text() == rendered(talk, chatml, 3)


def test_an_answer_cut_at_a_stop_string(chatml: Tokenizer) -> None:
    runtime = FakeRuntime(chatml, stop=("STOP",))
    talk = Conversation(runtime)
    answer = one_by_one(chatml, "likes OsloSTOP")
    runtime.will_say(*answer)
    assert talk.say("who?").text == "likes Oslo"
    runtime.will_say()
    talk.say("go on")
    kept = runtime.prompts[0] + answer[:-4]
    assert runtime.prompts[1][: len(kept) + 1] == [*kept, end_token(chatml)]
    assert runtime.text() == rendered(talk, chatml, 3)


STRIPPING = CHATML.replace("message['content']", "message['content'] | trim")
FORGETTING = CHATML.replace("message['content']", "message['content'].split('</think>')[-1]")


@pytest.mark.parametrize(
    ("template", "answer", "kept"),
    [
        (STRIPPING, "Mira likes  ", "Mira likes"),
        (STRIPPING, "  Mira likes", ""),
        (FORGETTING, "hm</think>Mira", ""),
        (FORGETTING, "Mira</think>", ""),
    ],
)
def test_a_template_that_rewrites_the_history(tmp_path: Path, template: str, answer: str, kept: str) -> None:
    """The prompt is what the template writes, and what comes before the first difference is not tokenised anew."""
    tokenizer = chat_tokenizer(tmp_path, template)
    runtime = FakeRuntime(tokenizer)
    talk = Conversation(runtime, [SYSTEM])
    end = end_token(tokenizer)
    runtime.will_say(*one_by_one(tokenizer, answer), end)
    talk.say("who?")
    for _ in range(2):
        runtime.will_say(*one_by_one(tokenizer, "fox"), end)
        talk.say("and?")
        ids = runtime.prompts[0] + one_by_one(tokenizer, kept)
        assert runtime.prompts[-1][: len(ids)] == ids
        assert runtime.text() == rendered(talk, tokenizer, len(talk.messages) - 1)


def test_a_template_whose_beginning_changes(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path, "{{ messages | length }} " + CHATML)
    runtime = FakeRuntime(tokenizer)
    talk = Conversation(runtime)
    for turn in range(2):
        runtime.will_say(*one_by_one(tokenizer, "Mira"), end_token(tokenizer))
        talk.say("who?")
        assert runtime.prompts[-1] == tokenizer.encode_chat(talk.messages[: 2 * turn + 1]).tolist()


def test_channels_are_text_of_an_answer(tmp_path: Path) -> None:
    """gpt-oss': thoughts and answer are one text without special tokens, and stay one in the history."""
    tokenizer = chat_tokenizer(tmp_path, HARMONY)
    runtime = FakeRuntime(tokenizer)
    talk = Conversation(runtime, chat_template_kwargs={"reasoning_effort": "low"})
    answer = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Oslo"
    ids = tokenizer.encode(answer + "<|return|>").tolist()
    for turn in range(2):
        runtime.will_say(*ids)
        assert talk.say("Where?").text == "analysisHm.assistantfinalOslo"
        begun = "<|start|>system<|message|>Reasoning: low<|end|><|start|>user<|message|>Where?<|end|>"
        assert runtime.text(turn).startswith(begun + "<|start|>assistant")
    assert runtime.text() == rendered(talk, tokenizer.with_template_kwargs({"reasoning_effort": "low"}), 3)
    assert "final<|message|>analysisHm.assistantfinalOslo<|end|>" in runtime.text()
    # What a caller does who wants the final channel alone.
    final = tokenizer.decode(ids[:-1], skip_special_tokens=False).rpartition("<|channel|>final<|message|>")[2]
    assert final == "Oslo"
    turns = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": final}]
    assert "final<|message|>Oslo<|end|>" in tokenizer.chat_text(turns)
    with pytest.raises(TokenizerError, match="refuses these messages: the content names channels"):
        tokenizer.chat_text([turns[0], {"role": "assistant", "content": answer}])


# -- without one -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def builtin() -> Tokenizer:
    return load_tokenizer(MODEL_PATH)


@pytest.mark.parametrize("kind", ["builtin", "byte level", "bare", "byte fallback, no strip"])
def test_plain_turns_go_on_where_the_answer_ended(kind: str, builtin: Tokenizer) -> None:
    tokenizer = builtin if kind == "builtin" else small_tokenizer(kind)
    runtime = FakeRuntime(tokenizer)
    talk = Conversation(runtime, [{"role": "system", "content": "Mira likes Oslo.\n"}])
    said = "Mira likes Oslo.\n"
    end = tokenizer.eos_token_id or 2
    answer = encode_continuation(tokenizer, " Oslo.")
    history: list[int] = []
    for turn, text in enumerate(("Q: Mira likes?\nA:", "\nQ: Tarek?\nA:", " x", "日本", "Oslo", "", "  ")):
        reason = FinishReason.LENGTH if turn % 2 else FinishReason.STOP
        runtime.will_say(*answer, *([] if turn % 2 else [end]), reason=reason)
        talk.say(text)
        said += text
        assert runtime.prompts[-1][: len(history)] == history
        assert tokenizer.decode(runtime.prompts[-1]) == said
        assert runtime.prompts[-1].count(1) == (1 if kind in ("builtin", "bare") else 0)  # BOS
        assert end not in runtime.prompts[-1]
        history = runtime.prompts[-1] + answer
        said += " Oslo."


def test_a_plain_answer_cut_inside_a_token(builtin: Tokenizer) -> None:
    runtime = FakeRuntime(builtin, stop=("slo",))
    talk = Conversation(runtime)
    runtime.will_say(*encode_continuation(builtin, " Mira likes Oslo."))
    assert talk.say("A:").text.strip() == "Mira likes O"
    assert talk.token_ids == runtime.prompts[0] + encode_continuation(builtin, " Mira likes")
    history = talk.token_ids
    runtime.will_say(2)
    talk.say("fen")
    assert runtime.prompts[1][: len(history)] == history
    assert builtin.decode(runtime.prompts[1]) == "A: Mira likes Ofen"
    assert talk.messages[-1] == {"role": "assistant", "content": ""}


def test_a_plain_answer_cut_at_its_length_is_kept_whole() -> None:
    """Even where it ends with half a character."""
    tokenizer = small_tokenizer("byte level")
    runtime = FakeRuntime(tokenizer)
    talk = Conversation(runtime)
    answer = tokenizer.encode("x😃").tolist()[:-1]
    runtime.will_say(*answer, reason=FinishReason.LENGTH)
    talk.say("A:")
    assert talk.token_ids == runtime.prompts[0] + answer


def test_a_fork_goes_on_inside_a_token(builtin: Tokenizer) -> None:
    runtime = FakeRuntime(builtin, stop=("slo",))
    talk = Conversation(runtime)
    runtime.will_say(*encode_continuation(builtin, " Mira likes Oslo."))
    talk.say("A:")
    for branch in (talk, *talk.fork(2)):
        runtime.will_say(2)
        branch.say("fen")
        assert builtin.decode(runtime.prompts[-1]) == "A: Mira likes Ofen"


def test_a_real_runtime_finds_the_history_in_its_cache() -> None:
    with Runtime(device="cpu", max_total_tokens=2048) as runtime:
        talk = Conversation(runtime, sampling_params=SamplingParams(max_new_tokens=8, temperature=0))
        talk.say("Mira likes Oslo. Tarek likes Rome.\nQ: Mira likes?\nA:")
        for branch in (talk, *talk.fork(2)):
            history = branch.token_ids
            usage = branch.say("\nQ: Tarek likes?\nA:").usage
            assert usage.cached_tokens >= len(history) - 1  # the last token's KV is never computed
            assert usage.computed_tokens < 20


# -- both ------------------------------------------------------------------------------------------------------


def test_a_turn_streams_one_answer(chatml: Tokenizer) -> None:
    talk = Conversation(FakeRuntime(chatml), [SYSTEM])
    with pytest.raises(ParameterError, match="n is 2; a turn streams one answer"):
        next(talk.stream("hello", {"n": 2}))


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT])
def test_a_turn_that_fails_leaves_no_trace(chatml: Tokenizer, reason: FinishReason) -> None:
    for tokenizer in (chatml, small_tokenizer("bare")):
        runtime = FakeRuntime(tokenizer)
        talk = Conversation(runtime, [SYSTEM])
        for _ in range(2):
            before = talk.messages, talk.token_ids
            runtime.will_say(5, reason=reason)
            assert talk.say("hello").finish_reason is reason
            assert (talk.messages, talk.token_ids) == before
            runtime.will_say(5)
            talk.say("hello")
            assert runtime.prompts[-1] == runtime.prompts[-2]


def test_streams(chatml: Tokenizer) -> None:
    runtime, other = FakeRuntime(chatml), FakeRuntime(chatml)
    talk, twin = Conversation(runtime), Conversation(other)
    answer = [*one_by_one(chatml, "Oslo"), end_token(chatml)]
    for _ in range(2):
        runtime.will_say(*answer)
        other.will_say(*answer)
        twin.say("where?")
        assert "".join(chunk.text for chunk in talk.stream("where?")) == "Oslo"
        assert (talk.messages, talk.token_ids) == (twin.messages, twin.token_ids)
    before = talk.messages
    runtime.will_say(*answer)
    next(iter(talk.stream("where?")))  # left early
    assert talk.messages == before


def test_forks_share_the_history_and_go_their_own_way(chatml: Tokenizer) -> None:
    for tokenizer in (chatml, small_tokenizer("bare")):
        runtime = FakeRuntime(tokenizer)
        talk = Conversation(runtime, sampling_params=SamplingParams(top_k=3, seed=0))
        runtime.will_say(*tokenizer.encode("Oslo").tolist())
        talk.say("where?")
        history, messages = talk.token_ids, talk.messages
        branches = [*talk.fork(2), *talk.fork(), *talk.fork(1)[0].fork(1), talk]
        for place, branch in enumerate(branches):
            assert (branch.token_ids, branch.messages) == (history, messages)
            runtime.will_say(*tokenizer.encode("abcde"[place]).tolist())
            branch.say("why?")
        assert [branch.messages[-1]["content"] for branch in branches] == list("abcde")
        assert len({tuple(ids) for ids in runtime.prompts[1:]}) == 1
        assert len({params.seed for params in runtime.params[1:]}) == len(branches)
        assert all(replace(params, seed=None) == SamplingParams(top_k=3) for params in runtime.params)
        assert [branch.token_ids for branch in Conversation(runtime).fork(2)] == [[], []]
        (unseeded,) = Conversation(runtime).fork()
        runtime.will_say(*tokenizer.encode("g").tolist())
        unseeded.say("why?")
        assert runtime.params[-1].seed is None  # each call draws anew
        again = Conversation(runtime, sampling_params=SamplingParams(seed=7)).fork(2)
        runtime.will_say(*tokenizer.encode("f").tolist())
        again[0].say("why?")
        assert runtime.params[-1].seed != runtime.params[1].seed
        for bad in (0, -1):
            with pytest.raises(ParameterError, match=f"n is {bad}; it must be a whole number from 1 to 4096"):
                talk.fork(bad)


def test_parameters_of_one_turn(chatml: Tokenizer) -> None:
    runtime = FakeRuntime(chatml)
    talk = Conversation(runtime)
    own = SamplingParams(temperature=0)
    for params in (None, own, None):
        runtime.will_say(5)
        talk.say("hello", params)
    runtime.will_say(5)
    list(talk.stream("hello", own))
    assert runtime.params == [SamplingParams(), own, SamplingParams(), own]


def test_what_is_not_given_has_the_defaults_of_the_runtime(chatml: Tokenizer) -> None:
    """Such as those of the model's own generation_config."""
    runtime = FakeRuntime(chatml, default_params=SamplingParams(temperature=0.125, top_k=7))
    for asked, turn in ((None, None), ({"top_k": 3}, None), (None, {"top_k": 3}), (SamplingParams(), None)):
        runtime.will_say(*chatml.encode("no<|im_end|>", add_special_tokens=False))
        Conversation(runtime, sampling_params=asked).say("why?", turn)
    own, changed = runtime.default_params, replace(runtime.default_params, top_k=3)
    assert runtime.params == [own, changed, changed, SamplingParams()]


def test_bad_words_none_and_no_tokenizer(chatml: Tokenizer) -> None:
    with pytest.raises(ParameterError, match="a conversation needs the text of its answers"):
        Conversation(FakeRuntime(chatml)).say("hello", {"detokenize": False})
    with pytest.raises(TokenizerError, match="a conversation needs a tokenizer"):
        Conversation(FakeRuntime(None))
    with pytest.raises(TokenizerError, match="chat message 0 has no 'content'"):
        Conversation(FakeRuntime(chatml), [{"role": "user"}])
    with pytest.raises(TokenizerError, match="a chat is a list of messages, not int"):
        Conversation(FakeRuntime(chatml), 0)  # type: ignore[arg-type]
    with pytest.raises(TokenizerError, match="the text is a list; it must be a string"):
        Conversation(FakeRuntime(chatml)).say([{"type": "text", "text": "a"}])  # type: ignore[arg-type]
    with pytest.raises(PromptError, match="the prompt is empty: it has no tokens"):
        Conversation(FakeRuntime(small_tokenizer("byte level"))).say("")
    for tokenizer in (chatml, small_tokenizer("bare")):
        with pytest.raises(TokenizerError, match="content of type int"):
            Conversation(FakeRuntime(tokenizer)).say(3)  # type: ignore[arg-type]


def test_messages_are_copies(chatml: Tokenizer) -> None:
    mine = [dict(SYSTEM)]
    talk = Conversation(FakeRuntime(chatml), mine)
    mine[0]["content"] = talk.messages[0]["content"] = "changed"
    assert talk.messages == [SYSTEM]


# -- the joint -------------------------------------------------------------------------------------------------

SOUND = ["byte level", "byte fallback", "byte fallback, no strip", "bare"]
WORDS = st.text("abo lM.\n日é😀", max_size=8)


@pytest.mark.parametrize("kind", SOUND)
@settings(max_examples=60)
@given(first=WORDS, second=WORDS)
def test_a_continuation_spells_just_its_text(kind: str, first: str, second: str) -> None:
    tokenizer = small_tokenizer(kind)
    before = tokenizer.encode("x" + first).tolist()
    ids = before + encode_continuation(tokenizer, second)
    assert tokenizer.decode(ids) == "x" + first + second


@pytest.mark.parametrize("kind", SOUND)
@settings(max_examples=60)
@given(parts=st.lists(WORDS, min_size=1, max_size=4), more=WORDS, other=WORDS)
def test_a_splice_spells_the_full_text(kind: str, parts: list[str], more: str, other: str) -> None:
    tokenizer = small_tokenizer(kind)
    known = tokenizer.encode("x").tolist()
    for part in parts:
        known += encode_continuation(tokenizer, part)
    text = tokenizer.decode(known)
    for full_text in (text + more, text[: len(text) // 2] + other, other):
        full = tokenizer.encode(full_text).tolist()
        ids = splice(tokenizer, known, full)
        assert tokenizer.decode(ids, False) == tokenizer.decode(full, False)
    ids = splice(tokenizer, known, tokenizer.encode(text + "1").tolist())
    if not set(known[-1:]) & tokenizer.byte_ids:  # the text of a run of bytes is certain only after it
        assert ids[: len(known)] == known
    assert splice(tokenizer, [], known) == splice(tokenizer, known, known) == known
    assert splice(tokenizer, known, []) == []


@pytest.mark.parametrize("has_template", [True, False])
def test_a_text_far_too_long_is_not_encoded(
    has_template: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = chat_tokenizer(tmp_path) if has_template else load_tokenizer(MODEL_PATH)
    talk = Conversation(FakeRuntime(tokenizer, context_length=50), [SYSTEM])
    longest: list[int] = []
    own = Tokenizer.encode_batch

    def encode_batch(self: Tokenizer, texts: list[str], **options: bool) -> Any:
        longest.append(max(map(len, texts)))
        return own(self, texts, **options)

    monkeypatch.setattr(Tokenizer, "encode_batch", encode_batch)
    monkeypatch.setattr(Tokenizer, "chat_text", lambda *_: pytest.fail("it is rendered"))
    for turn in (talk.say, talk.stream):
        with pytest.raises(PromptError, match=r"the prompt has 300,0\d\d characters .* length is 50 tokens"):
            list(turn("ab " * 10**5))
    assert max(longest) < 2000
