"""Packed words on their way to the device: each array in its place, in a buffer that stays where it is."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixrt.execution.staging import ALIGNMENT, Staging, packed, padded

pytestmark = pytest.mark.usefixtures("device")

DTYPES = [np.int32, np.int64, np.float32]


def arrays_of(sizes: list[tuple[int, int]]) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {f"array {i}": (rng.random(size) * 1e6).astype(DTYPES[kind]) for i, (size, kind) in enumerate(sizes)}


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2)), max_size=8), st.integers(0, 30))
def test_arrays_are_found_where_they_were_packed(sizes: list[tuple[int, int]], start: int) -> None:
    arrays = arrays_of(sizes)
    words, layout = packed(arrays, before=np.full(start, -1, np.int32))
    assert len(words) == layout.num_words
    sent = torch.from_numpy(np.append(words, np.int32(0))).cpu()
    parts, tensors = layout.parts(words), layout.tensors(sent)
    assert list(parts) == list(tensors) == list(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(parts[name], array)
        np.testing.assert_array_equal(tensors[name].numpy(), array)
        assert parts[name].dtype == tensors[name].numpy().dtype == array.dtype
    places = [place for place, _ in layout.places.values()]
    assert all(place.start % ALIGNMENT == 0 for place in places)
    assert all(a.stop <= b.start for a, b in pairwise(places))
    assert (words[:start] == -1).all()


def test_a_known_layout_packs_the_same_words() -> None:
    arrays = arrays_of([(3, 0), (2, 1), (5, 2)])
    words, layout = packed(arrays)
    again, same = packed({name: arrays[name] for name in reversed(arrays)}, layout)
    assert same is layout
    np.testing.assert_array_equal(again, words)


def test_padding_comes_last() -> None:
    assert padded(np.array([4, 5], np.int32), 4, 7).tolist() == [4, 5, 7, 7]
    assert padded(np.array([4], np.int32), 1).tolist() == [4]


def sent(buffer: torch.Tensor, count: int) -> list[int]:
    return buffer[:count].tolist()


def test_what_is_uploaded_may_change_after(device: torch.device) -> None:
    """Passes share their words: the copy is of the words as they were."""
    staging, words = Staging(device, 8), np.arange(6, dtype=np.int32)
    first = staging.upload(words)
    assert first.device.type == device.type
    words += 10
    assert sent(first, 6) == [0, 1, 2, 3, 4, 5]
    assert sent(staging.upload(words), 6) == [10, 11, 12, 13, 14, 15]
    assert sent(staging.upload(words[:2]), 2) == [10, 11]


def test_the_buffer_grows(device: torch.device) -> None:
    staging = Staging(device, 4)
    for count in (3, 5, 4, 40, 2):
        words = np.arange(count, dtype=np.int32) + count
        assert sent(staging.upload(words), count) == words.tolist()


def test_a_fixed_buffer_never_moves(device: torch.device) -> None:
    """Graphs read the first words of a pass there, also if the pass is too long for it."""
    staging = Staging(device, 4)
    staging.fix(10)
    fixed = staging.upload(np.arange(10, dtype=np.int32))
    for count, num_fixed in ((3, 3), (10, 10), (11, 7), (500, 10), (2, 0), (501, 1), (2000, 10), (9, 9)):
        words = np.arange(count, dtype=np.int32) * 3 + count
        buffer = staging.upload(words, num_fixed)
        assert sent(buffer, count) == words.tolist()
        assert sent(fixed, num_fixed) == words[:num_fixed].tolist()
        assert (buffer.data_ptr() == fixed.data_ptr()) == (count <= len(fixed))


def test_a_long_pass_that_no_graph_computes_leaves_the_fixed_buffer_alone(device: torch.device) -> None:
    staging = Staging(device, 4)
    staging.fix(4)
    fixed = staging.upload(np.arange(4, dtype=np.int32))
    staging.upload(np.full(9, 5, np.int32))
    assert sent(fixed, 4) == [0, 1, 2, 3]


def test_words_are_filled_where_they_are_sent_from(device: torch.device) -> None:
    staging = Staging(device, 4)
    for count in (3, 9, 2):
        begun = staging.begin(count)
        begun[:] = np.arange(count) + count
        assert sent(staging.send(begun), count) == [*range(count, 2 * count)]
    staging.begin(2)
    with pytest.raises(AssertionError):
        staging.send(np.zeros(2, np.int32))
