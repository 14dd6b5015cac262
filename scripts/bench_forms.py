"""What a form costs: a list of answers to JSON schemas beside one of the same lengths without them.

python scripts/bench_forms.py --config qwen3-0.6b --schemas 1 --schemas 512

512 questions about four documents, random weights. Each run with schemas is followed by one without whose answers
end where its own did. The list with schemas runs twice more: what forms force is always extended over, and always
drawn token by token; otherwise that depends on how many answers run.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any

from radixrt.bench.catalogue import SHAPES
from radixrt.bench.report import figure_table, wide_console
from radixrt.bench.subject import model_of, usual_tokenizer
from radixrt.engine.engine import Engine
from radixrt.runtime import Runtime
from radixrt.sampling_params import SamplingParams
from radixrt.workloads.lists import WorkloadPrompt, docqa

PROMPT_VOCABULARY = 1600  # ids of prompts: each tokenizer and shape has as many
MOST_TOKENS = 400  # of an answer; those of the schemas end before
COLUMNS = (
    "shape",
    "requests",
    "schemas",
    "with, s",
    "without, s",
    "with / without",
    "passes with",
    "passes without",
    "extended, s",
    "passes",
    "drawn, s",
    "passes",
    "masks late",
)


def schema(number: int) -> dict[str, Any]:
    """A record of six properties, whose names depend on the number."""
    text = {"type": "string", "maxLength": 24}
    properties: dict[str, Any] = {
        f"name_{number}": text,
        f"summary_{number}": text,
        f"category_{number}": {"enum": ["red", "green", "blue", "none of these"]},
        f"count_{number}": {"type": "integer", "minimum": 0, "maximum": 9999},
        f"certain_{number}": {"type": "boolean"},
        f"tags_{number}": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "minItems": 1, "maxItems": 3},
    }
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


@dataclass(frozen=True)
class Run:
    """A call over the list.

    Attributes:
        seconds: of the call.
        lengths: tokens of each answer.
        passes, masked, late: all passes, those with masks, and those of them that a GPU waited for.
    """

    seconds: float
    lengths: list[int]
    passes: int
    masked: int
    late: int


def run(runtime: Runtime, prompts: Sequence[WorkloadPrompt], params: Sequence[SamplingParams]) -> Run:
    """Answer the list, from an empty cache."""
    runtime.flush_cache()
    before, given = runtime.activity(), [prompt.prompt_ids for prompt in prompts]
    began = time.perf_counter()
    outputs = runtime.generate(given, list(params))
    seconds = time.perf_counter() - began
    assert isinstance(outputs, list)
    done = runtime.activity() - before
    lengths = [len(output.token_ids) for output in outputs]
    return Run(seconds, lengths, done.passes, done.masked_passes, done.late_masks)


def measure(
    runtime: Runtime, prompts: Sequence[WorkloadPrompt], num_schemas: int, repeat: int
) -> dict[str, list[Run]]:
    """Runs with schemas, without, and with schemas but forced tokens extended over, or drawn; in turn."""
    texts = [json.dumps(schema(number)) for number in range(num_schemas)]
    formed = [
        SamplingParams(json_schema=texts[place % num_schemas], temperature=0.8, max_new_tokens=MOST_TOKENS)
        for place in range(len(prompts))
    ]
    run(runtime, prompts, formed)
    found: dict[str, list[Run]] = {"with": [], "without": [], "extended": [], "drawn": []}
    for turn in range(repeat + 1):
        found["with"].append(run(runtime, prompts, formed))
        free = [
            SamplingParams(temperature=0.8, max_new_tokens=count, ignore_eos=True)
            for count in found["with"][-1].lengths
        ]
        found["without"].append(run(runtime, prompts, free))
        for name, most in (("extended", len(prompts)), ("drawn", 0)):
            with extended_over(most):
                found[name].append(run(runtime, prompts, formed))
        if not turn:  # it warmed up
            for runs in found.values():
                runs.clear()
    return found


@contextmanager
def extended_over(most: int) -> Iterator[None]:
    """What forms force, in passes with up to so many masked draws."""
    usual, Engine.max_forced_rows = Engine.max_forced_rows, most
    try:
        yield
    finally:
        Engine.max_forced_rows = usual


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", action="append", choices=SHAPES, help="a shape; may be repeated (qwen3-0.6b)")
    parser.add_argument("--requests", type=int, action="append", metavar="N", help="multiples of 4 (512)")
    parser.add_argument("--schemas", type=int, action="append", metavar="N", help="different ones (1, 512)")
    parser.add_argument("--document-len", type=int, default=2048, metavar="TOKENS", help="of a document (2048)")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="times are medians (3)")
    parser.add_argument(
        "--tokenizer",
        metavar="FOLDER_OR_ID",
        help="of a model; masks take longer with more tokens (SmolLM2, or else the built-in model)",
    )
    parser.add_argument("--device", help="such as cpu or cuda:1")
    given = parser.parse_args(argv)
    if any(count < 4 or count % 4 for count in given.requests or ()):
        parser.error("--requests is not a multiple of 4")
    if min(given.schemas or [1]) < 1 or given.repeat < 1:
        parser.error("--schemas and --repeat are at least 1")
    lists = [
        docqa(questions=count // 4, document_len=given.document_len, vocab_size=PROMPT_VOCABULARY)
        for count in given.requests or (512,)
    ]
    table = figure_table("Answers to JSON schemas, beside as many of the same lengths without", *COLUMNS)
    for config in given.config or ("qwen3-0.6b",):
        tokenizer = given.tokenizer or usual_tokenizer(config)
        with (
            model_of(None, config, tokenizer) as (folder, _),
            Runtime(folder, load_format="dummy", device=given.device) as runtime,
        ):
            for prompts, num_schemas in product(lists, given.schemas or (1, 512)):
                found = measure(runtime, prompts, num_schemas, given.repeat)
                seconds = {name: median(one.seconds for one in runs) for name, runs in found.items()}
                last = {name: runs[-1] for name, runs in found.items()}
                pairs = zip(found["with"], found["without"], strict=True)
                ratio = median(one.seconds / other.seconds for one, other in pairs)
                table.add_row(
                    config,
                    str(len(prompts)),
                    str(num_schemas),
                    f"{seconds['with']:.2f}",
                    f"{seconds['without']:.2f}",
                    f"{ratio:.3f}",
                    str(last["with"].passes),
                    str(last["without"].passes),
                    f"{seconds['extended']:.2f}",
                    str(last["extended"].passes),
                    f"{seconds['drawn']:.2f}",
                    str(last["drawn"].passes),
                    f"{last['with'].late} of {last['with'].masked}",
                )
    wide_console(140).print(table)


if __name__ == "__main__":
    main()
