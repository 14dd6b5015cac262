"""The ladder of captured shapes."""

from __future__ import annotations

from itertools import pairwise

import pytest

from radixrt.execution.graphs import MAX_CAPTURED_BATCH, TOKEN_SIZES, PassShape, captured_shapes, ladder


def extend_shapes(max_tokens: int, max_requests: int, num_weights: int) -> list[PassShape]:
    shapes = captured_shapes(max_requests, max_tokens, num_weights)
    return [shape for shape in shapes if not shape.is_decode]


@pytest.mark.parametrize("most", [1, 2, 3, 4, 5, 8, 63, 64, 65, 127, 128, 129, 512, 513, 2048])
def test_the_ladder_ends_at_the_most(most: int) -> None:
    sizes = ladder(most)
    assert sizes[-1] == most
    assert sizes[0] == 1
    assert all(a < b for a, b in pairwise(sizes))
    for count in range(1, most + 1):
        size = next(size for size in sizes if size >= count)
        assert size - count < min(count, 32 if count <= 512 else 128)


def test_shapes_of_passes() -> None:
    """A small model has them up to the longest pass, a large one for short passes alone, a huge one none."""
    small = extend_shapes(16384, 512, 600_000_000)
    assert max(shape.num_tokens for shape in small) == 16384
    assert {shape.num_rows for shape in small} == {128, 512}
    assert small == sorted(small, key=lambda shape: (shape.num_tokens, shape.num_rows))
    assert all(shape.num_extends == min(shape.num_tokens // 2, 512) + 1 for shape in small)
    assert {shape.num_rows for shape in extend_shapes(16384, 2048, 600_000_000)} == {128, 512, 2048}
    assert max(shape.num_tokens for shape in extend_shapes(16384, 512, 8_000_000_000)) == 2048
    assert not extend_shapes(16384, 512, 70_000_000_000)
    assert [shape.num_tokens for shape in extend_shapes(100, 1, 1000)] == [100]
    assert max(shape.num_tokens for shape in extend_shapes(2**20, 1, 1000)) == TOKEN_SIZES[-1]
    assert not extend_shapes(0, 8, 1000)


@pytest.mark.parametrize("max_requests", [1, 9, MAX_CAPTURED_BATCH, MAX_CAPTURED_BATCH + 1])
def test_decodes_of_all_sizes_are_captured_up_to_a_limit(max_requests: int) -> None:
    shapes = [shape for shape in captured_shapes(max_requests, 2048, 10**12) if shape.is_decode]
    assert [shape.num_rows for shape in shapes] == ladder(min(max_requests, MAX_CAPTURED_BATCH))
    assert not any(shape.num_tokens for shape in shapes)


def test_nothing_is_captured_for_no_requests() -> None:
    assert not captured_shapes(0, 2048, 1000)
