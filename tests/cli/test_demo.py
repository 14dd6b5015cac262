"""The demo, as `make demo` and CI run it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.demo import run_demo

pytestmark = pytest.mark.whole_gpu  # a Runtime with all defaults takes what is free

HOME = Path(__file__).resolve().parents[2]


def test_demo() -> None:
    result = subprocess.run(
        [sys.executable, str(HOME / "scripts" / "demo.py")], cwd=HOME, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
    questions = (HOME / "examples" / "questions.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in (HOME / "out" / "answers.jsonl").read_text().split("\n")[:-1]]
    assert len(records) == len(questions) >= 200
    assert not any(record["error"] for record in records)
    assert all(
        record["usage"]["cached_tokens"] + record["usage"]["computed_tokens"] == record["usage"]["prompt_tokens"]
        for record in records
    )
    exact = sum(record["text"].strip() == record["metadata"]["answer"] for record in records) / len(records)
    assert exact >= 0.95
    assert re.search(rf"exact answers +{100 * exact:.1f}%", result.stdout)
    found = re.search(r"hit rate +([\d.]+)% \(best possible ([\d.]+)%, predicted ([\d.]+)%\)", result.stdout)
    assert found
    assert float(found[1]) >= float(found[2]) - 1
    assert abs(float(found[1]) - float(found[3])) <= 1
    assert f"{len(questions)}/{len(questions)}" in result.stderr  # the bar
    shown = re.search(r"```\n(answering .*?)```", (HOME / "README.md").read_text("utf-8"), flags=re.DOTALL)
    assert shown
    assert _without_chance(result.stdout) == _without_chance(shown[1])


def _without_chance(printed: str) -> str:
    """Without times, and the one token more or less that the size of passes makes."""
    return re.sub(r"(?m)^(time|cached tokens) .*$", r"\1", printed)


def test_a_model_that_guesses_fails_the_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The checks of the demo can fail: expected answers that nobody could know."""
    lines = (HOME / "examples" / "questions.jsonl").read_text().splitlines()[:4]
    questions = tmp_path / "questions.jsonl"
    questions.write_text(
        "".join(json.dumps({**json.loads(line), "metadata": {"answer": "unknown"}}) + "\n" for line in lines)
    )
    assert run_demo(questions, tmp_path / "out" / "answers.jsonl") == 1
    assert "demo failed: 0.0% exact answers" in capsys.readouterr().out
