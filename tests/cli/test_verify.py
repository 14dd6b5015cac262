"""`radixrt verify`, over the built-in model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import radixrt.verify.matrix
from radixrt.cli import main
from radixrt.config import RuntimeConfig
from radixrt.verify.questions import Question
from radixrt.verify.values import Difference, Value
from radixrt.verify.verification import Outcome, Verification

LINES = [
    {"prompt": "Mira likes Oslo.\nQ: Mira likes?\nA:"},
    {"prompt": "Mira likes Oslo.\nQ: Mira likes?\nA:", "max_tokens": 2, "logprobs": 3},
    {"prompt": "x", "temperature": -1},
    {"token_ids": [5, 6, 7]},
]
OPTIONS = ("--temperature", "0", "--device", "cpu", "--max-total-tokens", "2000", "--no-progress")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


def test_a_prompt_alone_has_the_same_bits_again(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "figures.json"
    command = ["verify", str(source), *OPTIONS, "--situation", "repeated", "--json", str(figures)]
    assert main([*command, "--max-new-tokens", "3"]) == 0
    shown = capsys.readouterr()
    assert "alone, nothing cached, again" in shown.out
    assert "  line 3: invalid_parameters: temperature is -1" in shown.err
    value = json.loads(figures.read_text())
    assert (value["same_bits"], value["prompts"], value["device"]) == (True, 3, "cpu")
    assert [situation["name"] for situation in value["situations"]] == ["repeated"]


class OpenAIRequest:
    """Takes the place of `verify_questions`."""

    def __init__(self, first: Difference | None) -> None:
        self.first = first

    def __call__(self, questions: list[Question], config: RuntimeConfig, model: Any, **more: Any) -> Verification:
        self.questions, self.config, self.more = questions, config, more
        differing = () if self.first is None else (0,)
        outcome = Outcome("together", "together", 9, differing, self.first, None, 0.5, 0, 0, 0, 1.0)
        lines = tuple(question.line for question in questions)
        return Verification(lines, (outcome,), "m", "cpu", "float32", config.deterministic)


def test_the_status_says_whether_bits_differ(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = OpenAIRequest(None)
    monkeypatch.setattr(radixrt.verify.matrix, "verify_questions", asked)
    command = ["verify", str(source), *OPTIONS, "--limit", "2", "--seeds", "5", "--deterministic"]
    assert main(command) == 0
    assert [question.line for question in asked.questions] == [0, 1]
    assert [question.params.max_new_tokens for question in asked.questions] == [128, 2]
    assert (asked.config.deterministic, asked.config.device) == (True, "cpu")
    assert asked.more == {"seeds": range(5), "only": [], "progress": False}
    capsys.readouterr()
    asked.first = Difference(1, 0, 5, 3, Value(4, -math.inf), None)
    figures = source.with_name("figures.json")
    assert main([*command, "--json", str(figures)]) == 4
    (situation,) = json.loads(figures.read_text())["situations"]
    difference = situation["first_difference"]
    assert difference["expected"] == {"token_id": 4, "logprob": None, "bits": "0xff800000"}
    assert difference["found"] is None
    shown = capsys.readouterr().out
    assert "together: line 2, token 2 of the answer" in shown
    assert "the answer has ended" in shown
    assert "unknown: it did not differ again" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.jsonl"], "cannot read nothing.jsonl: No such file or directory"),
        (["in.jsonl", "--json", "in.jsonl"], "the file of figures in.jsonl is the input; give it another name"),
        (["in.jsonl", "--limit", "0"], "limit is 0; it must be"),
        (["in.jsonl", "--seeds", "0"], "seeds is 0; it must be"),
        (["in.jsonl", "--situation", "cold"], "there is no situation 'cold' here; there are repeated, warm"),
        (
            ["in.jsonl", "--force-miss", "--no-prefix-cache"],
            "force_miss is True and enable_prefix_cache is False: ",
        ),
        (["empty.jsonl"], "empty.jsonl holds no prompts: there is nothing to verify"),
        (["bad.jsonl"], "bad.jsonl holds no prompt that can run: there is nothing to verify"),
    ],
)
def test_mistakes_are_named(
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(radixrt.verify.matrix, "assemble", lambda *_: pytest.fail("the weights are loaded"))
    monkeypatch.chdir(source.parent)
    Path("empty.jsonl").touch()
    Path("bad.jsonl").write_text("{\n")
    assert main(["verify", *arguments, *OPTIONS]) == 2
    assert f"radixrt: error: {message}" in capsys.readouterr().err
