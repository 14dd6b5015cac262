"""Text generation for prompts that share prefixes: every distinct prefix is computed once.

    from radixrt import Runtime, SamplingParams

    with Runtime() as runtime:
        output = runtime.generate("Mira likes Oslo.\\nQ: Mira likes?\\nA:", SamplingParams(temperature=0))
        print(output.text)

The names below are imported on first use, so that `import radixrt` does not import torch. It sets
OMP_WAIT_POLICY to PASSIVE, unless the environment has one: OpenMP reads it when torch is loaded.
"""

# Tests: tests/test_origin.py

from __future__ import annotations

# isort: off
from radixrt import ctrl_c  # noqa: F401  # before the other imports, which Ctrl-C could cut short
# isort: on

import importlib
import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING

from radixrt.version import __version__

# Idle OpenMP threads that spin slow other processes on the same processors down many times over.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_HOMES = {
    "Runtime": "radixrt.runtime",
    "Activity": "radixrt.schedule.activity",
    "BatchInterrupted": "radixrt.batch.job",
    "BatchReport": "radixrt.report.batch_report",
    "CacheStats": "radixrt.cache.prefix_cache",
    "RunLimits": "radixrt.limits",
    "Conversation": "radixrt.conversation",
    "CompletionOutput": "radixrt.output",
    "ScoreOutput": "radixrt.output",
    "StreamChunk": "radixrt.output",
    "TokenLogprob": "radixrt.output",
    "SamplingParams": "radixrt.sampling_params",
    "FinishReason": "radixrt.output",
    "RequestOutput": "radixrt.output",
    "Timings": "radixrt.output",
    "Usage": "radixrt.output",
}

__all__ = [
    "Activity",
    "BatchFileError",
    "BatchInterrupted",
    "BatchReport",
    "CacheFileError",
    "CacheStats",
    "CompletionOutput",
    "ContextLengthError",
    "Conversation",
    "DeviceLostError",
    "ErrorRateError",
    "FinishReason",
    "FormError",
    "JournalError",
    "ModelError",
    "ParameterError",
    "PassError",
    "PromptError",
    "RadixrtError",
    "RequestOutput",
    "RunLimits",
    "Runtime",
    "SamplingParams",
    "SchedulerError",
    "ScoreOutput",
    "StreamChunk",
    "Timings",
    "TokenLogprob",
    "TokenizerError",
    "Usage",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES.get(name, "radixrt.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def _check_origin() -> None:
    """Raise ImportError where another module would be imported in place of one of radixrt's own packages.

    `memory_pool`, `layers` and `triton_ops` are top-level names that a user's file may bear as well. The
    specs are looked up without importing anything.
    """
    home = Path(__file__).resolve().parent.parent
    for name in ("memory_pool", "layers", "triton_ops"):
        try:
            spec = importlib.util.find_spec(name)
        except ValueError:  # already in sys.modules, made by hand: it has no spec
            raise ImportError(
                f"radixrt needs its own package {name!r}, but another module of that name is loaded"
            ) from None
        if spec is None:
            raise ImportError(f"radixrt needs its package {name!r}, which is not in {home}: install it again")
        origin = spec.origin or str(list(spec.submodule_search_locations or ()))
        if Path(origin).resolve().parent != home / name:
            raise ImportError(
                f"radixrt needs its own package {name!r} from {home}, but {origin} is found first: "
                "rename that file, or take its folder off sys.path"
            )


_check_origin()

if TYPE_CHECKING:
    from radixrt.batch.job import BatchInterrupted
    from radixrt.cache.cache_stats import CacheStats
    from radixrt.conversation import Conversation
    from radixrt.errors import (
        BatchFileError,
        CacheFileError,
        ContextLengthError,
        DeviceLostError,
        ErrorRateError,
        FormError,
        JournalError,
        ModelError,
        ParameterError,
        PassError,
        PromptError,
        RadixrtError,
        SchedulerError,
        TokenizerError,
    )
    from radixrt.limits import RunLimits
    from radixrt.output import (
        CompletionOutput,
        FinishReason,
        RequestOutput,
        ScoreOutput,
        StreamChunk,
        Timings,
        TokenLogprob,
        Usage,
    )
    from radixrt.report.batch_report import BatchReport
    from radixrt.runtime import Runtime
    from radixrt.sampling_params import SamplingParams
    from radixrt.schedule.activity import Activity
