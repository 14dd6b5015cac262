"""`radixrt generate`, over the built-in model."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import radixrt
from radixrt.cli import main
from radixrt.errors import PassError
from radixrt.output import CompletionOutput, FinishReason, RequestOutput, StreamChunk, Timings, Usage
from radixrt.runtime import Runtime

FACTS = "Mira likes Oslo. Tarek counts 374. Ines paints blue."
MIRA, TAREK = (f"{FACTS}\nQ: {question}?\nA:" for question in ("Mira likes", "Tarek counts"))
GREEDY = ("--temperature", "0", "--max-new-tokens", "8")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    assert main(["generate", *arguments]) == status
    shown = capsys.readouterr()
    assert bool(shown.err) == bool(status)
    return shown.err if status else shown.out


def test_texts(runtime: Runtime, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, MIRA, *GREEDY) == "Oslo\n"
    assert printed(capsys, MIRA, TAREK, *GREEDY) == "# prompt 0\nOslo\n# prompt 1\n374\n"
    two = printed(capsys, MIRA, *GREEDY, "--n", "2")
    assert two == "# prompt 0, answer 0\nOslo\n# prompt 0, answer 1\nOslo\n"


def test_each_command_draws_anew_unless_it_has_a_seed(
    builtin: Runtime, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seeds = []

    def make(**options: Any) -> Any:
        seeds.append(options["seed"])
        return nullcontext(builtin)

    monkeypatch.setitem(vars(radixrt), "Runtime", make)
    printed(capsys, MIRA, *GREEDY)
    printed(capsys, MIRA, *GREEDY, "--seed", "3")
    assert seeds == [None, 3]


def test_json(runtime: Runtime, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, MIRA, TAREK, *GREEDY, "--json", "--n", "2", "--logprobs", "1").splitlines()
    answers = [json.loads(line) for line in lines]
    assert [answer["text"] for answer in answers] == ["Oslo", "Oslo", "374", "374"]
    assert [answer["meta_info"]["cached_tokens"] for answer in answers] == [0, 0, 17, 17]
    assert all(len(answer["meta_info"]["output_top_logprobs"][0]) == 1 for answer in answers)


def test_streams(runtime: Runtime, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "generate", lambda *_: pytest.fail("it does not stream"))
    assert printed(capsys, TAREK, *GREEDY, "--stream") == "374\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert printed(capsys, TAREK, *GREEDY) == "374\n"


def test_standard_input_is_a_prompt(
    runtime: Runtime, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{MIRA}\n"))
    assert printed(capsys, TAREK, "-", *GREEDY) == "# prompt 0\n374\n# prompt 1\nOslo\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff"), encoding="utf-8"))
    assert "error: standard input is not text: " in printed(capsys, "-", status=2)
    monkeypatch.setattr(sys, "stdin", None)
    assert "error: cannot read standard input: it is closed" in printed(capsys, "-", status=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--temperature", "-1"], "temperature is -1.0; it must be a number from 0 to 100"),
        (["x", "--logprobs", "1"], "log-probabilities are printed with --json only"),
        (["x", "--prompt-logprobs", "1"], "log-probabilities are printed with --json only"),
        (["x", "y", "--stream"], "--stream takes one prompt and prints one answer"),
        (["x", "--n", "2", "--stream"], "--stream takes one prompt and prints one answer"),
        (["-", "-"], "- is given twice; standard input is one prompt"),
    ],
)
def test_mistakes_show_before_the_model_loads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    monkeypatch.setitem(vars(radixrt), "Runtime", lambda: pytest.fail("it loaded"))
    assert printed(capsys, *arguments, status=2) == f"radixrt: error: {message}\n"


def test_a_prompt_that_cannot_run(runtime: Runtime, capsys: pytest.CaptureFixture[str]) -> None:
    assert "prompt 1 has " in printed(capsys, "x", "y " * 5000, *GREEDY, status=2)
    assert "the prompt has " in printed(capsys, "y " * 5000, *GREEDY, "--stream", status=2)


def test_failures(runtime: Runtime, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    answer = CompletionOutput(0, "a", (5,), FinishReason.ERROR, error="its numbers are not finite")
    failed = RequestOutput(0, 0, (answer,), Usage(1, 0, 1, 1), Timings(0, 0, 0), np.ones(1, dtype=np.int32))
    monkeypatch.setattr(runtime, "generate", lambda *_: [failed])
    monkeypatch.setattr(runtime, "stream", lambda *_: [StreamChunk("a", (5,), failed)])
    for options in ([], ["--json"], ["--stream"]):
        shown = printed(capsys, "x", *options, status=1)
        assert shown == "radixrt: error: prompt 0: its numbers are not finite\n"

    def fail(*_: object) -> Any:
        raise PassError("prompt 0: out of memory")

    monkeypatch.setattr(runtime, "generate", fail)
    assert printed(capsys, "x", status=1) == "radixrt: error: prompt 0: out of memory\n"


def test_interrupted_stream(
    runtime: Runtime, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stream(*_: object) -> Iterator[StreamChunk]:
        yield StreamChunk("Os", (5,))
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(runtime, "stream", stream)
    assert main(["generate", "x", "--stream"]) == 130
    assert capsys.readouterr() == ("Os\n", "radixrt: interrupted\n")


def test_nobody_reads_on(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert main(["generate", MIRA, *GREEDY]) == 141
