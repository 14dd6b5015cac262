"""The Triton kernels of norms, activations, soft caps and of what comes before attention, against their torch
references.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.activations import ACT2FN

from triton_ops.activations.gelu_and_mul import gelu_and_mul
from triton_ops.activations.gelu_fast import gelu_fast
from triton_ops.activations.gelu_new import gelu_new
from triton_ops.activations.silu_and_mul import silu_and_mul
from triton_ops.attention.soft_cap import soft_cap
from triton_ops.kv.e4m3 import E4M3, in_float16, quantise
from triton_ops.kv.qk_norm_rope_store import HeadNorm, Rotation, qk_norm_rope_store
from triton_ops.kv.view import KVView
from triton_ops.norms.layer_norm import add_layer_norm, layer_norm
from triton_ops.norms.rms_norm import add_rms_norm, rms_norm
from triton_ops.norms.rms_norm_fp32_weight import (
    add_rms_norm_fp32_weight,
    norm_add_rms_norm_fp32_weight,
    rms_norm_fp32_weight,
    rms_norm_fp32_weight_add,
)

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of the interpreter, on purpose

# The interpreter does not know bfloat16.
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
# Two roundings apart at most.
TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def random(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.to(device, dtype)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Equal but for what the order of a sum changes, which seldom changes how a half rounds."""
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance, equal_nan=True)
    if expected.dtype != torch.float32 and expected.numel() > 50:
        equal = ((actual - expected).abs() < 1e-5) | expected.isnan()
        assert equal.float().mean() > 0.97, "it rounds elsewhere"


# --- norms ---

NORMS: dict[str, tuple[Callable[..., Tensor], Callable[..., tuple[Tensor, Tensor]]]] = {
    "rms": (rms_norm, add_rms_norm),
    "wide rms": (partial(rms_norm_fp32_weight, offset=0.0), partial(add_rms_norm_fp32_weight, offset=0.0)),
    "wide rms, 1 + w": (partial(rms_norm_fp32_weight, offset=1.0), partial(add_rms_norm_fp32_weight, offset=1.0)),
    "layer": (
        lambda x, w, eps, impl: layer_norm(x, w, None, eps, impl=impl),
        lambda x, r, w, eps, impl: add_layer_norm(x, r, w, None, eps, impl=impl),
    ),
    "layer, bias": (
        lambda x, w, eps, impl: layer_norm(x, w, w.flip(0), eps, impl=impl),
        lambda x, r, w, eps, impl: add_layer_norm(x, r, w, w.flip(0), eps, impl=impl),
    ),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(3, 4096), (5, 896), (1, 100), (0, 64), (2, 3, 128), (130, 16), (2, 1), (2, 5376)]
)
@pytest.mark.parametrize("name", NORMS)
def test_norms(name: str, shape: tuple[int, ...], dtype: torch.dtype, kernel_device: torch.device) -> None:
    norm, add_norm = NORMS[name]
    make = partial(random, dtype=dtype, device=kernel_device)
    x, residual, weight = make(*shape) * 3 + 0.5, make(*shape, seed=1), make(shape[-1], seed=2)
    before = x.clone()
    normed = norm(x, weight, 1e-5, impl="triton")
    assert (normed.dtype, normed.shape) == (dtype, x.shape)
    assert_same(normed, norm(x, weight, 1e-5, impl="torch"))
    normed, total = add_norm(x, residual, weight, 1e-5, impl="triton")
    expected, expected_total = add_norm(x, residual, weight, 1e-5, impl="torch")
    assert torch.equal(total, expected_total)
    assert_same(normed, expected)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(3, 4096), (5, 896), (1, 100), (0, 64), (130, 16)])
def test_norms_before_an_addition(
    shape: tuple[int, ...], offset: float, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    make = partial(random, dtype=dtype, device=kernel_device)
    x, residual, before, weight = (
        make(*shape) * 3,
        make(*shape, seed=1),
        make(shape[1], seed=2),
        make(shape[1], seed=3),
    )
    arguments: dict[str, Any] = {"eps": 1e-5, "offset": offset}
    total = rms_norm_fp32_weight_add(x, residual, before, **arguments, impl="triton")
    assert_same(total, rms_norm_fp32_weight_add(x, residual, before, **arguments, impl="torch"))
    normed, same = norm_add_rms_norm_fp32_weight(x, residual, before, weight, **arguments, impl="triton")
    assert torch.equal(same, total)
    assert_same(normed, rms_norm_fp32_weight(total, weight, **arguments, impl="torch"))
    expected, expected_total = norm_add_rms_norm_fp32_weight(
        x, residual, before, weight, **arguments, impl="torch"
    )
    assert_same(total, expected_total)
    torch.testing.assert_close(normed, expected, atol=2 * TOLERANCE[dtype], rtol=2 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 4096), (5, 896), (1, 100), (0, 64), (2, 3, 128), (1, 16), (2, 5376)])
@pytest.mark.parametrize("num_parts", [1, 2, 3, 8])
def test_parts_are_added_as_their_rounded_sum(
    num_parts: int, shape: tuple[int, ...], dtype: torch.dtype, kernel_device: torch.device
) -> None:
    make = partial(random, device=kernel_device)
    parts = make(num_parts, *shape, dtype=torch.float32) * 3
    residual, weight = make(*shape, dtype=dtype, seed=1), make(shape[-1], dtype=dtype, seed=2)
    whole = parts[0].clone()
    for part in parts[1:]:
        whole += part
    for x in (parts, parts.transpose(0, 1).contiguous().transpose(0, 1)):
        for impl in ("triton", "torch"):
            normed, total = add_rms_norm(x, residual, weight, 1e-5, impl=impl)
            expected, expected_total = add_rms_norm(whole.to(dtype), residual, weight, 1e-5, impl=impl)
            assert (normed.dtype, normed.shape) == (dtype, shape)
            assert torch.equal(total, expected_total)
            assert_same(normed, expected)


def test_parts_are_float32_and_of_the_residuals_shape(kernel_device: torch.device) -> None:
    residual = random(4, 8, dtype=torch.float16, device=kernel_device)
    weight = torch.ones(8, dtype=torch.float16, device=kernel_device)
    parts = torch.ones(2, 4, 8, device=kernel_device)
    for wrong in (parts.half(), parts[:, :3], parts[:0], parts[None]):
        with pytest.raises(ValueError, match=r"parts must be \[P, 4, 8\] in torch.float32, but are \["):
            add_rms_norm(wrong, residual, weight, 1e-5, impl="triton")
    with pytest.raises(ValueError, match=r"weight must be contiguous \[8\] in torch.float16"):
        add_rms_norm(parts, residual, weight.float(), 1e-5, impl="triton")
    with pytest.raises(ValueError, match=r"residual must be \[2, 4, 8\]"):
        add_rms_norm_fp32_weight(parts, residual.float(), weight.float(), 1e-5, offset=1.0, impl="triton")


@pytest.mark.parametrize("name", NORMS)
def test_norms_read_strided_rows(name: str, kernel_device: torch.device) -> None:
    """Columns of a packed projection, heads of one, and columns that are not side by side."""
    norm, add_norm = NORMS[name]
    packed = random(5, 6, 32, dtype=torch.float32, device=kernel_device)
    for x in (packed[:, 1:4].flatten(1), packed[:, 1:4], packed.transpose(1, 2), packed[::2, 0]):
        weight = random(x.shape[-1], dtype=torch.float32, device=kernel_device, seed=2)
        assert_same(norm(x, weight, 1e-5, impl="triton"), norm(x, weight, 1e-5, impl="torch"))
        normed, total = add_norm(x, x, weight, 1e-5, impl="triton")
        assert torch.equal(total, x + x)
        assert_same(normed, norm(x + x, weight, 1e-5, impl="torch"))


def test_rows_of_norms_are_apart(kernel_device: torch.device) -> None:
    x = random(40, 48, dtype=torch.float16, device=kernel_device)
    x[3], x[17, 5] = torch.nan, 60000.0
    weight = torch.ones(48, dtype=torch.float16, device=kernel_device)
    normed = rms_norm(x, weight, 1e-6, impl="triton")
    assert normed[3].isnan().all()
    assert normed.isfinite().all(1).sum() == 39
    assert_same(normed, rms_norm(x, weight, 1e-6, impl="torch"))


def test_norms_refuse_what_they_cannot_read(kernel_device: torch.device) -> None:
    x = random(4, 8, dtype=torch.float32, device=kernel_device)
    weight = torch.ones(8, device=kernel_device)
    for wrong in (weight[:7], weight.half(), weight.repeat(2)[::2]):
        with pytest.raises(ValueError, match=r"weight must be contiguous \[8\] in torch.float32"):
            rms_norm(x, wrong, 1e-5, impl="triton")
    with pytest.raises(ValueError, match=r"bias must be contiguous \[8\]"):
        layer_norm(x, weight, weight[:4], 1e-5, impl="triton")
    with pytest.raises(ValueError, match=r"residual must be \[4, 8\] in torch.float32, but is \[3, 8\]"):
        add_rms_norm_fp32_weight(x, x[:3], weight, 1e-5, offset=1.0, impl="triton")
    with pytest.raises(
        ValueError, match=r"rows of 16385 elements of torch.float32 exceed .* limit of 65536 bytes"
    ):
        rms_norm(
            torch.ones(1, 16385, device=kernel_device), torch.ones(16385, device=kernel_device), 0.1, impl="triton"
        )
    with pytest.raises(ValueError, match='impl must be "auto", "torch" or "triton", but is \'cuda\''):
        rms_norm(x, weight, 1e-5, impl="cuda")  # type: ignore[arg-type]


# --- activations ---

ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "silu_and_mul": silu_and_mul,
    "gelu_and_mul": partial(gelu_and_mul, approximate="none"),
    "gelu_and_mul, tanh": partial(gelu_and_mul, approximate="tanh"),
    "gelu_new": gelu_new,
    "gelu_fast": gelu_fast,
    "soft_cap": partial(soft_cap, cap=2.5),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 4096), (4, 2600), (1, 100), (0, 64), (2, 3, 24), (7, 2)])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str, shape: tuple[int, ...], dtype: torch.dtype, kernel_device: torch.device) -> None:
    x = random(*shape, dtype=dtype, device=kernel_device) * 4
    before = x.clone()
    out, expected = (ACTIVATIONS[name](x, impl=impl) for impl in ("triton", "torch"))
    assert (out.dtype, out.shape) == (dtype, expected.shape)
    assert_same(out, expected)
    assert torch.equal(x, before)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_read_strided_rows(name: str, kernel_device: torch.device) -> None:
    packed = random(5, 6, 32, dtype=torch.float32, device=kernel_device)
    for x in (packed[:, 1:4].flatten(1), packed[:, 1:4], packed.transpose(1, 2), packed[::2, 0]):
        assert_same(ACTIVATIONS[name](x, impl="triton"), ACTIVATIONS[name](x, impl="torch"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_at_the_extremes(name: str, dtype: torch.dtype, kernel_device: torch.device) -> None:
    """Where exp overflows, and where x^3 does in half precision."""
    x = torch.tensor(
        [[0.0, 90.0, -90.0, 1e3, -1e3, 6e4, -6e4, 1.0] + [1.0] * 8], dtype=dtype, device=kernel_device
    )
    out = ACTIVATIONS[name](x, impl="triton")
    assert out.isfinite().all()
    torch.testing.assert_close(out, ACTIVATIONS[name](x, impl="torch"))


@pytest.mark.parametrize(("name", "kernel"), [("gelu_new", gelu_new), ("gelu_fast", gelu_fast)])
def test_activations_are_those_of_transformers(
    name: str, kernel: Callable[..., Tensor], kernel_device: torch.device
) -> None:
    x = torch.linspace(-12, 12, 3001, device=kernel_device)
    for impl in ("torch", "triton"):
        torch.testing.assert_close(kernel(x, impl=impl), ACT2FN[name](x), atol=1e-6, rtol=1e-6)


def test_gated_activations_are_those_of_transformers(kernel_device: torch.device) -> None:
    x = torch.linspace(-12, 12, 3000, device=kernel_device).view(2, -1)
    gate, up = x.chunk(2, dim=-1)
    for theirs, ours in (
        ("silu", "silu_and_mul"),
        ("gelu", "gelu_and_mul"),
        ("gelu_pytorch_tanh", "gelu_and_mul, tanh"),
    ):
        expected = ACT2FN[theirs](gate) * up
        torch.testing.assert_close(ACTIVATIONS[ours](x, impl="triton"), expected, atol=1e-5, rtol=1e-6)


def test_gates_are_of_even_size(kernel_device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"gate \| up must be of even size, but is of 5"):
        silu_and_mul(torch.ones(2, 5, device=kernel_device), impl="triton")


# --- what comes before attention ---


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


@pytest.mark.long_unless(kept=is_one_of_three)
@pytest.mark.parametrize("dtype", DTYPES)
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", ["", "rms", "wide", "1 + w"])
@pytest.mark.parametrize("heads", [(1, 1), (7, 1), (3, 3), (20, 5)])
def test_groups_of_heads_with_and_without_positions(
    heads: tuple[int, int], norm: str, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    options: dict[str, Any] = {"dtype": dtype, "device": kernel_device}
    for num_tokens, rotary_dim in ((1, 24), (1, 0), (37, 10), (37, 0)):
        steps = steps_of(24, num_tokens, norm=norm, rotary_dim=rotary_dim, **options)
        check_heads(lambda num_tokens=num_tokens: Heads(num_tokens, *heads, 24, **options), **steps)


@pytest.mark.parametrize("stacked", [False, True])
def test_pools_of_another_dtype(stacked: bool, kernel_device: torch.device) -> None:
    options: dict[str, Any] = {"dtype": torch.float32, "device": kernel_device}
    steps = steps_of(32, 9, norm="rms", rotary_dim=32, **options)
    check_heads(lambda: Heads(9, 4, 2, 32, pool_dtype=torch.float16, stacked=stacked, **options), **steps)


# --- a pool of e4m3 ---

K_SCALE, V_SCALE = [0.25, 0.01], [0.5, 1.0]


def stored_e4m3(heads: Heads, impl: Any, **steps: Any) -> tuple[Tensor, Tensor, Tensor]:
    scales = {
        name: torch.tensor(scale, device=heads.q.device)
        for name, scale in (("k_scale", K_SCALE), ("v_scale", V_SCALE))
    }
    return heads.run(impl, **scales, **steps)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.itemsize])


@pytest.mark.parametrize("dtype", DTYPES)
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


@pytest.mark.parametrize("dtype", DTYPES)
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


# --- offsets that do not fit in 32 bits ---


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_rows_beyond_two_to_the_31_elements() -> None:
    device = torch.device("cuda")
    size = 8192
    x = torch.zeros(2**31 // size + 3, size, dtype=torch.bfloat16, device=device)
    x[-3:] = random(3, size, dtype=torch.bfloat16, device=device)
    weight = random(size, dtype=torch.bfloat16, device=device, seed=1)
    assert_same(rms_norm(x, weight, 1e-5, impl="triton")[-3:], rms_norm(x[-3:], weight, 1e-5, impl="torch"))
    for activation in ACTIVATIONS.values():
        out = activation(x, impl="triton")[-3:].clone()
        assert_same(out, activation(x[-3:], impl="torch"))


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
