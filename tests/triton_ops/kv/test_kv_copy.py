"""kv_copy, reference and kernel, against a loop over slots; on a GPU also to and from pinned host memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from triton_ops.implementation import Impl
from triton_ops.kv.kv_copy import kv_copy

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8]
# One head and element; rows of 16 bytes and of fewer; of 2 KB; of 5 * 256 bytes; longer than a tile.
HEADS = [(1, 1), (2, 4), (1, 7), (8, 128), (8, 80), (3, 5), (80, 128)]
GPU, HOST = "gpu", "host"


@pytest.fixture(params=["torch", "triton"])
def impl(request: pytest.FixtureRequest) -> Impl:
    which: Impl = request.param
    return which


def kv(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """`[num_layers, 2, num_slots, heads, head_dim]` of random bytes: NaN's among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-128, 128, (*shape[:-1], shape[-1] * dtype.itemsize), generator=generator)
    return values.to(torch.int8).view(dtype)


def by_token(x: Tensor, spare: int = 0) -> Tensor:
    """The same, in memory that has a token's KV together, with `spare` elements between tokens."""
    num_layers, _, num_slots, *head = x.shape
    each = 2 * num_layers * head[0] * head[1]
    memory = torch.zeros(num_slots, each + spare, dtype=torch.uint8 if x.dtype.itemsize == 1 else x.dtype)
    view = memory.view(x.dtype)[:, :each].view(num_slots, num_layers, 2, *head).permute(1, 2, 0, 3, 4)
    as_bytes(view).copy_(as_bytes(x))
    return view


def as_bytes(x: Tensor) -> Tensor:
    """Every bit counts, also of a NaN."""
    return x.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[x.dtype.itemsize])


def slot_list(num_slots: int, count: int, seed: int = 1) -> Tensor:
    return torch.randperm(num_slots, generator=torch.Generator().manual_seed(seed))[:count].int()


def check(
    source: Tensor, source_slots: Tensor | None, target: Tensor, target_slots: Tensor | None, impl: Impl
) -> None:
    """The named slots have arrived, and nothing else has changed."""
    source_before, expected = as_bytes(source).cpu().clone(), as_bytes(target).cpu().clone()
    given = source_slots if source_slots is not None else target_slots
    assert given is not None
    for i in range(len(given)):
        start = i if source_slots is None else int(source_slots[i])
        end = i if target_slots is None else int(target_slots[i])
        expected[:, :, end] = source_before[:, :, start]
    kv_copy(source, source_slots, target, target_slots, impl=impl)
    if target.device.type == "cpu" and torch.cuda.is_available():
        torch.cuda.synchronize()
    assert torch.equal(as_bytes(target).cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_slots_of_a_pool_to_another(
    heads: tuple[int, int], dtype: torch.dtype, impl: Impl, kernel_device: torch.device
) -> None:
    source, target = kv((3, 2, 11, *heads), dtype).to(kernel_device), kv((3, 2, 9, *heads), dtype, 1)
    given = slot_list(11, 7).to(kernel_device), slot_list(9, 7, 2).to(kernel_device)
    check(source, given[0], target.to(kernel_device), given[1], impl)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("spare", [0, 1, 4, 64])
def test_layouts(spare: int, dtype: torch.dtype, impl: Impl, kernel_device: torch.device) -> None:
    """Memory by token, with rows that begin at multiples of 16 bytes and of less; every second head and layer."""
    pool, tokens = kv((4, 2, 13, 2, 16), dtype), by_token(kv((4, 2, 7, 2, 16), dtype, 1), spare)
    memory = torch.empty(7, tokens.stride(2), dtype=dtype, device=kernel_device)
    on_device = memory.as_strided(tokens.shape, tokens.stride())
    as_bytes(on_device).copy_(as_bytes(tokens))
    pool, some, every = pool.to(kernel_device), slot_list(13, 7).to(kernel_device), slot_list(7, 7, 3)
    check(pool, some, on_device, every.to(kernel_device), impl)
    check(on_device, every.to(kernel_device), pool, some, impl)
    check(pool[::2], some, on_device[2:], every.to(kernel_device), impl)
    check(pool[:, :, ::3], every[:4].to(kernel_device) % 4, pool.clone(), some[:4], impl)
    check(pool[:, :, :, 1:], some, pool.clone()[:, :, :, :1], some, impl)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_contiguous_buffers_need_no_slots(count: int, impl: Impl, kernel_device: torch.device) -> None:
    pool, buffer = kv((2, 2, 9, 2, 8), torch.float16), kv((2, 2, 5, 2, 8), torch.float16, 1)
    given = slot_list(9, count).to(kernel_device)
    check(pool.to(kernel_device), given, buffer.to(kernel_device), None, impl)
    check(buffer.to(kernel_device), None, pool.to(kernel_device), given, impl)


def test_within_a_pool(impl: Impl, kernel_device: torch.device) -> None:
    pool, slots = kv((3, 2, 40, 2, 16), torch.float32).to(kernel_device), slot_list(40, 40).to(kernel_device)
    check(pool, slots[:20], pool, slots[20:], impl)


def test_one_source_slot_for_many(impl: Impl, kernel_device: torch.device) -> None:
    source, target = kv((3, 2, 4, 2, 16), torch.float32), kv((3, 2, 40, 2, 16), torch.float32, 1)
    given = torch.full((40,), 3, dtype=torch.int32, device=kernel_device)
    check(source.to(kernel_device), given, target.to(kernel_device), slot_list(40, 40).to(kernel_device), impl)


def test_more_tiles_than_programs(impl: Impl, kernel_device: torch.device) -> None:
    """A program goes round more than once, and the last tile is not full."""
    source, target = kv((5, 2, 301, 4, 64), torch.float16), kv((5, 2, 301, 4, 64), torch.float16, 1)
    given = slot_list(301, 299).to(kernel_device)
    check(source.to(kernel_device), given, target.to(kernel_device), given.flip(0), impl)


@pytest.mark.parametrize("shape", [(0, 2, 4, 2, 8), (3, 2, 4, 0, 8)])
def test_nothing_to_copy(shape: tuple[int, ...], impl: Impl, kernel_device: torch.device) -> None:
    empty = torch.empty(shape, device=kernel_device)
    kv_copy(empty, slot_list(4, 3).to(kernel_device), empty, None, impl=impl)


def test_what_it_refuses(impl: Impl, kernel_device: torch.device) -> None:
    pool = torch.zeros(3, 2, 8, 2, 4, device=kernel_device)
    slots = torch.arange(4, dtype=torch.int32, device=kernel_device)
    for wrong in (pool[0], pool[:, :1], pool[None]):
        with pytest.raises(
            ValueError, match=r"source must be \[num_layers, 2, num_slots, num_kv_heads, head_dim\]"
        ):
            kv_copy(wrong, slots, pool, slots, impl=impl)
    for wrong in (
        pool.transpose(3, 4),
        pool[..., ::2],
        torch.zeros(3, 2, 8, 4, 4, device=kernel_device)[..., ::2, :],
    ):
        with pytest.raises(ValueError, match=r"target must have contiguous heads"):
            kv_copy(pool, slots, wrong, slots, impl=impl)
    for wrong in (pool.half(), pool[:2], pool[:, :, :, :1], pool[..., :1].contiguous()):
        with pytest.raises(ValueError, match=r"source and target disagree: \[3, 2, 8, 2, 4\] torch.float32, \["):
            kv_copy(pool, slots, wrong, slots, impl=impl)
    for not_slots in (slots.long(), slots[None], torch.cat((slots, slots))[::2]):
        with pytest.raises(ValueError, match=r"target_slots must be contiguous \[n\] in torch.int32 on"):
            kv_copy(pool, slots, pool, not_slots, impl=impl)
    with pytest.raises(ValueError, match=r"must name as many slots, but name \[3, 4\]"):
        kv_copy(pool, slots, pool, slots[:3], impl=impl)
    with pytest.raises(ValueError, match=r"must name as many slots, but name \[\]"):
        kv_copy(pool, None, pool, None, impl=impl)
    with pytest.raises(ValueError, match=r"source has 3 slots, fewer than 4"):
        kv_copy(pool[:, :, :3], None, pool, slots, impl=impl)


# --- to and from host memory ---


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("pinned_is_by_token", [True, False])
def test_pinned_memory(pinned_is_by_token: bool, heads: tuple[int, int], dtype: torch.dtype, impl: Impl) -> None:
    pool, host = kv((3, 2, 50, *heads), dtype).cuda(), kv((3, 2, 40, *heads), dtype, 1)
    if pinned_is_by_token:
        host = host.permute(2, 0, 1, 3, 4).contiguous().pin_memory().permute(1, 2, 0, 3, 4)
    else:
        host = host.pin_memory()
    pool_slots, host_slots = slot_list(50, 33).cuda(), slot_list(40, 33, 2).cuda()
    check(pool, pool_slots, host, host_slots, impl)
    check(host, host_slots, pool, pool_slots.flip(0), impl)
    check(pool, pool_slots, host, None, impl)
    check(host, None, pool, pool_slots, impl)


@pytest.mark.gpu
def test_it_runs_on_the_current_stream() -> None:
    """What is queued before it on its stream happens before it; the host does not wait."""
    pool = torch.zeros(4, 2, 1000, 8, 128, dtype=torch.bfloat16, device="cuda")
    host = torch.zeros(1000, 4, 2, 8, 128, dtype=torch.bfloat16).pin_memory().permute(1, 2, 0, 3, 4)
    slots = slot_list(1000, 1000).cuda()
    kv_copy(pool, slots, host, slots, impl="triton")  # compiled
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        pool.fill_(1.0)
        kv_copy(pool, slots, host, slots, impl="triton")
    assert not host.any(), "it has waited, or has overtaken its stream"
    stream.synchronize()
    assert (host == 1.0).all()


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_offsets_beyond_2_to_the_31() -> None:
    """Rows of 65 bytes, which are copied byte by byte: the offsets count bytes."""
    shape = (2, 2, 2**24 + 100, 1, 65)  # 4.4e9
    pool = torch.zeros(shape, dtype=torch.int8, device="cuda")
    far = torch.arange(shape[2] - 8, shape[2], dtype=torch.int32, device="cuda")
    values = kv((2, 2, 8, 1, 65), torch.int8).cuda()
    kv_copy(values, None, pool, far, impl="triton")
    assert torch.equal(pool[:, :, -8:], values)
    assert not pool[:, :, :-8].any()
    back = torch.zeros_like(values)
    kv_copy(pool, far, back, None, impl="triton")
    assert torch.equal(back, values)


@pytest.mark.gpu
def test_host_memory_that_is_not_pinned_is_refused() -> None:
    pool, host = torch.zeros(2, 2, 4, 1, 8, device="cuda"), torch.zeros(2, 2, 4, 1, 8)
    slots = torch.arange(4, dtype=torch.int32, device="cuda")
    with pytest.raises(
        ValueError, match="target is in host memory that is not pinned, the other tensor on cuda:0"
    ):
        kv_copy(pool, slots, host, slots, impl="triton")
    with pytest.raises(ValueError, match=r"source_slots must be contiguous \[n\] in torch.int32 on cuda:0"):
        kv_copy(host, slots.cpu(), pool, slots, impl="triton")
