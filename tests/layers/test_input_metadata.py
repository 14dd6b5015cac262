"""InputMetadata and RadixAttention: the golden example, mixed passes, and what is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from layers.input_metadata import InputMetadata
from layers.radix_attention import RadixAttention
from tests.support.input_metadata import input_metadata
from triton_ops.attention.arguments import Scoring
from triton_ops.attention.dense import dense_attention
from triton_ops.attention.plan import AttentionPlan
from triton_ops.kv.view import KVView


class TwoLayerPool:
    """K and V of two layers, NaN until written."""

    def __init__(self, num_slots: int, num_kv_heads: int, head_dim: int) -> None:
        self.kv = torch.full((2, 2, num_slots, num_kv_heads, head_dim), torch.nan)

    def view(self, layer_id: int, req_to_token: Tensor) -> KVView:
        return KVView(*self.kv[layer_id], req_to_token)


attention = partial(RadixAttention, cos_sin_cache=None, norm=None, impl="auto")


def scattered_rows(num_rows: int, length: int, seed: int = 0) -> Tensor:
    slots = torch.randperm(num_rows * length, generator=torch.Generator().manual_seed(seed)) + 1
    return slots.view(num_rows, length).int()


def test_golden_example() -> None:
    seq_lens, prefix_lens, rows = [6, 10], [3, 4], [2, 0]
    req_to_token = scattered_rows(3, 12)
    out_cache_loc = torch.cat([req_to_token[2, 3:6], req_to_token[0, 4:10]])
    pool = TwoLayerPool(40, 4, 64)
    metadata = input_metadata(rows, seq_lens, prefix_lens, out_cache_loc.numpy(), req_to_token, kv_pool=pool)
    expected = {
        "req_pool_indices": rows,
        "seq_lens": seq_lens,
        "prefix_lens": prefix_lens,
        "extend_seq_lens": [3, 6],
        "extend_start_loc": [0, 3],
        "positions": [3, 4, 5, 4, 5, 6, 7, 8, 9],
        "out_cache_loc": out_cache_loc.tolist(),
    }
    for name, values in expected.items():
        tensor = getattr(metadata, name)
        assert tensor.dtype == torch.int32, name
        assert tensor.tolist() == values, name
    assert metadata.out_cache_loc.shape == (9,)
    assert (metadata.num_extends, metadata.num_extend_tokens) == (2, 9)

    generator = torch.Generator().manual_seed(1)
    q = torch.randn(9, 32, 64, generator=generator)
    k, v = torch.randn(9, 4, 64, generator=generator), torch.randn(9, 4, 64, generator=generator)
    for row, prefix in zip(rows, prefix_lens, strict=True):
        slots = req_to_token[row, :prefix].long()
        pool.kv[1, :, slots] = torch.randn(2, prefix, 4, 64, generator=generator)
    out = attention(1, Scoring(0.125))(q, k, v, metadata)

    assert pool.kv[0].isnan().all(), "layer 0 is not layer 1"
    assert torch.equal(pool.kv[1, 0, out_cache_loc.long()], k)
    start = 0
    for row, seq_len, extend_len in zip(rows, seq_lens, [3, 6], strict=True):
        slots = req_to_token[row, :seq_len].long()
        dense = dense_attention(q[start : start + extend_len], *pool.kv[1, :, slots], Scoring(0.125))[0]
        torch.testing.assert_close(out[start : start + extend_len].double(), dense, atol=1e-5, rtol=1e-5)
        start += extend_len


@pytest.mark.parametrize("num_extends", [0, 1, 2, 4])
def test_extends_and_decodes_of_one_pass(num_extends: int) -> None:
    """One-token requests attend to the same, be they extends or decodes; the decodes read the plan."""
    seq_lens = [[9, 5, 8, 7][b] for b in range(4)]
    prefix_lens = [seq - (2 + b if b < num_extends else 1) for b, seq in enumerate(seq_lens)]
    req_to_token = scattered_rows(4, 10)
    out_cache_loc = np.concatenate([req_to_token[b, prefix_lens[b] : seq_lens[b]].numpy() for b in range(4)])
    pool = TwoLayerPool(41, 2, 8)
    metadata = input_metadata(
        range(4), seq_lens, prefix_lens, out_cache_loc, req_to_token, num_extends=num_extends, kv_pool=pool
    )
    num_new = [seq - prefix for seq, prefix in zip(seq_lens, prefix_lens, strict=True)]
    assert metadata.num_extend_tokens == sum(num_new[:num_extends])
    assert metadata.extends.extend_seq_lens.tolist() == num_new[:num_extends]
    plan = metadata.decode_plan(sliding_window=None)
    items = torch.stack([plan.item_query_starts, plan.item_req_pool_indices, plan.item_lens], 1).tolist()
    assert sorted(items) == [[b - num_extends, b, seq_lens[b]] for b in range(num_extends, 4)]
    assert metadata.decode_plan(sliding_window=7) is plan

    generator = torch.Generator().manual_seed(2)
    for b in range(4):
        pool.kv[0, :, req_to_token[b, : prefix_lens[b]].long()] = torch.randn(
            2, prefix_lens[b], 2, 8, generator=generator
        )
    packed = torch.randn(sum(num_new), 8, 8, generator=generator)
    q, k, v = packed[:, :4], packed[:, 4:6], packed[:, 6:]
    out = attention(0, Scoring(0.3))(q, k, v, metadata)
    assert out.shape == (sum(num_new), 4, 8)
    for b, (part, result) in enumerate(zip(q.split(num_new), out.split(num_new), strict=True)):
        slots = req_to_token[b, : seq_lens[b]].long()
        dense = dense_attention(part, *pool.kv[0, :, slots], Scoring(0.3))[0]
        torch.testing.assert_close(result.double(), dense, atol=1e-5, rtol=1e-5)


def test_empty_batch() -> None:
    metadata = input_metadata([], [], [], [], scattered_rows(1, 4), kv_pool=TwoLayerPool(4, 2, 8))
    assert metadata.positions.shape == (0,)
    empty = torch.empty(0, 2, 8)
    out = attention(0, Scoring(1.0))(empty, empty, empty, metadata)
    assert out.shape == (0, 2, 8)


def test_a_request_of_no_new_token_takes_no_room() -> None:
    metadata = input_metadata([0, 1, 2], [4, 0, 3], [2, 0, 3], [5, 6], scattered_rows(3, 4))
    assert metadata.extend_start_loc.tolist() == [0, 2, 2]
    assert metadata.positions.tolist() == [2, 3]


def test_a_given_plan_is_kept() -> None:
    table = scattered_rows(2, 4)
    plan = AttentionPlan.flat([1], [4]).to(torch.get_default_device())
    metadata = input_metadata([0, 1], [4, 4], [0, 3], [1, 2, 3, 4, 5], table, num_extends=1, plan=plan)
    assert metadata.decode_plan(None) is plan
    assert metadata.req_to_token is table


def test_device_views_need_not_be_copies() -> None:
    """All arrays sent in one packed copy, as the model runner does."""
    host = InputMetadata.host_arrays([0, 1], [6, 10], [3, 4], range(1, 10))
    assert all(array.dtype == np.int32 for array in host.values())
    packed = torch.from_numpy(np.concatenate(list(host.values())))
    views = dict(zip(host, packed.split([array.size for array in host.values()]), strict=True))
    plans: dict[str, Any] = {"decode_plans": {}, "extend_plans": {}}
    count = InputMetadata.count_extend_tokens(host["extend_seq_lens"], 2)
    metadata = InputMetadata(
        **views, req_to_token=scattered_rows(2, 10), num_extends=2, num_extend_tokens=count, **plans
    )
    assert metadata.positions.data_ptr() == views["positions"].data_ptr()
    assert metadata.positions.tolist() == [3, 4, 5, 4, 5, 6, 7, 8, 9]
    assert metadata.num_extend_tokens == 9


BAD: list[tuple[dict[str, Any], str]] = [
    ({"req_pool_indices": [0]}, r"one length.*\(1,\), \(2,\) and \(2,\)"),
    ({"seq_lens": [[6, 10]]}, "one length"),
    ({"prefix_lens": [3, 11]}, "request 1: prefix_len 11 exceeds seq_len 10"),
    ({"prefix_lens": [-1, 4]}, "prefix_lens must not be negative, but holds -1"),
    ({"req_pool_indices": [0, -3]}, "req_pool_indices must not be negative, but holds -3"),
    ({"out_cache_loc": [1] * 8}, r"each of the 9 new tokens, but has shape \(8,\)"),
    ({"out_cache_loc": [1] * 8 + [-1]}, "out_cache_loc must not be negative, but holds -1"),
    ({"num_extends": 3}, r"0 to 2 \(all requests\), but is 3"),
    ({"num_extends": 1}, r"a decode computes one token, but extend_seq_lens are \[6\]"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_inconsistent_batches_are_refused(change: dict[str, Any], message: str) -> None:
    batch: dict[str, Any] = {
        "req_pool_indices": [0, 1],
        "seq_lens": [6, 10],
        "prefix_lens": [3, 4],
        "out_cache_loc": range(1, 10),
        "req_to_token": scattered_rows(2, 10),
    }
    input_metadata(**batch)
    with pytest.raises(ValueError, match=message):
        input_metadata(**{**batch, **change})
