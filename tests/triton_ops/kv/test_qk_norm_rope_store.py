"""The kernel of the steps before attention against the torch form, with pools of e4m3 and others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.elementwise_cases import KERNEL_DTYPES, assert_same
from tests.support.random_tensors import random
from triton_ops.e4m3 import E4M3, in_float16, quantise
from triton_ops.kv.qk_norm_rope_store import HeadNorm, Rotation, qk_norm_rope_store
from triton_ops.kv.view import KVView

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of the interpreter, on purpose


class Heads:
    """q, k and v as views of one packed projection, and a pool that holds NaN; `copy` is another like it."""

    def __init__(
        self,
        num_tokens: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        pool_dtype: torch.dtype | None = None,
        stacked: bool = False,
    ) -> None:
        self.packed = random(num_tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype, device=device)
        self.q, self.k, self.v = self.packed.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        shape = (2 * num_tokens + 3, num_kv_heads, head_dim)
        kwargs: dict[str, Any] = {"dtype": pool_dtype or dtype, "device": device}
        if stacked:
            self.k_buffer, self.v_buffer = torch.full((shape[0], 2, *shape[1:]), torch.nan, **kwargs).unbind(1)
        else:
            self.k_buffer, self.v_buffer = (torch.full(shape, torch.nan, **kwargs) for _ in range(2))
        slots = torch.randperm(shape[0] - 1, generator=torch.Generator().manual_seed(3))[:num_tokens] + 1
        if num_tokens > 3:
            slots[[1, 2]] = 0  # padding
        self.slots = slots.to(device, torch.int32)

    def run(
        self, impl: Any, k_scale: Tensor | None = None, v_scale: Tensor | None = None, **steps: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        kv = KVView(self.k_buffer, self.v_buffer, self.slots[None], k_scale, v_scale)
        return qk_norm_rope_store(self.q, self.k, self.v, kv, self.slots, impl=impl, **steps)


def check_heads(make: Callable[[], Heads], **steps: Any) -> None:
    """Kernel and reference do the same, to the pool outside slot 0 and to the projection."""
    ours, theirs = make(), make()
    ours.run("triton", **steps)
    theirs.run("torch", **steps)
    assert_same(ours.packed, theirs.packed)
    assert torch.equal(ours.v, make().v)
    for name in ("k_buffer", "v_buffer"):
        pool, expected = getattr(ours, name)[1:], getattr(theirs, name)[1:]
        assert_same(pool, expected)
        written = expected.isfinite().flatten(1).any(1).sum()
        assert written == (ours.slots > 0).sum(), "the reference wrote to its slots"
    live = ours.slots > 0
    assert torch.equal(ours.k_buffer[ours.slots[live].long()], ours.k[live].to(ours.k_buffer.dtype))


def steps_of(
    head_dim: int,
    num_tokens: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    norm: str = "",
    rotary_dim: int = 0,
    interleaved: bool = False,
) -> dict[str, Any]:
    make = partial(random, dtype=dtype, device=device)
    steps: dict[str, Any] = {}
    if norm:
        offset = {"rms": None, "wide": 0.0, "1 + w": 1.0}[norm]
        steps["norm"] = HeadNorm(make(head_dim, seed=5), make(head_dim, seed=6), 1e-6, offset)
    if rotary_dim:
        angles = torch.arange(50).unsqueeze(1) * torch.linspace(1.0, 0.01, rotary_dim // 2)
        cache = torch.cat([angles.cos(), angles.sin()], -1).to(device)
        positions = torch.randint(0, 50, (num_tokens,), generator=torch.Generator().manual_seed(4))
        steps["rotation"] = Rotation(cache, positions.to(device, torch.int32), interleaved)
    return steps


HEAD_DIMS = [16, 32, 64, 80, 96, 112, 128, 192, 256]

HEAD_NORMS = ["", "rms", "1 + w"]


def is_one_of_three(given: dict[str, Any]) -> bool:
    """In the interpreter: every two values of different parameters of `test_heads` come together."""
    number = HEAD_DIMS.index(given["head_dim"]) + HEAD_NORMS.index(given["norm"])
    number += 2 * given["interleaved"] + (given["dtype"] == torch.float16)
    return given["kernel_device"] != "interpreter" or number % 3 == 0


@pytest.mark.each_once
@pytest.mark.long_unless(kept=is_one_of_three)
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("norm", HEAD_NORMS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_heads(
    head_dim: int, norm: str, interleaved: bool, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    options: dict[str, Any] = {"dtype": dtype, "device": kernel_device}
    for rotary_dim in (head_dim, head_dim // 4 * 2):
        steps = steps_of(head_dim, 9, norm=norm, rotary_dim=rotary_dim, interleaved=interleaved, **options)
        check_heads(lambda: Heads(9, 6, 2, head_dim, **options), **steps)


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("norm", ["", "rms", "wide", "1 + w"])
@pytest.mark.parametrize("heads", [(1, 1), (7, 1), (3, 3), (20, 5)])
def test_groups_of_heads_with_and_without_positions(
    heads: tuple[int, int], norm: str, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    options: dict[str, Any] = {"dtype": dtype, "device": kernel_device}
    for num_tokens, rotary_dim in ((1, 24), (1, 0), (37, 10), (37, 0)):
        steps = steps_of(24, num_tokens, norm=norm, rotary_dim=rotary_dim, **options)
        check_heads(lambda num_tokens=num_tokens: Heads(num_tokens, *heads, 24, **options), **steps)


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("norm", ["rms", "1 + w"])
def test_a_norm_after_the_rotation(norm: str, dtype: torch.dtype, kernel_device: torch.device) -> None:
    """Not what it is before: the weights of a pair differ."""
    options: dict[str, Any] = {"dtype": dtype, "device": kernel_device}
    for rotary_dim, interleaved in ((48, False), (20, True), (0, False)):
        steps = steps_of(48, 9, norm=norm, rotary_dim=rotary_dim, interleaved=interleaved, **options)
        last = {**steps, "norm": replace(steps["norm"], after_rotation=True)}
        make = partial(Heads, 9, 6, 2, 48, **options)
        check_heads(make, **last)
        before, after = make(), make()
        before.run("triton", **steps)
        after.run("triton", **last)
        for ours, theirs in ((before.q, after.q), (before.k, after.k)):
            assert torch.allclose(ours, theirs, atol=0.1) == (rotary_dim == 0)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("norm", ["", "rms"])
def test_factors_on_queries(norm: str, dtype: torch.dtype, kernel_device: torch.device) -> None:
    """By position, on what is rotated of q alone."""
    options: dict[str, Any] = {"dtype": dtype, "device": kernel_device}
    off = 1e-6 if dtype == torch.float32 else 2e-2
    for rotary_dim in (48, 20):
        steps = steps_of(48, 9, norm=norm, rotary_dim=rotary_dim, **options)
        factors = torch.linspace(1.0, 3.0, 50).to(kernel_device)
        scaled = {**steps, "rotation": replace(steps["rotation"], q_factors=factors)}
        make = partial(Heads, 9, 6, 2, 48, **options)
        check_heads(make, **scaled)
        plain, other = make(), make()
        plain.run("triton", **steps)
        other.run("triton", **scaled)
        assert torch.equal(plain.k, other.k)
        expected = plain.q.float()
        expected[..., :rotary_dim] *= factors[steps["rotation"].positions.long()].view(-1, 1, 1)
        torch.testing.assert_close(other.q.float(), expected, atol=off, rtol=off)


@pytest.mark.parametrize("stacked", [False, True])
def test_pools_of_another_dtype(stacked: bool, kernel_device: torch.device) -> None:
    options: dict[str, Any] = {"dtype": torch.float32, "device": kernel_device}
    steps = steps_of(32, 9, norm="rms", rotary_dim=32, **options)
    check_heads(lambda: Heads(9, 4, 2, 32, pool_dtype=torch.float16, stacked=stacked, **options), **steps)


K_SCALE, V_SCALE = [0.25, 0.01], [0.5, 1.0]


def stored_e4m3(heads: Heads, impl: Any, **steps: Any) -> tuple[Tensor, Tensor, Tensor]:
    scales = {
        name: torch.tensor(scale, device=heads.q.device)
        for name, scale in (("k_scale", K_SCALE), ("v_scale", V_SCALE))
    }
    return heads.run(impl, **scales, **steps)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.itemsize])


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("head_dim", [16, 80, 128])
@pytest.mark.parametrize("stacked", [False, True])
def test_a_pool_of_e4m3_holds_what_new_tokens_attend_to(
    stacked: bool, head_dim: int, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    """No norm and no rotation: what is stored equals the reference's, and torch's own rounding, bit for bit."""
    options: dict[str, Any] = {"dtype": dtype, "device": kernel_device, "pool_dtype": E4M3, "stacked": stacked}

    def make() -> Heads:
        heads = Heads(37, 6, 2, head_dim, **options)
        heads.packed.mul_(torch.logspace(-4, 3, 37, device=kernel_device)[:, None, None].to(dtype))
        heads.k[5, 0, 3], heads.k[6, 1, 2], heads.v[7, 0, 1] = torch.nan, torch.inf, -torch.inf
        heads.k[8, 0, 0], heads.v[9, 1, 0], heads.q[3, 0, 1] = 6e4, -6e4, 3e38 if dtype == torch.bfloat16 else 1
        return heads

    given, ours, theirs = make(), make(), make()
    for heads, impl in ((ours, "triton"), (theirs, "torch")):
        q, k, v = stored_e4m3(heads, impl)
        assert q.dtype == k.dtype == v.dtype == (torch.float16 if dtype == torch.bfloat16 else dtype)
        assert [x.data_ptr() for x in (q, k, v)] == [x.data_ptr() for x in (heads.q, heads.k, heads.v)]
        torch.testing.assert_close(q, in_float16(given.q) if dtype == torch.bfloat16 else given.q)
        live = heads.slots > 0
        for new, buffer, value, scale in (
            (k, heads.k_buffer, given.k, K_SCALE),
            (v, heads.v_buffer, given.v, V_SCALE),
        ):
            codes = quantise(value, torch.tensor(scale, device=kernel_device))
            assert torch.equal(bits(buffer[heads.slots[live].long()]), bits(codes[live]))
            torch.testing.assert_close(new.float(), codes.float(), atol=0, rtol=0, equal_nan=True)
            assert codes.float().abs().nan_to_num(0).max() == 448, "something saturates"
        assert k.isnan().sum() == 2
        assert v.isnan().sum() == 1
    for name in ("k_buffer", "v_buffer"):
        assert torch.equal(bits(getattr(ours, name)[1:]), bits(getattr(theirs, name)[1:])), name


@pytest.mark.each_once
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize(("rotary_dim", "interleaved"), [(0, False), (80, False), (40, False), (80, True)])
@pytest.mark.parametrize("norm", ["", "rms", "1 + w"])
def test_a_pool_of_e4m3_behind_norm_and_rotation(
    norm: str, rotary_dim: int, interleaved: bool, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    """A sum in another order may change how a number rounds, to the next one."""
    options: dict[str, Any] = {"dtype": dtype, "device": kernel_device}
    steps = steps_of(80, 37, norm=norm, rotary_dim=rotary_dim, interleaved=interleaved, **options)
    ours, theirs = (Heads(37, 6, 2, 80, pool_dtype=E4M3, **options) for _ in range(2))
    new, expected = stored_e4m3(ours, "triton", **steps), stored_e4m3(theirs, "torch", **steps)
    assert_same(new[0], expected[0])
    for x, y in zip(new[1:], expected[1:], strict=True):
        torch.testing.assert_close(x, y, atol=2e-3, rtol=0.13)
        assert (x == y).float().mean() > 0.99
    live = ours.slots > 0
    for x, buffer in ((new[1], ours.k_buffer), (new[2], ours.v_buffer)):
        assert torch.equal(buffer[ours.slots[live].long()].float(), x[live].float())


def test_scales_and_pools_of_e4m3_go_together(kernel_device: torch.device) -> None:
    options: dict[str, Any] = {"dtype": torch.float32, "device": kernel_device}
    for impl in ("torch", "triton"):
        with pytest.raises(ValueError, match=r"k_scale is None, but the pool's k holds torch\.float8_e4m3fn"):
            Heads(3, 4, 2, 32, pool_dtype=E4M3, **options).run(impl)
        with pytest.raises(ValueError, match=r"but the pool's k holds torch\.float32"):
            stored_e4m3(Heads(3, 4, 2, 32, **options), impl)
        with pytest.raises(ValueError, match=r"k_scale must be contiguous float32 \[4\]"):
            stored_e4m3(Heads(3, 4, 4, 32, pool_dtype=E4M3, **options), impl)


def test_every_number_of_e4m3_is_rounded_to(kernel_device: torch.device) -> None:
    """All numbers, the middles between neighbours and what lies beside them, against a search for the nearest."""
    codes = torch.arange(127, dtype=torch.uint8).view(E4M3).float()
    middles = (codes[1:] + codes[:-1]) / 2
    x = torch.cat([codes, middles, middles.nextafter(torch.tensor(0.0)), middles.nextafter(torch.tensor(1e3))])
    x = torch.cat([x, -x])
    x = torch.cat([x, torch.zeros(-len(x) % 16)])
    distance = (x.abs()[:, None] - codes).abs()
    nearest = distance == distance.min(1, keepdim=True).values
    even = nearest & ((torch.arange(127) % 2 == 0) | (nearest.sum(1, keepdim=True) == 1))
    expected = codes[even.int().argmax(1)].copysign(x).view(-1, 1, 16)
    given = x.view(-1, 1, 16).to(kernel_device)
    slots = torch.arange(1, len(given) + 1, dtype=torch.int32, device=kernel_device)
    scale = torch.ones(1, device=kernel_device)
    for impl in ("torch", "triton"):
        k, v, pool = given.clone(), given.clone(), torch.zeros(2, len(given) + 1, 1, 16, device=kernel_device)
        pool = pool.to(E4M3)
        kv = KVView(*pool, slots[None], scale, scale)
        qk_norm_rope_store(given.clone(), k, v, kv, slots, impl=impl)
        for stored in (k, v, pool[0, 1:].float(), pool[1, 1:].float()):
            assert torch.equal(bits(stored.cpu()), bits(expected)), impl


def test_no_tokens_write_nothing(kernel_device: torch.device) -> None:
    heads = Heads(0, 4, 2, 32, dtype=torch.float32, device=kernel_device)
    for norm in ("", "rms"):
        heads.run("triton", **steps_of(32, 0, norm=norm, rotary_dim=32, dtype=torch.float32, device=kernel_device))
    assert heads.k_buffer.isnan().all()


def test_heads_that_cannot_be_read_are_refused(kernel_device: torch.device) -> None:
    options: dict[str, Any] = {"dtype": torch.float32, "device": kernel_device}
    steps = steps_of(32, 9, norm="rms", rotary_dim=32, **options)
    norm, rotation = steps["norm"], steps["rotation"]

    def run(change: Callable[[Heads], None], **changed: Any) -> None:
        heads = Heads(9, 4, 2, 32, **options)
        change(heads)
        heads.run("triton", **{**steps, **changed})

    def keep(heads: Heads) -> None:
        pass

    refused: list[tuple[Callable[[Heads], None], dict[str, Any], str]] = [
        (
            lambda h: setattr(h, "q", h.q.transpose(1, 2).contiguous().transpose(1, 2)),
            {},
            "q must have contiguous",
        ),
        (lambda h: setattr(h, "k", h.packed[:, 1::2]), {}, "k must have contiguous heads of 32 elements"),
        (lambda h: setattr(h, "k", h.k[..., :16]), {}, "k must have contiguous heads of 32 elements"),
        (lambda h: setattr(h, "v", h.v[:8]), {}, "q, k and v disagree"),
        (lambda h: setattr(h, "v", h.v.half()), {}, "q, k and v disagree"),
        (lambda h: setattr(h, "v_buffer", h.v_buffer[:, :1]), {}, "the pool has 2 and 1 heads, k has 2"),
        (keep, {"norm": replace(norm, k_weight=norm.k_weight[:16])}, "k_weight must be contiguous"),
        (
            keep,
            {"rotation": replace(rotation, cos_sin_cache=torch.ones(9, 34, device=kernel_device))},
            "at most 32",
        ),
    ]
    for change, changed, message in refused:
        with pytest.raises(ValueError, match=message):
            run(change, **changed)


@pytest.mark.gpu
@pytest.mark.whole_gpu
@pytest.mark.parametrize("stacked", [False, True])
def test_slots_beyond_two_to_the_31_elements(stacked: bool) -> None:
    device, num_kv_heads, head_dim = torch.device("cuda"), 8, 128
    num_slots = 2**31 // (num_kv_heads * head_dim) + 8
    shape = (num_slots, 2, num_kv_heads, head_dim) if stacked else (2, num_slots, num_kv_heads, head_dim)
    pool = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    heads = Heads(3, 32, num_kv_heads, head_dim, dtype=torch.bfloat16, device=device)
    heads.k_buffer, heads.v_buffer = pool.unbind(1 if stacked else 0)
    heads.slots = torch.tensor([num_slots - 1, 3, num_slots - 5], dtype=torch.int32, device=device)
    heads.run("triton", **steps_of(head_dim, 3, norm="rms", rotary_dim=128, dtype=torch.bfloat16, device=device))
    assert torch.equal(heads.k_buffer[heads.slots.long()], heads.k)
    assert torch.equal(heads.v_buffer[heads.slots.long()], heads.v)
    assert pool.count_nonzero(dim=-1).count_nonzero() == 2 * 3 * num_kv_heads
