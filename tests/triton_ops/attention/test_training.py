"""Attention with gradients against its reference in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.attention_checks import interpreted_only
from triton_ops.attention import training_kernels
from triton_ops.attention.training import attention_with_grad, training_reference
from triton_ops.implementation import Impl, triton

SCALE = 0.3
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Shape:
    """`batch` times `num_heads`, of which `group` share a KV head; heads of `head_dim`."""

    len_q: int
    len_k: int
    head_dim: int = 32
    num_heads: int = 2
    group: int = 1
    batch: int = 1

    def __str__(self) -> str:
        words = f"{self.batch}x{self.num_heads}x{self.len_q}x{self.head_dim} on {self.len_k}"
        return words + f" group {self.group}" * (self.group > 1)

    def tensors(self, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        """q, k, v and the gradient of the result."""
        generator = torch.Generator().manual_seed(1)

        def random(num_heads: int, length: int) -> Tensor:
            shape = (self.batch, num_heads, length, self.head_dim)
            return torch.randn(shape, generator=generator).to(device, dtype)

        num_kv_heads = self.num_heads // self.group
        q, k, v = random(self.num_heads, self.len_q), *(random(num_kv_heads, self.len_k) for _ in range(2))
        return [*(x.requires_grad_() for x in (q, k, v)), random(self.num_heads, self.len_q)]


def gradients(attend: Any, q: Tensor, k: Tensor, v: Tensor, d_out: Tensor, **options: Any) -> list[Tensor]:
    """The result, and the gradients of q, k and v."""
    out = attend(q, k, v, scale=SCALE, **options)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), d_out.to(out.dtype))]


def check(tensors: list[Tensor], impl: Impl, *, causal: bool) -> None:
    """Each element is at most as far off as the largest of its tensor allows; one key alone has gradients of 0."""
    expected = gradients(training_reference, *tensors, causal=causal)
    found = gradients(attention_with_grad, *tensors, causal=causal, impl=impl)
    for name, own, reference, like in zip("odkv", found, expected, (tensors[0], *tensors[:3]), strict=True):
        assert (own.dtype, own.shape) == (like.dtype, like.shape)
        error = (own.double() - reference.double()).abs().amax() / reference.abs().amax().clamp(min=1)
        assert error < TOLERANCE[own.dtype], name


SHAPES = [
    Shape(17, 17, head_dim=20),
    Shape(100, 100, num_heads=4, group=2),
    Shape(17, 100, head_dim=64),
    Shape(100, 130, head_dim=16, num_heads=3, group=3, batch=2),
    Shape(1, 100),
    Shape(1, 1, head_dim=16),
    Shape(200, 210, head_dim=16, num_heads=1),  # whole tiles below the diagonal, of queries and of keys
]


@interpreted_only(
    lambda given: given["dtype"] == torch.float32 and (given["causal"] or given["shape"].len_q == 17)
)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_and_gradients(
    shape: Shape, dtype: torch.dtype, causal: bool, impl: Impl, device: torch.device
) -> None:
    check(shape.tensors(device, dtype), impl, causal=causal)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True, scope="module")
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [16, 20, 32, 64, 80, 128])
@pytest.mark.parametrize("lengths", [(1000, 1000), (300, 777), (512, 1024)], ids=str)
def test_results_and_gradients_on_a_gpu(
    lengths: tuple[int, int], head_dim: int, dtype: torch.dtype, causal: bool, impl: Impl, device: torch.device
) -> None:
    check(Shape(*lengths, head_dim, num_heads=8, group=4, batch=2).tensors(device, dtype), impl, causal=causal)


def test_queries_that_see_nothing(impl: Impl, device: torch.device) -> None:
    """More queries than keys: the first ones have no result, and no share in gradients."""
    tensors = Shape(70, 20).tensors(device, torch.float32)
    check(tensors, impl, causal=True)
    out, dq, *_ = gradients(attention_with_grad, *tensors, causal=True, impl=impl)
    assert not out[:, :, :50].any()
    assert not dq[:, :, :50].any()


def test_strides(impl: Impl, device: torch.device) -> None:
    """Views of one packed projection, as a model has them, and a gradient that is one number."""
    packed = torch.randn(2, 40, 8, 16, generator=torch.Generator("cpu").manual_seed(1), device="cpu").to(device)
    views = packed.transpose(1, 2).split([4, 2, 2], dim=1)
    q, k, v = (view.detach().requires_grad_() for view in views)
    check([q, k, v, torch.ones((), device=device).expand(q.shape)], impl, causal=True)
    turned = [x.detach().transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)]
    out, same = (attention_with_grad(*x, scale=SCALE, causal=True, impl=impl) for x in ((q, k, v), turned))
    torch.testing.assert_close(same, out)


def test_equal_inputs_have_equal_gradients(impl: Impl, device: torch.device) -> None:
    tensors = Shape(100, 130, num_heads=4, group=4).tensors(device, torch.float16)
    first, second = (gradients(attention_with_grad, *tensors, causal=True, impl=impl) for _ in range(2))
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("attend", [training_reference, attention_with_grad])
def test_finite_differences(attend: Any, causal: bool) -> None:
    """The reference, and torch's form."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(1, heads, length, 3, dtype=torch.float64, generator=generator).requires_grad_()
        for heads, length in ((2, 4), (1, 5), (1, 5))
    )
    assert torch.autograd.gradcheck(lambda *x: attend(*x, scale=SCALE, causal=causal), (q, k, v))


MUTANTS = {
    "_score_gradients": lambda weights, left, right, means: weights * triton.language.dot(left, right.T),
    "_visible": lambda token, key, len_q, len_k, CAUSAL: key < token + (len_k - len_q),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_found(name: str, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel_device.type == "cuda":
        pytest.skip("the interpreter alone can run a mutant")
    tensors = Shape(40, 40, head_dim=16).tensors(kernel_device, torch.float32)
    check(tensors, "triton", causal=True)
    monkeypatch.setattr(training_kernels, name, MUTANTS[name])
    with pytest.raises(AssertionError):
        check(tensors, "triton", causal=True)


def test_what_the_kernels_cannot_read(impl: Impl, device: torch.device) -> None:
    q, k, v, _ = Shape(3, 3, head_dim=16, num_heads=4, group=2).tensors(device, torch.float32)
    for wrong in (
        (q, k, v[:, :, :2]),
        (q, k.half(), v.half()),
        (q[:, :3], k, v),
        (q[..., :8], k, v),
        (q[:, :, :0], k, v),
        (q[0], k[0], v[0]),
    ):
        with pytest.raises(ValueError, match=r"attention takes q \[batch, num_heads"):
            attention_with_grad(*wrong, scale=SCALE, causal=True, impl=impl)
    if impl == "triton":
        long = q.repeat(1, 1, 1, 9)
        with pytest.raises(ValueError, match="head_dim up to 128"):
            attention_with_grad(long, long, long, scale=SCALE, causal=True, impl=impl)
        with pytest.raises(ValueError, match="float64"):
            attention_with_grad(q.double(), k.double(), v.double(), scale=SCALE, causal=True, impl=impl)
