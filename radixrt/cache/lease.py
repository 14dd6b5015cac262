"""What requests hold of a cache: a lease each, and what one lends another."""

# Tests: tests/cache/test_prefix_cache.py

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixrt.cache.radix_tree import Node, Slots, Tokens

# How far a lease has come: the end of its committed tokens, and the token after it, which it computes next.
Frontier = tuple[Node, int]


@dataclass(eq=False, slots=True)
class Lease:
    """What one live request holds: a row, a locked path, private slots. 0 <= committed <= allocated_len."""

    row: int  # in `req_to_token` and in `allocated_lens`
    node: Node  # the end of the committed part of its tokens; locked
    committed: int  # positions whose slots belong to the tree
    matched: int  # positions that were found in the tree when the lease was made, or lent
    loaded: int  # what only the host had: so many of them, and for a state as many as have KV of its size
    tokens: Tokens  # `[n]`, all that it computes for others, as was said last
    allocated_lens: NDArray[np.int32]  # the cache's
    begun: int  # passes that had been launched when it was made
    lender: Lease | None = None  # whose slots the row names at positions in [committed, lent_end)
    lent_end: int = 0
    borrowers: list[Lease] = field(default_factory=list)  # leases whose lender it is
    frontier: Frontier | None = None  # where others find it; None: it computes nothing more for them
    released: bool = False
    reusable_len: int | None = None  # set on release: leading tokens that later requests may share; None: all
    # Set on release: tokens of which passes in flight compute those from `committed` on. They are published once
    # these have ended, with the state that is left there.
    tail: Tokens | None = None
    comes_back: bool = False  # set on release: its request will go on from there
    stops: list[int] = field(default_factory=list)  # positions where a pass is to end and leave a fresh state

    @property
    def allocated_len(self) -> int:
        """Positions that have a slot; those from `own_start` on are private."""
        return self.allocated_lens.item(self.row)

    @property
    def own_start(self) -> int:
        """The end of the positions whose slots are the tree's, or lent."""
        return max(self.committed, self.lent_end)


class Loan(NamedTuple):
    """Tokens before position `end`, beyond a match, that `lender` computes in the coming pass.

    A pass writes the KV of all its new tokens before attention reads any, layer by layer. So another request of
    the same pass can read them there, by the lender's slots, and computes what follows. Once the pass has ended
    well, they are the tree's, and each of the two holds them by its own lock. Before, they are the lender's; if it
    ends or yields, the one that borrowed most owns them.
    """

    lender: Lease
    end: int


class Pending(NamedTuple):
    """What becomes free once pass number `after` has ended: slots, and what a released lease holds beside them."""

    after: int
    slots: Slots
    tokens: int  # about how many this makes available
    lease: Lease | None = None
