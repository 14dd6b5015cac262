"""`radixrt chat`, typed into standard input, over the built-in model."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from radixrt.builtin import MODEL_PATH
from radixrt.cli import main
from radixrt.errors import DeviceLostError, PassError, SchedulerError
from radixrt.output import CompletionOutput, FinishReason, RequestOutput, StreamChunk, Timings, Usage
from radixrt.runtime import Runtime

FACTS = "Mira likes Oslo. Tarek counts 374. Ines paints blue."
GREEDY = ("--temperature", "0", "--max-new-tokens", "8")
HELP = "/help lists the commands, Ctrl-D ends the chat."
PLAIN = r"The model has no chat template: it continues plain text, each turn in the form '\nQ: {}\nA:'."


class Typist:
    """Types lines into the command and reads what it prints."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch = monkeypatch
        self.capsys = capsys

    def __call__(self, *lines: str, options: tuple[str, ...] = GREEDY, status: int = 0) -> tuple[list[str], str]:
        """Lines of standard output, and all of standard error."""
        self.monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
        assert main(["chat", "--system", FACTS, *options]) == status
        shown = self.capsys.readouterr()
        return shown.out.splitlines(), shown.err


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typist:
    return Typist(monkeypatch, capsys)


def test_turns_find_those_before_them(runtime: Runtime, typed: Typist) -> None:
    out, err = typed("Mira likes?", "", "Tarek counts?", "Ines paints?")
    assert (out[:2], err) == ([HELP, PLAIN], "")
    assert out[2:] == [
        "Oslo",
        "[0 of 23 prompt tokens cached; 2 generated]",
        "374",
        "[24 of 33 prompt tokens cached; 3 generated]",
        "blue",
        "[35 of 44 prompt tokens cached; 2 generated]",
    ]
    out, _ = typed("Tarek counts?", options=("--temperature", "0", "--max-new-tokens", "1"))
    assert out[2:] == ["37", "[17 of 23 prompt tokens cached; 1 generated, cut there]"]


def test_commands(runtime: Runtime, typed: Typist) -> None:
    out, _ = typed("Mira likes?", "/tree", "/reset", "Mira likes?", "/help", "/nonsense", "/quit", "Mira likes?")
    text = "\n".join(out)
    assert "\nOslo\n[0 of 23 prompt tokens cached; 2 generated]\n24 cached tokens, 0 in use\n" in text
    assert "[a new conversation]\nOslo\n[22 of 23 prompt tokens cached; 2 generated]\n/reset " in text
    assert "there is no command /nonsense; the commands are:\n/reset" in text
    assert out[-1].startswith("/quit")


def test_turns_of_a_base_model(runtime: Runtime, typed: Typist, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def stream(prompt: list[int], params: object) -> Iterator[StreamChunk]:
        assert runtime.tokenizer is not None
        seen.append(runtime.tokenizer.decode(prompt))
        yield StreamChunk("", (), output(prompt, FinishReason.LENGTH))

    monkeypatch.setattr(runtime, "stream", stream)
    typed("a", " /b", options=("--turn", "<{}>"))
    assert seen == [f"{FACTS}<a>", f"{FACTS}<a>< /b>"]
    out, _ = typed("a", options=("--model", "other"))
    assert seen[-1] == f"{FACTS}a"
    assert out[1].endswith("each turn in the form '{}'.")


def output(prompt: list[int], reason: FinishReason, error: str | None = None) -> RequestOutput:
    answer = CompletionOutput(0, "", (), reason, error=error)
    usage, ids = Usage(len(prompt), 0, len(prompt), 0), np.array(prompt, dtype=np.int32)
    return RequestOutput(0, 0, (answer,), usage, Timings(0, 0, 0), ids)


def test_a_chat_template_writes_the_turns(typed: Typist, tmp_path: Path) -> None:
    for file in MODEL_PATH.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "chat_template.jinja").write_text(
        "{{ bos_token + ' ' }}{% for m in messages %}"
        "{{ '\nQ: ' + m.content + '\nA:' if m.role == 'user' else m.content }}{% endfor %}"
    )
    options = ("--model", str(tmp_path), "--device", "cpu", "--max-total-tokens", "2048")
    out, _ = typed("Mira likes?", "Tarek counts?", options=(*GREEDY, *options))
    assert out == [
        HELP,
        "Oslo",
        "[0 of 23 prompt tokens cached; 2 generated]",
        "374",
        "[23 of 35 prompt tokens cached; 3 generated]",
    ]
    _, err = typed(options=("--turn", "{}", *options), status=2)
    assert err == "radixrt: error: --turn is for models without a chat template; this model has one\n"


def test_ctrl_c_ends_the_answer_and_the_turn_is_forgotten(
    runtime: Runtime, typed: Typist, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Runtime.stream
    interrupts = iter([True])

    def stream(prompt: Any, params: Any) -> Iterator[StreamChunk]:
        for chunk in real(runtime, prompt, params):
            yield chunk
            if next(interrupts, False):
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(runtime, "stream", stream)
    out, err = typed("Tarek counts?", "Mira likes?")
    assert out[2:] == [
        "37",
        "[stopped; this turn is forgotten]",
        "Oslo",
        "[17 of 23 prompt tokens cached; 2 generated]",
    ]
    assert err == ""
    assert not runtime.has_work


def test_sigterm_ends_the_chat(runtime: Runtime, typed: Typist, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Runtime.stream

    def stream(prompt: Any, params: Any) -> Iterator[StreamChunk]:
        for chunk in real(runtime, prompt, params):
            signal.raise_signal(signal.SIGTERM)
            yield chunk

    monkeypatch.setattr(runtime, "stream", stream)
    _, err = typed("Tarek counts?", "Mira likes?", status=143)
    assert err == "radixrt: terminated\n"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_lost_device_ends_the_chat(runtime: Runtime, typed: Typist, monkeypatch: pytest.MonkeyPatch) -> None:
    def stream(*_: Any) -> Iterator[StreamChunk]:
        raise DeviceLostError("it works no more")

    monkeypatch.setattr(runtime, "stream", stream)
    _, err = typed("Tarek counts?", "Mira likes?", status=75)
    assert err == "radixrt: error: it works no more\n"


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_ends_a_long_prompt_between_its_passes(
    runtime: Runtime, typed: Typist, monkeypatch: pytest.MonkeyPatch, presses: int
) -> None:
    runner = runtime.parts.engine.runner
    launch, launched = runner.launch, []

    def interrupted(batch: Any) -> Any:
        launched.append(batch)
        if len(launched) == 2:
            for _ in range(presses):
                signal.raise_signal(signal.SIGINT)
        return launch(batch)

    monkeypatch.setattr(runner, "launch", interrupted)
    monkeypatch.setattr(
        runtime.parts.scheduler, "config", replace(runtime.parts.scheduler.config, chunked_prefill_size=2)
    )
    out, err = typed("Tarek counts?", "Mira likes?")
    assert out[2:] == [
        "",
        "[stopped; this turn is forgotten]",
        "Oslo",
        "[2 of 23 prompt tokens cached; 2 generated]",
    ]
    assert err == ""
    assert not runtime.has_work


def test_a_turn_that_fails_does_not_end_the_chat(
    runtime: Runtime, typed: Typist, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, err = typed("Mira likes " * 1000, "Mira likes?", status=2)
    assert "radixrt: error: the prompt has " in err
    assert out[2] == "Oslo"

    def stream(prompt: list[int], params: object) -> Iterator[StreamChunk]:
        yield StreamChunk("", (), output(prompt, FinishReason.ERROR, "its numbers are not finite"))

    monkeypatch.setattr(runtime, "stream", stream)
    assert typed("a", status=1)[1] == "radixrt: error: its numbers are not finite\n"
    for error, lines in ((PassError("out of memory"), 2), (SchedulerError("stuck"), 1)):

        def fail(*_: object, error: Exception = error) -> Any:
            raise error

        monkeypatch.setattr(runtime, "stream", fail)
        assert typed("a", "b", status=1)[1] == f"radixrt: error: {error}\n" * lines


def test_mistakes(
    runtime: Runtime, typed: Typist, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, err = typed(options=("--turn", "x"), status=2)
    assert err == "radixrt: error: --turn is 'x'; it must contain {} once, in the place of the line typed\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff"), encoding="utf-8"))
    assert main(["chat"]) == 2
    assert "standard input is not text: " in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["chat"]) == 2
    assert capsys.readouterr() == ("", "radixrt: error: cannot read standard input: it is closed\n")
    monkeypatch.setattr(runtime, "tokenizer", None)
    assert "a conversation needs a tokenizer" in typed("a", status=2)[1]
    for option in ("--n", "--logprobs", "--prompt-logprobs"):
        with pytest.raises(SystemExit):
            main(["chat", option, "1"])


def test_a_terminal(runtime: Runtime, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C forgets the line that is being typed; what no model said is dim."""
    answers: Iterator[Any] = iter([KeyboardInterrupt(), "Mira likes?", EOFError()])

    def typing(prompt: str) -> str:
        assert prompt == "> "
        answer = next(answers)
        if isinstance(answer, BaseException):
            raise answer
        return str(answer)

    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", typing)
    assert main(["chat", "--system", FACTS, *GREEDY]) == 0
    shown = capsys.readouterr().out
    assert "\nCtrl-D ends the chat\nOslo\n\x1b[2m[0 of 23 prompt tokens cached; 2 generated]\x1b[0m\n\n" in shown
