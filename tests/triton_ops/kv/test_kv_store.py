"""kv_store writes its slots and no others."""

from __future__ import annotations

import pytest
import torch

from tests.support.attention_cases import make_case, packed_qkv
from tests.support.attention_checks import int32
from triton_ops.kv.kv_store import kv_store

pytestmark = pytest.mark.usefixtures("device")


@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_kv_store_writes_its_slots_only(pool_dtype: torch.dtype, interleaved: bool) -> None:
    case = make_case([5, 4], dtype=pool_dtype, interleaved=interleaved)
    _, k, v = packed_qkv(3, 4, 2, 16)
    slots = [7, 2, 11]
    expected_k, expected_v = case.k_buffer.clone(), case.v_buffer.clone()
    for token, slot in enumerate(slots):
        expected_k[slot], expected_v[slot] = k[token], v[token]
    kv_store(k, v, case.k_buffer, case.v_buffer, int32(slots))
    torch.testing.assert_close(case.k_buffer, expected_k, equal_nan=True, atol=0, rtol=0)
    torch.testing.assert_close(case.v_buffer, expected_v, equal_nan=True, atol=0, rtol=0)


def test_kv_store_of_padding_and_of_nothing() -> None:
    case = make_case([3])
    before = case.k_buffer[1:].clone()
    _, k, v = packed_qkv(2, 4, 2, 16)
    kv_store(k, v, case.k_buffer, case.v_buffer, int32([0, 0]))
    kv_store(k[:0], v[:0], case.k_buffer, case.v_buffer, int32([]))
    torch.testing.assert_close(case.k_buffer[1:], before, equal_nan=True, atol=0, rtol=0)
