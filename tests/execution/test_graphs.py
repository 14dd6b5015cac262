"""The ladder of captured shapes, and how their graphs are captured."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch

from radixrt.execution.graphs import (
    MAX_CAPTURED_BATCH,
    TOKEN_SIZES,
    GraphRecorder,
    PassShape,
    captured_shapes,
    ladder,
    largest_shapes,
)


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


@pytest.mark.parametrize(
    ("num_weights", "extends"),
    [
        (600_000_000, [(16384, 2048)]),
        (8_000_000_000, [(512, 2048), (2048, 512)]),  # no pass has as much of both
        (70_000_000_000, []),
    ],
)
def test_the_graphs_of_all_shapes_fit_into_those_of_the_largest(
    num_weights: int, extends: list[tuple[int, int]]
) -> None:
    shapes = captured_shapes(2048, 16384, num_weights)
    largest = largest_shapes(shapes)
    assert [(shape.num_tokens, shape.num_rows) for shape in largest] == [(0, 2048), *extends]
    for shape in shapes:
        assert any(
            shape.is_decode == one.is_decode
            and shape.num_tokens <= one.num_tokens
            and shape.num_rows <= one.num_rows
            and shape.num_extends <= one.num_extends
            for one in largest
        )


class FakeCuda:
    """The parts of torch.cuda that a recorder uses; `end` is called where a capture ends."""

    def __init__(self, patch: pytest.MonkeyPatch, end: Callable[[], None] = lambda: None) -> None:
        self.streams, self._end = ["main"], end  # the current one is the last
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
        patch.setattr(torch.cuda, "Stream", lambda device: f"captures on {device}")
        patch.setattr(torch.cuda, "CUDAGraph", lambda: self)
        patch.setattr(torch.cuda, "stream", self.stream)
        patch.setattr(torch.cuda, "graph", self.graph)

    def replay(self) -> None:
        self.is_replayed = True

    @contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        count = len(self.streams)
        self.streams.append(stream)
        try:
            yield
        finally:
            del self.streams[count:]

    @contextmanager
    def graph(self, graph: Any, *, pool: str, stream: str, capture_error_mode: str) -> Iterator[None]:
        assert (graph, pool, capture_error_mode) == (self, "pool", "thread_local")
        self.streams.append(stream)
        try:
            yield
        finally:
            self._end()  # as in torch, the stream stays the current one if this raises
            self.streams.pop()


def test_nothing_is_collected_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would free what garbage holds on the device, which ends a capture."""
    cuda, device = FakeCuda(monkeypatch), torch.device("cpu")
    seen: list[tuple[str, str, bool]] = []

    def note(what: str) -> None:
        seen.append((what, cuda.streams[-1], gc.isenabled()))

    launch = GraphRecorder(device).captured(lambda: note("captured"), lambda: note("warm"))
    assert seen == [("warm", "main", True), ("captured", "captures on cpu", False)]
    assert gc.isenabled()
    assert launch == cuda.replay


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        ("CUDA error: out of memory", torch.OutOfMemoryError),
        ("CUDA error: operation not permitted", torch.AcceleratorError),
    ],
)
def test_a_capture_that_cannot_be_ended_leaves_the_stream_as_it_was(
    monkeypatch: pytest.MonkeyPatch, raised: str, expected: type[Exception]
) -> None:
    def end() -> None:
        raise torch.AcceleratorError(raised)

    cuda = FakeCuda(monkeypatch, end)
    with pytest.raises(expected, match=raised):
        GraphRecorder(torch.device("cpu")).captured(lambda: None, lambda: None)
    assert cuda.streams == ["main"]
    assert gc.isenabled()
