"""Numbers that plans weigh, for each chip that was measured."""

from __future__ import annotations

from dataclasses import dataclass

from triton_ops.implementation import GPU


@dataclass(frozen=True)
class TreeCosts:
    """What reading costs on a card. The bandwidths and operations were measured, the others estimated.

    Attributes:
        bandwidth: bytes a second.
        reread_bandwidth: bytes a second of KV that several requests read one after another: the L2 cache has it
            for all but the first.
        operations: a second, in the products of shared items, counted in whole tiles.
        item: seconds that a program takes besides reading and multiplying.
        partial_crossings: how often a partial result crosses the memory bus.
        launches: seconds that a tree plan adds to a flat one, whatever it reads.
    """

    bandwidth: float = 4.2e12
    reread_bandwidth: float = 7.5e12
    operations: float = 4.85e14
    item: float = 2e-6
    partial_crossings: float = 2.0
    launches: float = 6e-6


@dataclass(frozen=True)
class PlanTuning:
    """How plans are made on a chip.

    Attributes:
        costs: of reading.
        cuts_below: padded plans of fewer decodes than this always cut, for their contexts mostly need it; those of
            as many or more leave the tails of trees whole.
        max_cut_tokens: padded extends of more tokens are not cut, and none of more tokens share: merging all their
            rows would cost more.
        long_item: tokens that a program may read by itself though a fair share were less.
        long_tail: tokens of a whole tail though a fair share were less; what is before them is read in items of
            `head_piece` tokens, unless it is less than `min_head`.
        short_extend: tiles of shared items. An extend of more rows fills most of its own, and gains little by
            sharing them.
        shared_programs_per_sm: programs of shared items that run side by side.
        piece_tokens: shared segments are cut into pieces of multiples of it,
        min_piece: which have that many tokens at least: shorter ones are not worth their partial results,
        max_pieces: and are so many at most.
        max_waves: of shared items that segments are cut for.
        mean_partials: partial results of shared items for a decode, at most; as many as a wave of items has,
            where those are more.
        spare_programs: the share of a wave that is left to others that have more to read.
        max_stops: rows are compared at that many positions at once.
    """

    costs: TreeCosts = TreeCosts()
    cuts_below: int = 64
    max_cut_tokens: int = 2048
    long_item: int = 4096
    long_tail: int = 512
    head_piece: int = 512
    min_head: int = 128
    short_extend: int = 4
    shared_programs_per_sm: float = 2
    piece_tokens: int = 64
    min_piece: int = 128
    max_pieces: int = 64
    max_waves: int = 4
    mean_partials: int = 4
    spare_programs: float = 0.25
    max_stops: int = 32


H200 = PlanTuning()
TUNINGS = {90: H200}  # by capability


def plan_tuning(gpu: GPU) -> PlanTuning:
    """That of the GPU; an H200's where none has been measured."""
    return TUNINGS.get(gpu.capability, H200)
