"""The part of a stored tensor that one of several ranks takes, by the shapes of both."""

# Tests: tests/models/test_ranks.py

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

from layers.checkpoint_slot import CheckpointSlot, Packed
from layers.ranks import Ranks
from radixrt.errors import ModelError


def rank_part(name: str, stored: Tensor, whole: CheckpointSlot, own: CheckpointSlot, ranks: Ranks) -> Tensor:
    """The part of the tensor `name` that a rank takes. `whole` is its place in the whole model, `own` the rank's.

    Where one dimension is f times as long in `whole`, it is one of f equal pieces, in the order of ranks: a view,
    or those of packed parts joined. With fewer pieces than ranks, neighbours take the same one.

    Raises ModelError where the shapes differ otherwise.
    """
    shapes = zip(whole.shape, own.shape, strict=True)
    differing = [dim for dim, (length, part) in enumerate(shapes) if length != part]
    if not differing:
        return stored
    dim, start, pieces = differing[0], 0, []
    for length, part in zip(_lengths(whole, dim), _lengths(own, dim), strict=True):
        count = length / part
        if len(differing) > 1 or length % 1 or part % 1 or ranks.size % count:
            raise ModelError(
                f"tensor {name} of shape {[*whole.shape]} cannot be cut into parts of {[*own.shape]} for "
                f"{ranks.size} ranks"
            )
        piece = ranks.rank * int(count) // ranks.size
        pieces.append(stored.narrow(dim, start + piece * int(part), int(part)))
        start += int(length)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def _lengths(place: CheckpointSlot, dim: int) -> list[Fraction]:
    """Of a place's parts in that dimension, whose elements may be words or blocks of several outputs."""
    sizes = place.sizes if isinstance(place, Packed) else (1,)
    return [Fraction(size * place.shape[dim], sum(sizes)) for size in sizes]
