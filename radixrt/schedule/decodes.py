"""The requests that decode, and what is the same of them in every pass. Numpy only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from radixrt.cache.prefix_cache import Lease
from radixrt.schedule.request import Request

Int32Array = NDArray[np.int32]


@dataclass(frozen=True)
class Decodes:
    """N requests of which a pass computes one token each. Passes share the tuples and arrays: nobody changes them.

    Attributes:
        requests: in order of admission.
        leases: what each of them holds.
        rows: `[N]` the row of each.
        last_tokens: `[N]` -(row + 1), which stands for the last token that was sampled for the row.
        num_samples: `[N]` ones.
        num_scored: `[N]` zeros.
    """

    requests: tuple[Request, ...]
    leases: tuple[Lease, ...]
    rows: Int32Array
    last_tokens: Int32Array
    num_samples: Int32Array
    num_scored: Int32Array

    @staticmethod
    def of(requests: tuple[Request, ...]) -> Decodes:
        """Of running requests."""
        leases = tuple(request.lease for request in requests if request.lease is not None)
        count = len(requests)
        rows = np.fromiter((lease.row for lease in leases), np.int32, count)
        return Decodes(requests, leases, rows, -(rows + 1), np.ones(count, np.int32), np.zeros(count, np.int32))

    def __len__(self) -> int:
        return len(self.requests)

    def first(self, count: int) -> Decodes:
        """The first `count` of them, or all if there are no more."""
        return self if count >= len(self) else Decodes.of(self.requests[:count])
