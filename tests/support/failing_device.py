"""The command `radixrt` with passes that fail, as a program: KIND NUMBER and the command's arguments.

lost NUMBER      the device is lost in the pass of that number, from 0, and in all after it: on a GPU by a kernel
                 that reads out of bounds, on a CPU because it is said to be
memory NUMBER    passes of more than so many requests run out of memory: on a GPU they take all there is
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from radixrt.cli import main
from radixrt.errors import DeviceLostError
from radixrt.execution.model_runner import ModelRunner
from radixrt.schedule.passes import Pass

_PIECE = 2**30  # bytes


def break_device(runner: ModelRunner) -> None:
    """Launch what no device survives. Its error shows in a call that comes after."""
    if runner.device.type == "cuda":
        few = torch.zeros(4, device=runner.device)
        few[torch.full((4,), 10**6, device=runner.device)].add_(1)
        return

    ModelRunner.check_device = say_lost  # type: ignore[method-assign, assignment]
    raise RuntimeError("said to be lost")


def say_lost(runner: ModelRunner, error: Exception) -> None:
    """In place of `ModelRunner.check_device`."""
    raise DeviceLostError("the device works no more") from error


def take_all_memory(runner: ModelRunner) -> None:
    """Take memory until there is none; the exception holds on to it."""
    taken = []
    if runner.device.type != "cuda":
        raise torch.OutOfMemoryError("said to be full")
    while True:
        taken.append(torch.empty(_PIECE, dtype=torch.uint8, device=runner.device))


def spoiled(kind: str, number: int) -> Callable[[ModelRunner, Pass], Any]:
    """What to put in place of `ModelRunner.launch`. Passes that measure memory write to no slot but 0, and are
    spared.
    """
    launch = ModelRunner.launch
    passes = 0

    def launched(runner: ModelRunner, pass_: Pass) -> Any:
        nonlocal passes
        if pass_.out_cache_loc.any():
            if kind == "lost" and passes == number:
                break_device(runner)
            if kind == "memory" and pass_.num_rows > number:
                take_all_memory(runner)
            passes += 1
        return launch(runner, pass_)

    return launched


if __name__ == "__main__":
    ModelRunner.launch = spoiled(sys.argv[1], int(sys.argv[2]))  # type: ignore[method-assign, assignment]
    sys.exit(main(sys.argv[3:]))
