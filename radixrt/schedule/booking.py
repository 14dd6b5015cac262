"""Whose a pass is: the live objects that its numbers stand for."""

from __future__ import annotations

from dataclasses import dataclass

from radixrt.cache.prefix_cache import Lease
from radixrt.schedule.passes import Pass
from radixrt.schedule.request import Request


@dataclass(frozen=True)
class Booking:
    """A scheduled pass and its owners.

    Attributes:
        pass_: the pass, of B rows.
        requests: the request of each row.
        leases: what each of them holds. A result counts for a request while it still holds the same.

    While the same requests decode pass after pass, and nothing else is computed, the tuples are the same.
    """

    pass_: Pass
    requests: tuple[Request, ...]
    leases: tuple[Lease, ...]
