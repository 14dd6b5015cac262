"""`radixrt verify`: whether prompts get the same bits whatever is cached, chunked and batched."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from typing import TYPE_CHECKING, Any

from radixrt.checks import check_int
from radixrt.cli.exit_status import DIFFERENT, DONE
from radixrt.cli.kept_cache import checked_config, model_place
from radixrt.cli.options import (
    MODEL,
    SAMPLING,
    SCHEDULE,
    add_command,
    add_line_option,
    add_options,
    chat_max_tokens,
    file_path,
    runtime_options,
    sampling_params,
)
from radixrt.errors import ParameterError

if TYPE_CHECKING:
    from radixrt.models.config import ModelConfig
    from radixrt.verify.questions import Question

_EXAMPLE = """\
example:
  radixrt verify questions.jsonl --model Qwen/Qwen3-0.6B --deterministic --max-new-tokens 64 --limit 20

Each prompt is asked alone with nothing cached; then in many situations: with all of it cached, or a beginning that
is cut at random, all at once, in other orders, with more answers, beside aborted requests, retracted and forgotten
at random, from a saved cache, in small chunks, few at once, in a small pool, with a host tier, without a cache.
Token ids and log-probabilities of answers and of prompts are compared as bits. Where some differ, the situation is
made once more with a watch on the model's layers, to name the first one that computes other bits.

Several runtimes are made one after the other, which share their weights; a cache goes to a temporary folder once.
Lines that ask for log-probabilities get one for each token, as verify compares them.

exit status: 0 the same bits everywhere; 1 a pass failed; 2 the options, the model or a file cannot be used, or no
prompt can run; 4 some bits differ; 75 the GPU or the disk failed; 129 stopped by SIGHUP, 130 by Ctrl-C, 143 by
SIGTERM; 141 the reader of standard output has gone.
"""


def add_verify_command(commands: Any) -> None:
    """Add `verify` to the subparsers of `radixrt`."""
    parser = add_command(
        commands,
        "verify",
        usage="FILE [options]",
        help="compare the bits of answers, whatever is cached and whatever runs beside",
        description="Ask a file of prompts (JSON lines, as for `radixrt batch`) in many situations, compare bits.",
        epilog=_EXAMPLE,
        run=_verify,
    )
    option = parser.add_argument_group("files").add_argument
    option("input", metavar="FILE", help="JSON lines or parquet, one prompt each; - is standard input")
    option("--json", type=file_path, metavar="FILE", help="write the figures")
    option("--limit", type=int, metavar="N", help="take the first N lines only (all)")
    add_line_option(option)
    option("--no-progress", dest="progress", action="store_false", help="no bar on stderr")
    option = parser.add_argument_group("situations").add_argument
    option("--seeds", type=int, default=3, metavar="N", help="orders, cuts and disturbances at random (3)")
    option(
        "--situation",
        action="append",
        default=[],
        metavar="NAME",
        help="only this one, such as together or chunks-64; may be repeated (all)",
    )
    add_options(parser, "sampling parameters of lines that give none", SAMPLING)
    add_options(parser, "model", [option for option in MODEL if not option.name.endswith("parallel_size")])
    add_options(parser, "memory and schedule", SCHEDULE)
    parser.add_argument("--verbose", action="store_true", help="tell on stderr what starting up takes")


def _verify(arguments: argparse.Namespace) -> int:
    from radixrt.cli.console import Console
    from radixrt.files.path_roles import check_apart, read_role
    from radixrt.files.text_file import TextFile
    from radixrt.verify.matrix import verify_questions

    check_int("max_line_bytes", arguments.max_line_bytes, 1, 2**40)
    check_int("seeds", arguments.seeds, 1, 1000)
    if arguments.limit is not None:
        check_int("limit", arguments.limit, 1, 2**40)
    figures = None
    if arguments.json is not None:
        figures = TextFile(arguments.json, "file of figures")
        check_apart([*read_role("the input", arguments.input), *model_place(arguments), *figures.places])
    sampling_params(arguments)  # before the model is read, so that a mistake shows at once
    config = checked_config(arguments)
    questions, model = _questions(arguments)
    found = verify_questions(
        questions,
        config,
        model,
        seeds=range(arguments.seeds),
        only=arguments.situation,
        progress=arguments.progress,
    )
    if figures is not None:  # first: the reader of standard output may have gone
        figures.write(json.dumps(found.to_json(), indent=1, allow_nan=False) + "\n")
    found.print(Console(highlight=False))
    return DONE if found.same_bits else DIFFERENT


def _questions(arguments: argparse.Namespace) -> tuple[list[Question], ModelConfig]:
    """The prompts of the input that can run, and the model; bad ones are named on stderr. Raises ParameterError if
    none can run.
    """
    from radixrt.batch.formats.line_format import LineParser
    from radixrt.batch.formats.source import read_lines
    from radixrt.batch.known_lines import SoundLine
    from radixrt.batch.meter import reading_bar
    from radixrt.batch.scan import scan_lines
    from radixrt.builtin import MODEL_PATH
    from radixrt.files.disk import temporary_folder
    from radixrt.files.standard import place_name
    from radixrt.frontend.request_builder import builder_without_weights
    from radixrt.verify.questions import Question

    options = runtime_options(arguments)
    names = ("context_length", "revision", "chat_template_kwargs", "generation_config")
    told = {name: options[name] for name in names if name in options}
    builder = builder_without_weights(options.get("model", MODEL_PATH), **told)
    with temporary_folder() as folder:
        with reading_bar(arguments.input, arguments.progress) as bar:
            lines = read_lines(arguments.input, max_line=arguments.max_line_bytes, seen=bar.update)
            scan = scan_lines(
                itertools.islice(lines, arguments.limit),
                folder,
                parser=LineParser(
                    sampling_params(arguments, builder.defaults),
                    chat_max_tokens=chat_max_tokens(arguments, builder.defaults),
                ),
                tokenizer=builder.tokenizer,
                check=lambda prompt, params, line: builder.build(prompt, params, index=line),
                context_length=builder.context_length,
            )
        if scan.problems:
            print(f"radixrt: {scan.summary()}", file=sys.stderr)
        questions = [
            Question(int(scan.lines[place]), scan.tokens[place].copy(), line.sampling_params)
            for place, line in enumerate(scan.read(range(len(scan))))
            if isinstance(line, SoundLine)
        ]
    if not questions:
        nothing = "no prompts" if not len(scan) else "no prompt that can run"
        raise ParameterError(f"{place_name(arguments.input, 'input')} holds {nothing}: there is nothing to verify")
    return questions, builder.config
