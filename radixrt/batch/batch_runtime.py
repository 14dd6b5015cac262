"""What a batch needs of a `Runtime`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from radixrt.batch.meter import MeteredRuntime
from radixrt.limits import RunLimits
from radixrt.output import RequestOutput
from radixrt.sampling_params import SamplingParams
from radixrt.text.tokenizer import Tokenizer


class PreparedRequest(Protocol):
    """A request as `BatchRuntime.prepare` makes it."""

    @property
    def id(self) -> int:
        """That of its output, and of no other."""

    @property
    def prompt_ids(self) -> npt.NDArray[np.int32]: ...

    @property
    def max_new_tokens(self) -> int: ...


R = TypeVar("R", bound=PreparedRequest)


class BatchRuntime(MeteredRuntime, Protocol[R]):
    """The part of a `Runtime` that runs a batch."""

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def has_work(self) -> bool:
        """Whether requests have not ended, and `step` can go on with them."""

    @property
    def seed(self) -> int: ...

    @property
    def limits(self) -> RunLimits: ...

    @property
    def reuses_prefixes(self) -> bool: ...

    def identity(self) -> Mapping[str, Any]: ...

    def prepare(
        self,
        prompt: str | Sequence[int] | npt.NDArray[np.int32] | Sequence[Mapping[str, str]],
        sampling_params: SamplingParams | None = None,
        *,
        index: int = 0,
        keep: int | None = None,
    ) -> R: ...

    def submit(self, *requests: R, in_order: bool = False) -> None: ...

    def step(self) -> list[RequestOutput]: ...

    def abort(self, request: R) -> object: ...

    def has_begun(self, request: R) -> bool:
        """Whether a pass has computed some of a submitted request."""
