"""Answer examples/questions.jsonl with the built-in model and report; `make demo` runs this.

python scripts/demo.py
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from radixrt.batch.job import run_batch
from radixrt.report.batch_report import print_report
from radixrt.runtime import Runtime

HERE = Path(os.path.relpath(Path(__file__).resolve().parent.parent))
MIN_EXACT = 0.95
"""Share of the answers that must equal the expected one as strings."""

MAX_LOST_HITS = 0.01
"""Maximum distance of the hit rate from the best possible one."""

SHOWN = 5
"""Answers to print."""


def run_demo(questions: Path, answers: Path) -> int:
    """Answer `questions` (batch input whose metadata holds the expected `answer`) into `answers`, overwritten.

    Prints a short report. Returns the exit status: 0, or 1 if fewer than MIN_EXACT of the answers are
    exact or the hit rate is more than MAX_LOST_HITS below the best possible one.
    """
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"answering {questions} with the built-in model")
    answers.parent.mkdir(parents=True, exist_ok=True)
    with Runtime() as runtime:
        report = run_batch(runtime, questions, answers, overwrite=True, progress=True)
    asked, answered = _read(questions), _read(answers)
    exact = sum(map(_is_exact, answered)) / max(1, len(answered))
    print_report(report, console, exact_answers=f"{exact:.1%}", output=str(answers))
    console.print("\nthe first answers:")
    for line, record in zip(asked[:SHOWN], answered, strict=False):
        question = line["prompt"].splitlines()[-2]
        console.print(f"  {question}  A:{record['text']}  (expected {record['metadata']['answer']})", markup=False)

    failures = []
    if exact < MIN_EXACT:
        failures.append(f"{exact:.1%} exact answers; at least {MIN_EXACT:.0%} are wanted")
    lost = (report.best_hit_rate or 0.0) - report.run.hit_rate
    if lost > MAX_LOST_HITS:
        failures.append(f"the hit rate is {lost:.2%} below the best possible one")
    for failure in failures:
        console.print(f"demo failed: {failure}")
    return 1 if failures else 0


def _is_exact(record: dict[str, Any]) -> bool:
    return record["text"] is not None and record["text"].strip() == record["metadata"]["answer"]


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]


if __name__ == "__main__":
    argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0]).parse_args()
    sys.exit(run_demo(HERE / "examples" / "questions.jsonl", HERE / "out" / "answers.jsonl"))
