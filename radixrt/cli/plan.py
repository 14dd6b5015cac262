"""`radixrt plan`: the shared prefixes of a file of prompts, and the hits and time to expect."""

# Tests: tests/report/test_plan_view.py

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import Any

from radixrt.checks import check_int
from radixrt.cli.exit_status import DONE
from radixrt.cli.kept_cache import model_place
from radixrt.cli.options import (
    MODEL,
    SAMPLING,
    Option,
    add_command,
    add_line_option,
    add_options,
    chat_max_tokens,
    file_path,
    sampling_params,
)
from radixrt.errors import ParameterError

_EXAMPLE = """\
example:
  radixrt plan questions.jsonl --model Qwen/Qwen3-0.6B --max-new-tokens 32
  radixrt plan questions.jsonl --html plan.html
  radixrt plan questions.jsonl --replicas 4 --card h100

Nothing is run, and no weights are read: the model's tokenizer and config.json are enough. Hits and time are those
of a run in the planned order with the options given here. The time is for --card: that at its peak speed by the
engine's measured multiples of it (docs/lab-notebook/2026-11-22-five-lists.md), and 1 to 3 ms a pass. Answers are
expected to have max_new_tokens; --mean-new-tokens sets a lower expectation. With --replicas the prompts are cut
into as many ranges of equal predicted work, each where prompts share least.
"""

_CARDS = (
    "h200 (the default, measured); by published figures: b200, h100, h100-pcie, h100-nvl, a100, a100-pcie, "
    "a100-40gb, l40s, rtx-4090"
)
_OF_THE_MODEL = ("model", "revision", "chat_template_kwargs", "generation_config", "context_length")
_LIMITS = ("max_total_tokens", "max_running_requests", "chunked_prefill_size")
_OPTIONS = (
    *(option for option in MODEL if option.name in (*_OF_THE_MODEL, "quantization")),
    Option("max_total_tokens", "slots of the KV pool (as many as fit on the card)", "N", int),
    Option("max_running_requests", "maximum requests in a pass (2048, or fewer where memory is scarce)", "N", int),
    Option("chunked_prefill_size", "maximum prompt tokens in a pass (16384)", "N", int),
    Option("mean_new_tokens", "expected tokens of an answer, at most its max_new_tokens", "N", int),
)


def add_plan_command(commands: Any) -> None:
    """Add `plan` to the subparsers of `radixrt`."""
    parser = add_command(
        commands,
        "plan",
        usage="FILE [options]",
        help="show the shared prefixes of a file of prompts, and predict hits and time",
        description="Plan a file of prompts (JSON lines, as for `radixrt batch`) without running it.",
        epilog=_EXAMPLE,
        run=_plan,
    )
    option = parser.add_argument_group("files").add_argument
    option("input", metavar="FILE", help="JSON lines or parquet, one prompt each; - is standard input")
    option("--html", type=file_path, metavar="FILE", help="write the plan as a page that folds and unfolds")
    add_line_option(option)
    option("--no-progress", dest="progress", action="store_false", help="no bar on stderr")
    option("--prefixes", type=int, default=20, metavar="N", help="number of shared prefixes to show (20)")
    option("--replicas", type=int, default=1, metavar="N", help="cards that the prompts are spread over (1)")
    add_options(parser, "the run", _OPTIONS)
    card = parser.add_argument_group("the card").add_argument
    card("--card", default="h200", metavar="NAME", help=_CARDS)
    card("--bandwidth", type=float, metavar="BYTES/S", help="of another card's memory, such as 2.0e12")
    card("--flops", type=float, metavar="OPS/S", help="its dense products of the dtype, such as 250e12")
    card("--memory-gb", type=float, metavar="GB", help="its memory, in gigabytes (10^9 bytes)")
    add_options(parser, "sampling parameters of lines that give none", SAMPLING)


def _plan(arguments: argparse.Namespace) -> int:
    from radixrt.batch.formats.line_format import LineParser
    from radixrt.batch.formats.source import read_lines
    from radixrt.batch.meter import reading_bar
    from radixrt.batch.scan import scan_lines
    from radixrt.builtin import MODEL_PATH
    from radixrt.cli.console import Console
    from radixrt.config import RuntimeConfig
    from radixrt.files.disk import temporary_folder
    from radixrt.files.path_roles import check_apart, read_role
    from radixrt.files.standard import place_name
    from radixrt.files.text_file import TextFile
    from radixrt.frontend.request_builder import builder_without_weights
    from radixrt.planning.batch_plan import plan_batch
    from radixrt.planning.cards import find_card, shape_of
    from radixrt.planning.shards import pieces_of, shards
    from radixrt.report.figures import PlannedRun
    from radixrt.report.outline import decoded_by
    from radixrt.report.plan_view import plan_page, print_plan
    from radixrt.sampling_params import MAX_NEW_TOKENS

    check_int("max_line_bytes", arguments.max_line_bytes, 1, 2**40)
    check_int("replicas", arguments.replicas, 1, 1024)
    sizes = {name: getattr(arguments, name) for name in _LIMITS if hasattr(arguments, name)}
    RuntimeConfig(**sizes)  # its bounds are those of a run
    if mean_is_given := hasattr(arguments, "mean_new_tokens"):
        check_int("mean_new_tokens", arguments.mean_new_tokens, 1, MAX_NEW_TOKENS)
    if arguments.prefixes < 0:
        raise ParameterError(f"prefixes is {arguments.prefixes}; it must be at least 0")
    page = None
    if arguments.html is not None:
        page = TextFile(arguments.html, "page")
        check_apart([*read_role("the input", arguments.input), *model_place(arguments), *page.places])
    card = find_card(arguments.card, arguments.bandwidth, arguments.flops, arguments.memory_gb)
    given = {name: getattr(arguments, name) for name in _OF_THE_MODEL if hasattr(arguments, name)}
    sampling_params(arguments)  # before the model is read, so that a mistake shows at once
    builder = builder_without_weights(given.pop("model", MODEL_PATH), **given)
    defaults = sampling_params(arguments, builder.defaults)
    own = builder.config.quantization
    in_int4 = own.numbers == "4 bits"
    in_e4m3 = card.has_e4m3 and (own.numbers == "e4m3" or (not in_int4 and hasattr(arguments, "quantization")))
    shape = shape_of(builder.config, in_e4m3=in_e4m3, in_int4=in_int4)
    with temporary_folder() as folder:
        with reading_bar(arguments.input, arguments.progress) as bar:
            scan = scan_lines(
                read_lines(arguments.input, max_line=arguments.max_line_bytes, seen=bar.update),
                folder,
                parser=LineParser(defaults, chat_max_tokens=chat_max_tokens(arguments, builder.defaults)),
                tokenizer=builder.tokenizer,
                check=lambda prompt, params, line: builder.build(prompt, params, index=line),
                context_length=builder.context_length,
            )
        if scan.problems:
            print(f"radixrt: {scan.summary()}", file=sys.stderr)
        console = Console(highlight=False)
        if scan.is_bad.all():
            nothing = "no prompts" if not len(scan) else "no prompt that can run"
            console.print(f"{place_name(arguments.input, 'input')} holds {nothing}", markup=False, soft_wrap=True)
            return DONE
        limits = card.limits(shape, builder.context_length, **sizes)
        demands = scan.demands(limits.pool_tokens)
        if mean_is_given:
            demands = replace(demands, new_tokens=demands.new_tokens.clip(max=arguments.mean_new_tokens))
        plan = plan_batch(scan.tokens, demands)
        if plan.longest_request > limits.pool_tokens:
            raise ParameterError(
                f"the longest request needs {plan.longest_request:,} tokens, but the pool holds "
                f"{limits.pool_tokens:,}: raise --max-total-tokens"
                + (", or lower --max-running-requests, which all have states" if limits.num_states else "")
            )
        expectation = plan.expect(limits, shape, card.speed)
        ranges = None
        if arguments.replicas > 1:
            pieces = pieces_of(plan, arguments.replicas, limits, shape, card.speed)
            ranges = shards(pieces, arguments.replicas)
        run = PlannedRun(plan, expectation, shape, card.title, mean_is_given, ranges)
        show = decoded_by(builder.tokenizer)
        print_plan(run, console, show=show, max_prefixes=arguments.prefixes)
        if page is not None:
            page.write(plan_page(run, title=place_name(arguments.input, "input"), show=show))
    return DONE
