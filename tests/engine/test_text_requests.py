"""Texts of a long list, encoded while others run."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from radixrt import ContextLengthError, ParameterError, PromptError, RunLimits, Runtime, request_list
from radixrt import SamplingParams as Params
from radixrt.errors import RadixrtError
from radixrt.frontend.arguments import Call
from radixrt.planning.simulated import ConstantRunner, simulated_parts
from radixrt.schedule.passes import Pass
from radixrt.text import text_tree
from radixrt.text.codec import JsonCodec
from tests.engine.test_lazy_requests import is_empty
from tests.support.small_tokenizers import small_tokenizer

TOKENIZER = small_tokenizer("byte level")
SHORT = Params(max_new_tokens=2, ignore_eos=True)
CONTEXT = 60


class NotedRunner(ConstantRunner):
    """Says when the first pass is launched."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun = threading.Event()

    def launch(self, pass_: Pass) -> Pass:
        self.has_begun.set()
        return pass_


def runtime_of(runner: NotedRunner) -> Runtime:
    limits = RunLimits(4000, 50, 400)
    parts = simulated_parts(runner, limits, CONTEXT, vocab_size=TOKENIZER.vocab_size, tokenizer=TOKENIZER)
    return Runtime.from_parts(parts)


def texts_of(count: int) -> list[str]:
    draws = random.Random(count)
    heads = [" ".join(draws.choices(("Mira", "likes", "Oslo", "37"), k=draws.randrange(1, 9))) for _ in range(9)]
    return [f"{draws.choice(heads)} the quick {draws.randrange(50)}" for _ in range(count)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_tree, "FIRST", 300)
    monkeypatch.setattr(text_tree, "LARGEST", 900)


@pytest.fixture
def halted(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """From the second block on texts are not encoded before this is set."""
    encode, goes_on, blocks = JsonCodec.encode, threading.Event(), list[int]()

    def halting(self: JsonCodec, texts: list[str]) -> list[list[int]]:
        blocks.append(len(texts))
        if len(blocks) > 1:
            assert goes_on.wait(30)
        return encode(self, texts)

    monkeypatch.setattr(JsonCodec, "encode", halting)
    yield goes_on
    goes_on.set()


def test_all_is_as_if_they_had_been_encoded_before(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = texts_of(700)
    params = [Params(max_new_tokens=1 + index % 5, n=1 + index % 2) for index in range(len(texts))]
    seeds: list[list[int]] = []
    found: list[list[tuple[int, int, tuple[int, ...]]]] = []
    for fewest in (request_list.FEWEST, 10**9):
        monkeypatch.setattr(request_list, "FEWEST", fewest)
        with runtime_of(NotedRunner()) as runtime:
            if fewest < len(texts):
                _, requests = runtime._late(texts, params, Call())
                assert isinstance(requests, request_list.TextRequests)
            else:
                _, requests = runtime._builder.build_all(texts, params, Call())
            known = {requests[i].index: requests[i].seed for i in range(requests_known(requests))}
            seeds.append([known[index] for index in range(len(texts))])
            outputs = runtime.generate(texts, params)
            found.append([(each.index, each.usage.prompt_tokens, each.prompt_token_ids) for each in outputs])
            assert is_empty(runtime)
    assert found[0] == found[1]
    assert seeds[0] == seeds[1]


def requests_known(requests: Any) -> int:
    are_texts = isinstance(requests, request_list.TextRequests)
    known: int = requests.known(len(requests) - 1, 30) if are_texts else len(requests)
    assert known == len(requests)
    return known


def test_the_first_pass_does_not_wait_for_the_last_text(halted: threading.Event) -> None:
    runner = NotedRunner()
    with runtime_of(runner) as runtime:
        outputs = runtime.generate_iter(texts_of(300), SHORT)
        first = next(outputs)
        assert runner.has_begun.is_set()
        assert runtime.num_waiting > 200
        halted.set()
        assert sorted([first.index, *(output.index for output in outputs)]) == list(range(300))


def test_others_run_while_a_list_waits_for_its_texts(halted: threading.Event) -> None:
    with runtime_of(NotedRunner()) as runtime:
        outputs = runtime.generate_iter(texts_of(300), SHORT)
        next(outputs)
        runtime.generate([1, 2, 3], SHORT)
        assert not halted.is_set()
        halted.set()
        assert len(list(outputs)) == 299
        assert is_empty(runtime)


def test_bad_texts_are_named_together_also_after_passes() -> None:
    runner, texts = NotedRunner(), texts_of(400)
    texts[7], texts[300] = "the " * 100, "a b" * 90
    with runtime_of(runner) as runtime:
        with pytest.raises(ContextLengthError, match="2 of 400 prompts cannot be run") as caught:
            runtime.generate(texts, SHORT)
        assert "prompt 7 has" in str(caught.value)
        assert "prompt 300 has" in str(caught.value)
        assert runner.has_begun.is_set()
        assert is_empty(runtime)
        assert len(runtime.generate(texts[:7] * 20, SHORT)) == 140


def test_others_and_ctrl_c_do_not_wait_for_a_list_that_will_fail(halted: threading.Event) -> None:
    texts = texts_of(300)
    texts.append("!" * 200)  # the first in their order
    with runtime_of(NotedRunner()) as runtime, ThreadPoolExecutor(1) as thread:
        failing = thread.submit(runtime.generate, texts, SHORT)
        while not runtime.has_work:
            time.sleep(0.01)
        time.sleep(0.3)  # it waits for texts by now
        began = time.monotonic()
        assert runtime.generate([1, 2, 3], SHORT).outputs[0].token_ids
        assert time.monotonic() - began < 10
        assert not failing.done()
        halted.set()
        with pytest.raises(ContextLengthError, match="prompt 300 has"):
            failing.result(30)
        assert is_empty(runtime)


def test_what_can_be_read_once_is_read_once() -> None:
    texts = texts_of(100)
    with runtime_of(NotedRunner()) as runtime:
        outputs = runtime.generate(texts, (Params(max_new_tokens=1, truncate_prompt_tokens=2) for _ in texts))
        assert {output.usage.prompt_tokens for output in outputs} == {2}
        params = ({"temperature": -1 if n == 7 else 0} for n in range(100))
        with pytest.raises(PromptError, match="prompt 7: temperature is -1"):
            runtime.generate(texts, params)
        ids = (f"own {n}" for n in range(100))
        assert [each.id for each in runtime.generate(texts, SHORT, request_ids=ids)][:2] == ["own 0", "own 1"]


def test_texts_that_are_not_submitted_are_not_encoded() -> None:
    with runtime_of(NotedRunner()) as runtime:
        _, requests = runtime._late(texts_of(200), SHORT, Call())
        assert isinstance(requests, request_list.TextRequests)
        assert not [each for each in threading.enumerate() if each.name == "radixrt-encoding"]


class Odd(BaseException):
    pass


def test_a_thread_that_ends_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def odd(self: JsonCodec, texts: list[str]) -> list[list[int]]:
        raise Odd

    monkeypatch.setattr(JsonCodec, "encode", odd)
    raised = pytest.raises(RadixrtError, match="their thread has ended")
    with runtime_of(NotedRunner()) as runtime, raised as caught:
        runtime.generate(texts_of(200), SHORT)
    assert isinstance(caught.value.__cause__, Odd)


@pytest.mark.parametrize(
    ("bad", "error", "match"),
    [
        ("half \ud800", PromptError, "prompt 9 cannot be encoded: the text holds U\\+D800"),
        (3.5, PromptError, "prompt 9 is neither a string"),
        ([10**6], PromptError, "prompt 9 holds token id 1000000"),
    ],
)
def test_what_shows_before_is_told_before_the_first_pass(bad: Any, error: type[Exception], match: str) -> None:
    runner, texts = NotedRunner(), list[Any](texts_of(200))
    texts[9] = bad
    with runtime_of(runner) as runtime, pytest.raises(error, match=match):
        runtime.generate(texts, SHORT)
    assert not runner.has_begun.is_set()


def test_parameters_are_looked_at_before_the_first_pass() -> None:
    runner = NotedRunner()
    params: list[Any] = [{"max_new_tokens": 2}] * 199 + [{"temperature": -1}]
    with runtime_of(runner) as runtime, pytest.raises(PromptError, match="prompt 199: temperature is -1"):
        runtime.generate(texts_of(200), params)
    with runtime_of(runner) as runtime, pytest.raises(ParameterError, match="2 sampling_params for 200 prompts"):
        runtime.generate(texts_of(200), [SHORT, SHORT])
    assert not runner.has_begun.is_set()


def test_a_text_that_the_vocabulary_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = JsonCodec.encode

    def lacking(self: JsonCodec, texts: list[str]) -> list[list[int]]:
        if any("@" in text for text in texts):
            raise ValueError("there is no @")
        return encode(self, texts)

    monkeypatch.setattr(JsonCodec, "encode", lacking)
    texts = texts_of(300)
    texts[5] += " @"
    with runtime_of(NotedRunner()) as runtime:
        with pytest.raises(PromptError, match=r"prompt 5 cannot be encoded: the tokenizer cannot encode .* no @"):
            runtime.generate(texts, SHORT)
        assert is_empty(runtime)


def test_the_thread_that_encodes_lets_others_have_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    walked: list[int] = []

    def watched(items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            walked.append(1)
            yield item

    monkeypatch.setattr(request_list, "with_pauses", watched)
    with runtime_of(NotedRunner()) as runtime:
        runtime.generate(texts_of(300), SHORT)
    assert len(walked) >= 3 * 300, "to compare texts, to put their ids together, and to check them"


def test_ids_that_the_model_lacks() -> None:
    parts = simulated_parts(NotedRunner(), RunLimits(4000, 50, 400), CONTEXT, vocab_size=50, tokenizer=TOKENIZER)
    texts = texts_of(300)
    with Runtime.from_parts(parts) as runtime:
        with pytest.raises(PromptError, match=r"holds token id .*; the model's ids are 0 to 49"):
            runtime.generate(texts, SHORT)
        assert is_empty(runtime)


def test_a_list_that_is_left_is_encoded_no_further(halted: threading.Event) -> None:
    with runtime_of(NotedRunner()) as runtime:
        for _ in runtime.generate_iter(texts_of(3000), SHORT):
            break
        assert is_empty(runtime)
        halted.set()
        (encoding,) = [each for each in threading.enumerate() if each.name == "radixrt-encoding"] or [None]
        if encoding is not None:
            encoding.join(10)
            assert not encoding.is_alive()


def test_what_wants_nothing_to_run_waits_for_all_texts(halted: threading.Event) -> None:
    with runtime_of(NotedRunner()) as runtime:
        outputs = runtime.generate_iter(texts_of(500), SHORT)
        next(outputs)
        threading.Timer(0.2, halted.set).start()
        runtime.identity()
        assert not runtime.has_work
        assert len(list(outputs)) == 499


def test_a_runtime_is_closed_while_texts_are_encoded(halted: threading.Event) -> None:
    runtime = runtime_of(NotedRunner())
    outputs = runtime.generate_iter(texts_of(500), SHORT)
    next(outputs)
    threading.Timer(0.2, halted.set).start()
    runtime.close()
    with pytest.raises(RadixrtError):
        list(outputs)
