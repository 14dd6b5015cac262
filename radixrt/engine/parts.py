"""`Parts`: what a `Runtime` is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from radixrt.cache.prefix_cache import PrefixCache
from radixrt.config import RuntimeConfig
from radixrt.engine.engine import Engine
from radixrt.frontend.request_builder import RequestBuilder
from radixrt.limits import RunLimits
from radixrt.output import RequestOutput
from radixrt.schedule.answer import Answer
from radixrt.schedule.scheduler import Scheduler

if TYPE_CHECKING:
    import torch

    from radixrt.models.config import ModelConfig


class ServedModel(Protocol):
    """A model on its device, as far as it is more than a runner of passes."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def device(self) -> torch.device: ...

    def identity(self) -> dict[str, Any]:
        """What answers depend on besides prompts, parameters and seed, as JSON values."""

    def reload(self, source: str | Path, *, before_change: Callable[[], None]) -> None:
        """Take other weights of the same model; `before_change` is called before the first one changes."""

    def save_cache(self, path: Path, weights_version: int, *, progress: bool) -> int:
        """Write the cached prefixes of a version of the weights to a file. Returns how many tokens it holds."""

    def load_cache(self, path: Path, weights_version: int, *, progress: bool) -> tuple[int, int]:
        """Put the prefixes of a file into the cache. Returns how many tokens it took, and for how many there were
        no free slots.
        """

    def free_device(self) -> None:
        """Give back the device's memory that nobody uses any more."""


@dataclass(frozen=True)
class Parts:
    """What a Runtime is made of: `assemble` makes it for a model, tests for a runner of their own.

    Attributes:
        engine: scheduler, cache and runner.
        builder: makes the requests.
        output_of: turns the first answer to a prompt, once all have ended, into the request's output.
        start_up: seconds, as in Runtime.
    """

    config: RuntimeConfig
    limits: RunLimits
    engine: Engine
    builder: RequestBuilder
    model: ServedModel
    output_of: Callable[[Answer], RequestOutput]
    start_up: Mapping[str, float] = field(default_factory=dict)

    @property
    def scheduler(self) -> Scheduler:
        return self.engine.scheduler

    @property
    def cache(self) -> PrefixCache:
        return self.engine.scheduler.cache
