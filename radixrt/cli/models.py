"""`radixrt models`: the architectures that can be loaded."""

# Tests: tests/cli/test_cli.py

from __future__ import annotations

import argparse
from typing import Any

from radixrt.cli.exit_status import DONE
from radixrt.cli.options import add_command
from radixrt.models.families import FAMILIES

_LIMITS = (
    "A model takes 2 bytes a parameter in bf16, 1 in fp8, 0.5 in 4 bits, and KV beside that.",
    "It fits on one GPU, or --tp and --pp divide it among several (docs/ranks.md).",
)

_EXAMPLE = f"""\
example:
  radixrt models
  radixrt generate 'Once upon a time' --model Qwen/Qwen3-0.6B

A model is a folder or a hub id in Hugging Face format, whose config.json names the architecture, or a GGUF file:
--model model.gguf, or --model smollm2 (docs/models.md).
{_LIMITS[0]}
{_LIMITS[1]}
"""


def add_models_command(commands: Any) -> None:
    """Add `models` to the subparsers of `radixrt`."""
    add_command(
        commands,
        "models",
        usage="[--help]",
        help="list the architectures that can be loaded",
        description="List the architectures that can be loaded, with example checkpoints.",
        epilog=_EXAMPLE,
        run=_models,
    )


def _models(arguments: argparse.Namespace) -> int:
    from rich import box
    from rich.table import Table

    from radixrt.cli.console import Console

    table = Table("architecture", "family", "for example", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, family in FAMILIES.items():
        table.add_row(name, family.name, family.checkpoints)
    console = Console(highlight=False)
    console.print(table)
    console.print(*_LIMITS)
    return DONE
