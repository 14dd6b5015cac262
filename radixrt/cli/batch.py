"""`radixrt batch`: a file of prompts to a file of records."""

# Tests: tests/cli/test_cli.py

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from radixrt.cli.exit_status import ALL_FAILED, DONE
from radixrt.cli.kept_cache import check_replicas, checked_config, group_of, runtime_places, runtime_with_cache
from radixrt.cli.options import (
    SAMPLING,
    add_command,
    add_line_option,
    add_options,
    add_runtime_options,
    chat_max_tokens,
    runtime_options,
    sampling_params,
)
from radixrt.engine.signals import DRAIN_SECONDS
from radixrt.errors import BatchFileError, ParameterError
from radixrt.limits import HANG_SECONDS

if TYPE_CHECKING:
    from radixrt.report.batch_report import BatchReport
    from radixrt.sampling_params import SamplingParams

_EXAMPLE = """\
example:
  $ cat questions.jsonl
  {"prompt": "Mira likes Oslo.\\nQ: Mira likes?\\nA:", "custom_id": "a", "sampling_params": {"max_new_tokens": 8}}
  {"token_ids": [5, 8, 13], "metadata": {"source": "page 7"}}
  {"prompt": "Tarek counts 374.\\nQ: Tarek counts?\\nA:", "max_tokens": 16}

  $ radixrt batch --model FOLDER_OR_ID --input questions.jsonl --output answers.jsonl --temperature 0
  $ zcat more.jsonl.gz | radixrt batch --input - --output answers.jsonl.zst

A model with a chat template also takes "messages" in place of "prompt": [{"role": "user", "content": "..."}].

Each line becomes one record in answers.jsonl, in the same order: custom_id, index (the line's place in the input,
from 0), text, token_ids, finish_reason, usage, timings, metadata and error; with n above 1 outputs, and
log-probabilities if asked for. All lines are checked before the weights are loaded. Bad lines are printed with
their numbers and become records with an error; the others run.

Finished records are kept in the folder answers.jsonl.run until all are there. After any stop - Ctrl-C, a kill, a
full disk, a failed GPU - the same command goes on. At the first Ctrl-C, SIGTERM or SIGHUP no more requests are
begun, and started ones get --drain-seconds to finish; a second one stops after the current pass. If a pass fails,
its lines are run again in smaller groups, so that only a line that fails alone has an error.

Lines of OpenAI's Batch API (custom_id, method, url, body) become records in OpenAI's format. The input may be
compressed by gzip or zstd, or be a parquet file whose columns are the keys; the output is compressed if its name
ends in .gz or .zst. "-" is standard input or output.
Records on standard output are in input order, too, but none are kept: the same command begins anew.

--replicas N shares the lines among N cards of this machine, a process each: ranges of equal predicted work, cut
where prompts share little. A process that is lost is started again, and its lines run again; the same command may
go on with another N. With --ray they are cards of a Ray cluster, with a process on any of its hosts; the files are
read and written here, and the model's folder must have the same path on each host.

--report FILE gets the figures printed at the end and a timeline, also if the run was stopped. A page (.html) also
shows the shared prefixes.

exit status: 0 every line has its record; 1 the run failed, or more lines have errors than --max-error-rate
allows; 2 the options, the model or a file cannot be used; 3 every line has a record, and all are errors; 75 the
disk or the GPU failed; 129 stopped by SIGHUP, 130 by Ctrl-C, 143 by SIGTERM; 141 the reader of standard output has
gone (an output file is whole then). After 1, 75, 129, 130 and 143 the same command goes on, after too many errors
with a higher rate.
"""


def add_batch_command(commands: Any) -> None:
    """Add `batch` to the subparsers of `radixrt`."""
    parser = add_command(
        commands,
        "batch",
        usage="--input FILE --output FILE [options]",
        help="answer a file of prompts",
        description="Answer a file of prompts with a file of records, in the same order.",
        epilog=_EXAMPLE,
        run=_batch,
        prints=False,
    )
    option = parser.add_argument_group("files").add_argument
    option("--input", required=True, metavar="FILE", help="JSON lines or parquet, one prompt each")
    option("--output", required=True, metavar="FILE", help="one record for each line")
    option("--overwrite", action="store_true", help="replace an existing output")
    option("--restart", action="store_true", help="discard the records of an earlier run in OUTPUT.run")
    option("--strict", action="store_true", help="run nothing if a line is bad")
    option(
        "--strict-form",
        action="store_true",
        help="an answer that ended by its length before its form was complete gets an error record",
    )
    option(
        "--order",
        choices=("planned", "file"),
        default="planned",
        help="planned: prompts with a common prefix follow one another; file: in input order (planned)",
    )
    option(
        "--max-error-rate",
        type=float,
        metavar="R",
        help="stop once more than this share of all lines, 0 to 1, have error records (never stop)",
    )
    option(
        "--drain-seconds",
        type=float,
        default=DRAIN_SECONDS,
        metavar="S",
        help=f"time for started requests after the first Ctrl-C or SIGTERM ({DRAIN_SECONDS:g})",
    )
    add_line_option(option)
    option(
        "--report",
        action="append",
        default=[],
        metavar="FILE",
        help="write the figures at the end: .json, or .html for a page with plots; may be repeated",
    )
    option("--price-per-hour", type=float, metavar="X", help="of the machine, for the cost in the report")
    option(
        "--replicas",
        type=_replicas,
        default=1,
        metavar="N",
        help='cards that share the lines, a process each; "auto": all that are visible, or in the cluster (1)',
    )
    option(
        "--ray",
        nargs="?",
        const="auto",
        metavar="ADDRESS",
        help='replicas are actors of this Ray cluster, as in ray.init: "auto", one that is found here; "local", '
        "one that is started here; HOST:PORT; ray://HOST:PORT (auto). Needs pip install 'radixrt[ray]'",
    )
    option(
        "--hang-seconds",
        type=float,
        default=HANG_SECONDS,
        metavar="S",
        help=f"a replica that ends no pass for so long is started again ({HANG_SECONDS:g})",
    )
    option("--no-progress", dest="progress", action="store_false", help="no bar on stderr")
    add_options(parser, "sampling parameters of lines that give none", SAMPLING)
    add_runtime_options(parser)


def _batch(arguments: argparse.Namespace) -> int:
    from radixrt.batch.job import Batch
    from radixrt.batch.options import BatchConfig
    from radixrt.builtin import MODEL_PATH
    from radixrt.frontend.request_builder import builder_without_weights
    from radixrt.report.files import ReportError

    check_replicas(arguments)
    options, config = runtime_options(arguments), checked_config(arguments)
    own = _own_defaults(options)
    batch_options = BatchConfig(
        default_params=sampling_params(arguments, own),
        chat_max_tokens=chat_max_tokens(arguments, own),
        overwrite=arguments.overwrite,
        restart=arguments.restart,
        strict=arguments.strict,
        strict_form=arguments.strict_form,
        order=arguments.order,
        keep_cache=hasattr(arguments, "save_cache"),
        progress=arguments.progress,
        max_error_rate=arguments.max_error_rate,
        drain_seconds=arguments.drain_seconds,
        max_line_bytes=arguments.max_line_bytes,
        report=arguments.report,
        price_per_hour=arguments.price_per_hour,
    )
    with Batch(arguments.input, arguments.output, batch_options, runtime_places(arguments)) as batch:
        # Before the weights are loaded: mistakes show within seconds.
        if arguments.ray is not None:
            _connect(arguments.ray)
        told = {name: options[name] for name in ("revision", "chat_template_kwargs") if name in options}
        builder = builder_without_weights(options.get("model", MODEL_PATH), options.get("context_length"), **told)
        scanned = batch.scan(
            builder.tokenizer,
            lambda prompt, params, line: builder.build(prompt, params, index=line),
            builder.context_length,
            named=lambda summary: print(f"radixrt: {summary}", file=sys.stderr),
        )
        try:
            if scanned.needs_runtime() and (arguments.replicas != 1 or arguments.ray is not None):
                with group_of(arguments) as group:
                    report = scanned.run(group)
            elif scanned.needs_runtime() or hasattr(arguments, "save_cache"):
                with runtime_with_cache(arguments, progress=arguments.progress) as runtime:
                    report = scanned.run(runtime)
            else:
                report = scanned.finish(builder.tokenizer, config.run_seed)
        except ReportError as error:
            _tell(error.report, arguments, ())
            raise
        if scanned.failures:
            print("\n".join(["radixrt: errors of the run:", *scanned.failures]), file=sys.stderr)
    _tell(report, arguments, arguments.report)
    return ALL_FAILED if 0 < report.requests == report.errors else DONE


def _replicas(text: str) -> int | None:
    """A number, or None for "auto"."""
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f'{text!r} is neither a number nor "auto"') from None


def _connect(ray: str) -> None:
    """Connect to a Ray cluster. Raises ParameterError where there is none, and where Ray is not installed."""
    try:
        from radixrt.replicas.ray_links import connect
    except ImportError as error:
        raise ParameterError(f"--ray: {error}") from error
    connect(ray)


def _own_defaults(options: dict[str, Any]) -> SamplingParams | None:
    """The parameters that the model itself gives, if they are wanted."""
    if options.get("generation_config") != "auto":
        return None
    from radixrt.builtin import MODEL_PATH
    from radixrt.models.config import generation_defaults
    from radixrt.models.loader import model_folder

    source = options.get("model", MODEL_PATH)
    return generation_defaults(model_folder(source, weights=False, revision=options.get("revision")))


def _tell(report: BatchReport, arguments: argparse.Namespace, reports: Sequence[str]) -> None:
    """Print the figures, and the names of `reports`, files that have them too."""
    from radixrt.cli.console import Console
    from radixrt.files.standard import STANDARD, place_name
    from radixrt.report.batch_report import print_report

    file = sys.stderr if report.output_path is None else sys.stdout
    if file is None:
        return
    console = Console(highlight=False, file=file)
    source, output = place_name(arguments.input, "input"), place_name(report.output_path or STANDARD, "output")
    try:
        if report.requests:
            more = {"reports": ", ".join(reports)} if reports else {}
            print_report(report, console, output=output, **more)
        else:
            console.print(f"{source} holds no prompts: {output} is empty", markup=False, soft_wrap=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise BatchFileError(f"the figures of {output} cannot be printed: {error.strerror}") from error
