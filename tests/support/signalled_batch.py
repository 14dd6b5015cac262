"""`radixrt batch` over a runtime without a model, slowly in the phase in which a signal is to come.

As a program it takes the phase ("reading", "running" or "writing") and the command's arguments, and prints the
phase when it is reached. Its exit status is the command's.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import radixrt
import radixrt.batch.job
from radixrt.batch.journal.run_folder import Encoding, RunFolder
from radixrt.cli import main
from radixrt.output import RequestOutput
from radixrt.schedule.request import Request
from tests.support.fake_runtime import CONTEXT_LENGTH, FakeRuntime

BEGUN = 5  # requests that a SlowRuntime has begun, while it has so many
STEP_SECONDS = 0.1


class Builder:
    """Takes what a FakeRuntime takes."""

    tokenizer, context_length = None, CONTEXT_LENGTH
    build = staticmethod(FakeRuntime().prepare)

    def __init__(self, *args: Any) -> None:
        pass


class SlowBuilder(Builder):
    """Tells when it is asked for the first time."""

    told = False

    @staticmethod
    def build(*args: Any, **options: Any) -> Request:
        if not SlowBuilder.told:
            print("reading", flush=True)
        SlowBuilder.told = True
        time.sleep(0.02)
        return FakeRuntime().prepare(*args, **options)


class SlowRuntime(FakeRuntime):
    """Tells when it has ended a few requests, and is slow from then on."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__()
        self._steps = 0

    def step(self) -> list[RequestOutput]:
        self.begun = self.running[:BEGUN]
        self._steps += 1
        if self._steps == 3:
            print("running", flush=True)
        if self._steps >= 3:
            time.sleep(STEP_SECONDS)
        return super().step()


class SlowFolder(RunFolder):
    """Tells when the output is made, and takes its time for that."""

    def finish(self, encode: Encoding = iter) -> None:
        def slowly(chunks: Iterator[bytes]) -> Iterator[bytes]:
            print("writing", flush=True)
            for chunk in encode(chunks):
                time.sleep(1.0)
                yield chunk

        super().finish(slowly)


def stand_in(runtime: type[FakeRuntime], builder: type[Builder]) -> Iterator[tuple[dict[str, Any], str, object]]:
    """What to put where, so that the command makes these in place of a Runtime and of what checks lines: a dict, a
    key and a value each. Nothing of it imports torch.
    """
    yield vars(radixrt), "Runtime", runtime
    module = ModuleType("radixrt.frontend.request_builder")
    module.builder_without_weights = builder  # type: ignore[attr-defined]
    yield sys.modules, module.__name__, module
    checks = ModuleType("radixrt.ranks.rank")
    checks.check_config = lambda config: None  # type: ignore[attr-defined]
    yield sys.modules, checks.__name__, checks


class AnyRuntime(FakeRuntime):
    """With the arguments of a Runtime."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__()


if __name__ == "__main__":
    phase = sys.argv[1]
    runtime = SlowRuntime if phase == "running" else AnyRuntime
    for names, name, value in stand_in(runtime, SlowBuilder if phase == "reading" else Builder):
        names[name] = value
    if phase == "writing":
        radixrt.batch.job.RunFolder = SlowFolder  # type: ignore[attr-defined]
    status = main(sys.argv[2:])
    assert "torch" not in sys.modules
    sys.exit(status)
