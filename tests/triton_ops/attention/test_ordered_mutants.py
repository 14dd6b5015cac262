"""The tests of deterministic attention find what would make bits depend on the pass: faults put in on purpose."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import triton_ops.attention.ordered as ordered
from layers.products import same_bits
from tests.support.attention_cases import make_case
from tests.support.interpreter import require_interpreter
from triton_ops.attention import ordered_kernel, ordered_softmax
from triton_ops.attention.arguments import Scoring
from triton_ops.attention.plan import AttentionPlan, Int32Array, SharedItems

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
        "range(start // SUPERBLOCK, (careful_end + SUPERBLOCK - 1) // SUPERBLOCK)",
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
    "a superblock is taken in twice": (
        ordered_kernel,
        "num_closed = tl.max(end_taken - first_taken, 0) - is_open.to(tl.int32)",
        "num_closed = tl.max(end_taken - first_taken, 0)",
    ),
    "the open superblock begins anew": (
        ordered_kernel,
        "row_sum = tl.load(partial_sum + part[:, None] * 16 + lane)",
        "row_sum = row_sum",
    ),
}


def test_no_fault_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But the order in which tiles find the maximum, which must not matter."""
    require_interpreter()
    break_source(tmp_path, monkeypatch, ordered_softmax, "tl.max(scores, 1))", "tl.max(scores, 1) + 3.0)")
    assert agrees()


@pytest.mark.parametrize("fault", FAULTS)
def test_the_fault_is_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_interpreter()
    break_source(tmp_path, monkeypatch, *FAULTS[fault])
    assert not agrees()


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
    for name in ("add_superblock", "finish_ordered", "ordered_tile", "rebase", "sum_places"):
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

    case = make_case([185] * 3, head_dim=16)
    # The same request thrice.
    for row in case.rows[1:]:
        case.req_to_token[row] = case.req_to_token[case.rows[0]]
    q = torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(seed)).expand(3, 4, 16).contiguous()
    for position in great:  # in a tile of 32 keys, but not in the first 16
        slot = case.req_to_token[case.rows[0], position].long()
        case.k_buffer[slot] = q[0, ::2]
    rows = case.rows.numpy()
    scoring, common = Scoring(0.4), {"superblock": SUPERBLOCK, "impl": "triton"}

    def decoded(plan: AttentionPlan) -> list[torch.Tensor]:
        lse = torch.empty(3, 4)
        out = ordered.ordered_decode(q, case.kv, case.rows, plan, scoring, lse=lse, **common)  # type: ignore[arg-type]
        return [torch.cat([out.flatten(1), lse], 1)[row] for row in range(3)]

    with tensor_cores():
        found = decoded(AttentionPlan.flat(rows, [185] * 3, superblock=SUPERBLOCK).to(q.device))
        found += decoded(AttentionPlan.flat(rows, [185] * 3, max_item_len=1, superblock=SUPERBLOCK).to(q.device))
        found += decoded(sharing(rows).to(q.device))
        extends = case.extends([184 - 40, 184, 0])
        wide = torch.zeros(int(extends.extend_seq_lens.sum()), 4, 16)
        last = extends.extend_start_loc + extends.extend_seq_lens - 1
        wide[last.long()] = q
        lse = torch.empty(wide.shape[:2])
        out = ordered.ordered_extend(wide, case.kv, extends, None, scoring, lse=lse, **common)  # type: ignore[arg-type]
        found += list(torch.cat([out.flatten(1), lse], 1)[last.long()])
    return all(same_bits(other, found[0]) for other in found)


def sharing(rows: Int32Array) -> AttentionPlan[Int32Array]:
    """Two superblocks and 48 tokens of the third one are read once."""
    starts, lens = np.array([0, 64, 128], np.int32), np.array([64, 64, 48], np.int32)
    lines, first = np.full(3, rows[0], np.int32), np.zeros(3, np.int32)
    shared = SharedItems(lines, starts, lens, first, first + 3, np.arange(3, dtype=np.int32))
    return AttentionPlan.tree(rows, [185] * 3, [176] * 3, shared, superblock=SUPERBLOCK)
