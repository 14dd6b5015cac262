"""What number formats cost in quality: perplexity of the demo's documents, and greedy answers to its questions.

python -m scripts.bench_quality [--model smollm2] [dtype=float32 dtype=bfloat16 dtype=float32,kv_dtype=fp8 ...]

A setting is a list of options of `Runtime`; all are compared with the first.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import fmean
from typing import Any

from radixrt import Runtime, SamplingParams
from radixrt.bench.report import figure_table, wide_console
from radixrt.output import RequestOutput, TokenLogprob
from radixrt.text.chat import Chat
from scripts.demo_llm import QUESTIONS, documents_of, prompt, read

SETTINGS = ("dtype=float32", "dtype=bfloat16", "dtype=float32,kv_dtype=fp8", "dtype=bfloat16,kv_dtype=fp8")
COLUMNS = ("perplexity", "off by", "same next token", "same answers", "same tokens")


@dataclass(frozen=True)
class Measured:
    """What a model says under a setting.

    Attributes:
        tokens: of the documents, but the first of each: as the model scores them, with its likeliest token.
        answers: token ids, drawn greedily.
    """

    tokens: tuple[TokenLogprob, ...]
    answers: tuple[tuple[int, ...], ...]

    @property
    def perplexity(self) -> float:
        """Of all documents, each read from its first token on."""
        return math.exp(-fmean(token.logprob for token in self.tokens))

    def compared(self, other: Measured) -> tuple[str, ...]:
        """Beside another setting, for a row: the mean distance of the log-probabilities of the documents' tokens;
        how often the likeliest next token is the same; how many answers are equal; and the share of the other's
        tokens before the first one that differs.
        """
        pairs = list(zip(self.tokens, other.tokens, strict=True))
        answers = list(zip(self.answers, other.answers, strict=True))
        same = sum(map(_common, *zip(*answers, strict=True)))
        return (
            f"{fmean(abs(own.logprob - its.logprob) for own, its in pairs):.4f}",
            f"{fmean(own.top[0][0] == its.top[0][0] for own, its in pairs):.2%}",
            f"{sum(own == its for own, its in answers)} of {len(answers)}",
            f"{same / max(1, sum(len(its) for _, its in answers)):.1%}",
        )


def measured(model: str, options: dict[str, Any], questions: Sequence[dict[str, str]], most: int) -> Measured:
    """Run a model under a setting: the documents, and questions about them, with at most so many tokens each."""
    documents = documents_of(questions)
    asked = [prompt(documents[each["document"]], each["question"]) for each in questions]
    with Runtime(model, **options) as runtime:
        scored = runtime.generate(
            list(documents.values()), SamplingParams(max_new_tokens=0, prompt_logprobs=1), progress=True
        )
        answers = runtime.generate(
            [Chat([{"role": "user", "content": text}]) for text in asked],
            SamplingParams(temperature=0, max_new_tokens=most),
            progress=True,
        )
    return Measured(
        tuple(token for output in _listed(scored) for token in output.prompt_logprobs or ()),
        tuple(output.token_ids for output in _listed(answers)),
    )


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two answers have in common, from the first one on."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _listed(outputs: RequestOutput | list[RequestOutput]) -> list[RequestOutput]:
    assert isinstance(outputs, list)
    return outputs


def options_of(setting: str) -> dict[str, str]:
    """Options of `dtype=float32,kv_dtype=fp8`."""
    pairs = [pair.partition("=") for pair in setting.split(",")]
    if not all(name and equals and value for name, equals, value in pairs):
        raise SystemExit(f"a setting is a list of options as in dtype=bfloat16,kv_dtype=fp8, not {setting!r}")
    return {name: value for name, _, value in pairs}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "settings", nargs="*", default=SETTINGS, help="options of Runtime; the first is the reference"
    )
    parser.add_argument("--model", default="smollm2", metavar="FOLDER_OR_ID", help="a chat model (smollm2)")
    parser.add_argument("--max-new-tokens", type=int, default=40, help="of an answer (40)")
    parser.add_argument("--questions", type=int, default=None, help="so many of the questions (all)")
    arguments = parser.parse_args(argv)
    settings = {setting: options_of(setting) for setting in arguments.settings}
    questions = read(QUESTIONS)[: arguments.questions]
    table = figure_table(f"{arguments.model}, {len(questions)} questions", "setting", *COLUMNS)
    first: Measured | None = None
    for setting, options in settings.items():
        found = measured(arguments.model, options, questions, arguments.max_new_tokens)
        first = found if first is None else first
        table.add_row(setting, f"{found.perplexity:.3f}", *found.compared(first))
    wide_console(110).print(table)


if __name__ == "__main__":
    main()
