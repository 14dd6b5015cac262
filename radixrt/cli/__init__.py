"""The command `radixrt`. Torch is imported only when a model is loaded, so that help answers at once."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from radixrt.bench.command import add_bench_command
from radixrt.cli.batch import add_batch_command
from radixrt.cli.chat import add_chat_command
from radixrt.cli.exit_status import PIPE_CLOSED, exit_status, interrupt_status
from radixrt.cli.generate import add_generate_command
from radixrt.cli.models import add_models_command
from radixrt.cli.plan import add_plan_command
from radixrt.engine.signals import sigterm_raises
from radixrt.errors import RadixrtError
from radixrt.version import __version__

_EXAMPLES = """\
examples, with the small built-in model (--model FOLDER_OR_ID loads another one):
  radixrt generate $'Mira likes Oslo.\\nQ: Mira likes?\\nA:' --temperature 0
  radixrt chat --system 'Mira likes Oslo. Tarek counts 374.' --temperature 0
  radixrt batch --input questions.jsonl --output answers.jsonl

`radixrt COMMAND --help` describes each command.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv` (sys.argv without the program's name if None); returns the exit status."""
    with sigterm_raises():
        return _main(argv)


def _main(argv: Sequence[str] | None) -> int:
    try:
        arguments = _parser().parse_args(argv)
        if getattr(arguments, "verbose", False):
            _log_to_stderr()
        status = int(arguments.run(arguments))
        sys.stdout.flush()  # here a closed pipe is caught below
        return status
    except RadixrtError as error:
        print(f"radixrt: error: {error}", file=sys.stderr)
        return exit_status(error)
    except KeyboardInterrupt as error:
        print(f"radixrt: {str(error) or 'interrupted'}", file=sys.stderr)
        return interrupt_status(error)
    except BrokenPipeError:  # such as `| head`: no mistake
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the interpreter's own last flush
        return PIPE_CLOSED


def _log_to_stderr() -> None:
    """Show what the package logs: what starting up takes, for instance."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("radixrt: %(message)s"))
    log = logging.getLogger("radixrt")
    log.handlers = [handler]
    log.setLevel(logging.INFO)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="radixrt",
        description="Text generation for prompts that share prefixes: every distinct prefix is computed once.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"radixrt {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    add_generate_command(commands)
    add_chat_command(commands)
    add_batch_command(commands)
    add_plan_command(commands)
    add_bench_command(commands)
    add_models_command(commands)
    return parser
