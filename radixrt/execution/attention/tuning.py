"""Numbers that plans weigh."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TreeCosts:
    """What reading costs on a card. The bandwidths and operations were measured, the others estimated."""

    bandwidth: float = 4.2e12  # bytes a second
    # The same of KV that several requests read one after another: the L2 cache has it for all but the first.
    reread_bandwidth: float = 7.5e12
    operations: float = 4.85e14  # a second, in the products of shared items, counted in whole tiles
    item: float = 2e-6  # seconds that a program takes besides reading and multiplying
    partial_crossings: float = 2.0  # how often a partial result crosses the memory bus
    launches: float = 6e-6  # seconds that a tree plan adds to a flat one, whatever it reads


@dataclass(frozen=True)
class PlanTuning:
    """How plans are made on a chip."""

    costs: TreeCosts = TreeCosts()
    # Padded plans of fewer decodes are always cut: their contexts mostly need it. Others leave trees' tails whole.
    cuts_below: int = 64
    # Padded extends of more tokens are not cut, and none of more share: merging all their rows would cost more.
    max_cut_tokens: int = 2048
    long_item: int = 4096  # tokens that a program of such an extend may read though a fair share were less
    long_tail: int = 512  # tokens of a whole tail though a fair share were less
    head_piece: int = 512  # tokens of the items that read the context before such a tail,
    min_head: int = 128  # if it is as long as this
    # Tiles of shared items. An extend of more rows fills most of its own, and gains little by sharing them.
    short_extend: int = 4
    shared_programs_per_sm: float = 2  # of shared items that run side by side
    # Shared segments are cut into pieces of multiples of so many tokens: so many pieces at most, none shorter than
    # the third, which would not be worth its partial results.
    piece_tokens: int = 64
    max_pieces: int = 64
    min_piece: int = 128
    max_waves: int = 4  # of shared items, that segments are cut for
    mean_partials: int = 4  # of a decode in shared items, at most; where a wave of items has more in all, as many
    spare_programs: float = 0.25  # the share that is left to requests' own items where these have more to read
    max_stops: int = 32  # positions at which rows are compared at once


H200 = PlanTuning()  # of all GPUs: no other has been measured
