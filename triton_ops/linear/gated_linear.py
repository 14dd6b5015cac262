"""The gate and up projections of a SwiGLU feed-forward layer (Shazeer, 2020) with its activation, in one kernel:
what two would write and read between them is twice as large as the result.

The kernel is for Hopper, in Gluon: some warps load for others, which multiply.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from triton_ops.activations.elementwise import as_rows
from triton_ops.activations.silu_and_mul import silu_and_mul
from triton_ops.implementation import Impl, cdiv, gpu_of, has_gluon, runs_triton, triton
from triton_ops.tuning import TILE_DEPTH, TILE_GROUP, TILE_ROWS, TILE_WARPS, TileConfig

if has_gluon():
    from triton.experimental.gluon import jit
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
else:  # the kernel is defined, though not launched
    jit = triton.jit

_ALIGNMENT = 16  # bytes, of rows and their starts, as Hopper's tensor memory accelerator reads and writes them
_REGISTERS = 168  # a thread of 12 warps, as many as there are; those that load leave all but some to the others
_LOADING_REGISTERS = 40


def gated_linear(x: Tensor, weight: Tensor, config: TileConfig, *, impl: Impl = "auto") -> Tensor:
    """`silu_and_mul(x W^T)`, rounded where that rounds: `[..., N]` in x's dtype. Without Gluon it is a product and
    an activation.

    Args:
        x: `[..., K]`, float16 or bfloat16; K a multiple of 8. Rows that are not contiguous, or do not begin at
            multiples of 16 bytes, are copied first.
        weight: gate | up, `[2 N, K]` in x's dtype, contiguous; N a multiple of 8.
        config: from `gated_linear_config`.

    Raises ValueError where shapes or dtypes disagree.
    """
    _check(x, weight)
    if runs_triton(impl, x.device) and has_gluon():
        return _launch(x, weight, config)
    return silu_and_mul(linear(x, weight), impl=impl)


def _check(x: Tensor, weight: Tensor) -> None:
    if x.dtype != weight.dtype or x.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"x and weight must be float16 or bfloat16 both, but are {x.dtype} and {weight.dtype}")
    (num_outputs, depth), size = weight.shape, x.shape[-1]
    wrong = depth != size or depth % 8 or num_outputs % 16
    if wrong or not weight.is_contiguous() or _is_unaligned(weight):
        raise ValueError(
            f"weight must be contiguous [2 N, {size}], N and {size} multiples of 8, and begin at a multiple of "
            f"{_ALIGNMENT} bytes, but is {[*weight.shape]} with strides {[*weight.stride()]}"
        )


def _launch(x: Tensor, weight: Tensor, config: TileConfig) -> Tensor:
    """Descriptors are made here, and travel with the launch's arguments: a captured launch keeps them."""
    num_columns = len(weight) // 2
    out = x.new_empty(*x.shape[:-1], num_columns)
    if not out.numel():
        return out
    rows, results, weights = _aligned_rows(x), out.view(-1, num_columns), weight.view(2, num_columns, -1)
    num_tiles = cdiv(len(rows), TILE_ROWS) * cdiv(num_columns, config.columns)
    num_programs = min(gpu_of(x.device).num_sms, num_tiles)
    _gated_hopper_kernel[(num_programs,)](
        _descriptor(rows, [TILE_ROWS, TILE_DEPTH]),
        _descriptor(weights, [2, config.columns, TILE_DEPTH]),
        _descriptor(results, [TILE_ROWS, config.columns]),
        len(rows),
        num_columns,
        cdiv(rows.shape[1], TILE_DEPTH),
        num_programs,
        GROUP=TILE_GROUP,
        STAGES=config.stages,
        WARPS=TILE_WARPS,
        LOADING_REGISTERS=_LOADING_REGISTERS,
        num_warps=TILE_WARPS,
        maxnreg=_REGISTERS,
    )
    return out


def _is_unaligned(rows: Tensor) -> bool:
    return bool(rows.data_ptr() % _ALIGNMENT or rows.stride(0) * rows.itemsize % _ALIGNMENT)


def _aligned_rows(x: Tensor) -> Tensor:
    rows = as_rows(x)
    if _is_unaligned(rows) or rows.stride(0) < rows.shape[1]:
        return rows.clone(memory_format=torch.contiguous_format)
    return rows


def _descriptor(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    dtype = gl.bfloat16 if tensor.dtype == torch.bfloat16 else gl.float16
    return TensorDescriptor.from_tensor(tensor, block, gl.NVMMASharedLayout.get_default_for(block, dtype))


@jit(do_not_specialize=["num_rows", "num_programs"])
def _gated_hopper_kernel(
    x,
    weight,
    out,
    num_rows,
    num_columns,
    num_steps,
    num_programs,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
    LOADING_REGISTERS: gl.constexpr,
):
    """A program computes every `num_programs`th tile. One warp loads steps of x and gate and up into a
    ring of `STAGES`, those of the next tile, too, while two warpgroups finish this one.
    """
    x_shape: gl.constexpr = [STAGES] + x.block_type.shape  # noqa: RUF005  # kernels know no star
    weight_shape: gl.constexpr = [STAGES] + weight.block_type.shape  # noqa: RUF005
    x_ring = gl.allocate_shared_memory(x.dtype, x_shape, x.layout)
    weight_ring = gl.allocate_shared_memory(weight.dtype, weight_shape, weight.layout)
    out_tile = gl.allocate_shared_memory(out.dtype, out.block_type.shape, out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    row_tiles = gl.cdiv(num_rows, x.block_type.shape[0])
    column_tiles = gl.cdiv(num_columns, weight.block_type.shape[1])
    tiles = row_tiles, column_tiles, num_programs
    ring = x_ring, weight_ring, full, empty, num_steps
    gl.warp_specialize(
        [
            (_multiply_tiles, (out, out_tile, ring, tiles, GROUP, WARPS)),
            (_load_tiles, (x, weight, ring, tiles, GROUP)),
        ],
        [1],
        [LOADING_REGISTERS],
    )


@jit
def _load_tiles(x, weight, ring, tiles, GROUP: gl.constexpr):
    x_ring, weight_ring, full, empty, num_steps = ring
    row_tiles, column_tiles, num_programs = tiles
    stages: gl.constexpr = x_ring.type.shape[0]
    step = 0
    for tile in range(gl.program_id(0), row_tiles * column_tiles, num_programs):
        row, column = _row_and_column(tile, row_tiles, column_tiles, GROUP)
        for k in range(num_steps):
            stage = step % stages
            start = k * x.block_type.shape[1]
            mbarrier.wait(empty.index(stage), step // stages & 1 ^ 1)
            mbarrier.expect(full.index(stage), x.block_type.nbytes + weight.block_type.nbytes)
            tma.async_copy_global_to_shared(
                x, [row * x.block_type.shape[0], start], full.index(stage), x_ring.index(stage)
            )
            tma.async_copy_global_to_shared(
                weight,
                [0, column * weight.block_type.shape[1], start],
                full.index(stage),
                weight_ring.index(stage),
            )
            step += 1


@jit
def _multiply_tiles(out, out_tile, ring, tiles, GROUP: gl.constexpr, WARPS: gl.constexpr):
    x_ring, weight_ring, full, empty, num_steps = ring
    row_tiles, column_tiles, num_programs = tiles
    stages: gl.constexpr = x_ring.type.shape[0]
    rows: gl.constexpr = out.block_type.shape[0]
    columns: gl.constexpr = out.block_type.shape[1]
    depth: gl.constexpr = x_ring.type.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 2 * columns, 16])
    step = 0
    for tile in range(gl.program_id(0), row_tiles * column_tiles, num_programs):
        row, column = _row_and_column(tile, row_tiles, column_tiles, GROUP)
        total = gl.zeros([rows, 2 * columns], gl.float32, layout)
        for k in range(num_steps):
            stage = step % stages
            mbarrier.wait(full.index(stage), step // stages & 1)
            weights = weight_ring.index(stage).reshape([2 * columns, depth]).permute([1, 0])
            total = warpgroup_mma(x_ring.index(stage), weights, total, is_async=True)
            total = warpgroup_mma_wait(1, deps=(total,))
            # The step before has been multiplied: its place is free.
            mbarrier.arrive(empty.index((step + stages - 1) % stages), count=1, pred=k > 0)
            step += 1
        total = warpgroup_mma_wait(0, deps=(total,))
        mbarrier.arrive(empty.index((step - 1) % stages), count=1)
        gate, up = total.reshape([rows, 2, columns]).permute([0, 2, 1]).split()
        # Rounded as between a product and `silu_and_mul`.
        wide = gate.to(out.dtype).to(gl.float32)
        result = (wide / (1.0 + gl.exp(-wide))).to(out.dtype) * up.to(out.dtype)
        tma.store_wait(0)
        out_tile.store(result)
        fence_async_shared()
        tma.async_copy_shared_to_global(out, [row * rows, column * columns], out_tile)
    tma.store_wait(0)


@jit
def _row_and_column(tile, row_tiles, column_tiles, GROUP: gl.constexpr):
    """Of a tile, in tiles."""
    first = tile // (GROUP * column_tiles) * GROUP
    height = gl.minimum(row_tiles - first, GROUP)
    within = tile % (GROUP * column_tiles)
    return first + within % height, within // height
