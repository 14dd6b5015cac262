"""The tests of deterministic attention find what would make bits depend on the pass: faults put in on purpose."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

import triton_ops.attention.ordered as ordered
from layers.products import same_bits
from tests.support.interpreter import require_interpreter
from tests.support.ordered_ways import HEADS, all_ways, copies, rising
from triton_ops.attention import ordered_kernel, ordered_softmax
from triton_ops.attention.arguments import Scoring

SUPERBLOCK = 64

# What is broken: a line of a file, and what takes its place.
FAULTS = {
    "the base is not an integer": (
        ordered_softmax,
        "tl.maximum(base, tl.ceil(tl.max(scores, 1)) - fixed)",
        "tl.maximum(base, tl.max(scores, 1) - fixed)",
    ),
    "scores are not rounded": (
        ordered_softmax,
        "scores = tl.fma(scores, tl.zeros_like(scores) + scale, offset)",
        "scores = scores * scale\n    fixed = 0.0",
    ),
    "superblocks begin where the item does": (
        ordered_kernel,
        "range(start // SUPERBLOCK, end_block)",
        "range(0, 1)",
    ),
    "sums of weights in the order of the layout": (
        ordered_softmax,
        "sums = (sums + first) + second",
        "sums += first + second",
    ),
    "superblocks are added in the order of the items' lengths": (
        ordered_kernel,
        "tl.load(row_partials + index)",
        "tl.load(row_partials + (end - 1 - (index - start)))",
    ),
    "a superblock is not taken in": (
        ordered_kernel,
        "for nth_taken in range(tl.max(end_taken - first_taken, 0))",
        "for nth_taken in range(1, tl.max(end_taken - first_taken, 0))",
    ),
    "the open superblock begins anew": (
        ordered_kernel,
        "wanted & (first >= 0)",
        "wanted & (first >= 1000)",
    ),
    "levels run side by side": (
        ordered_kernel,
        "tl.load(item_levels + item) == level",
        "level == 0",
    ),
}
# Of the base that a superblock keeps: the scores that show them.
FAULTS_OF_BASES = {
    "too great weights stay": (ordered_kernel, "again = overflows(", "again = (rest < 0) & overflows(", "far"),
    "what is computed again begins anew": (
        ordered_kernel,
        "item_sources + item, again,",
        "item_sources + item, again & False,",
        "a jump",
    ),
    "the base stays far below": (
        ordered_kernel,
        "acc, row_sum, base = rebase(acc, row_sum, base)",
        "pass",
        "from far below",
    ),
    "what is tiny depends on the base": (
        ordered_softmax,
        "total, total_sum, total_base = total * factor[:, None], total_sum * factor, total_base + exponent",
        "pass",
        "tiny values",
    ),
}
# The others are long tests.
FEW = (
    "superblocks begin where the item does",
    "levels run side by side",
    "too great weights stay",
    "what is computed again begins anew",
)


@pytest.mark.long
def test_no_fault_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But the order in which tiles find the maximum, which must not matter."""
    require_interpreter()
    break_source(tmp_path, monkeypatch, ordered_softmax, "tl.max(scores, 1))", "tl.max(scores, 1) + 3.0)")
    assert agrees()


@pytest.mark.long_unless(kept=lambda given: given["fault"] in FEW)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_fault_is_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_interpreter()
    break_source(tmp_path, monkeypatch, *FAULTS[fault])
    assert not agrees()


@pytest.mark.long_unless(kept=lambda given: given["fault"] in FEW)
@pytest.mark.parametrize("fault", FAULTS_OF_BASES)
def test_the_fault_of_bases_is_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_interpreter()
    *change, scores = FAULTS_OF_BASES[fault]
    break_source(tmp_path, monkeypatch, *change)
    from tests.support.tensor_cores import tensor_cores  # imports Triton's interpreter

    with tensor_cores():
        found, *_ = rising(scores)
    assert not all(same_bits(other, found[0]) for other in found)


def break_source(
    folder: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, line: str, broken: str
) -> None:
    """Let the kernels of `module`, and those that use it, be of a source in which `line` is another one."""

    def load(name: str, change: Callable[[str], str], source: ModuleType) -> ModuleType:
        assert source.__file__ is not None
        path = folder / f"{name}.py"
        path.write_text(change(Path(source.__file__).read_text()))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
        return loaded

    def changed(text: str) -> str:
        assert text.count(line) == 1, line
        return text.replace(line, broken)

    used = load("broken_softmax", changed if module is ordered_softmax else str, ordered_softmax)
    kernel = load("broken_kernel", changed if module is ordered_kernel else str, ordered_kernel)
    for name in set(vars(used)) & set(vars(kernel)):
        if hasattr(getattr(used, name), "fn"):  # a function of kernels
            monkeypatch.setattr(kernel, name, getattr(used, name))
    for name in ("ordered_kernel", "ordered_merge_kernel"):
        monkeypatch.setattr(ordered, name, getattr(kernel, name))


def agrees() -> bool:
    """Whether decodes have the same bits whole, cut, going on from shared superblocks, and by other tiles: among
    keys that weigh about as much, and where a few weigh more than all before them.
    """
    return all(agrees_on((), seed) for seed in (3, 4, 5)) and agrees_on((20, 90), 3)


def agrees_on(great: tuple[int, ...], seed: int) -> bool:
    from tests.support.tensor_cores import tensor_cores  # imports Triton's interpreter

    case = copies(185, torch.float32)
    q = torch.randn(HEADS, 16, generator=torch.Generator().manual_seed(seed))
    for position in great:  # in a tile of 32 keys, but not in the first 16
        slot = case.req_to_token[case.rows[0], position].long()
        case.k_buffer[slot] = q[::2]
    with tensor_cores():
        # Two superblocks and 48 tokens of the third one are read once, 32 of these by two copies alone.
        found = all_ways(case, q, Scoring(0.4), SUPERBLOCK, 176)
    return all(same_bits(other, found[0]) for other in found)
