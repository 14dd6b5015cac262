"""Launch configurations of all kernels: tile sizes, warps, stages and register limits.

Numbers for Hopper were measured on an H200 (docs/lab-notebook), except those of float32 and ALiBi. Numbers for
other NVIDIA GPUs are the ones that compile without spills. Other vendors have none yet: the functions that depend
on the GPU raise ValueError for them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch

from triton_ops.implementation import FEW_ROWS, GPU, Vendor, cdiv, next_power_of_2, tl


def _check_vendor(gpu: GPU) -> None:
    if gpu.vendor is not Vendor.NVIDIA:
        raise ValueError(f"triton_ops/tuning.py has no configurations for {gpu.vendor.name} GPUs")


# --- attention ---


@dataclass(frozen=True)
class AttentionConfig:
    """A tile of `block_m` rows (query rows times the heads of a group) reads `block_n` keys a step.

    `num_warps` and `num_stages` are Triton's. ptxas uses up to `max_registers` a thread; without a limit it may
    spill a little to save some. With 128 registers two programs of 8 warps run side by side on a multiprocessor,
    with 168 three of 4 warps.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None

    def block_rows(self, group: int) -> int:
        """The rows of a tile: at least those of one query row, of which `group` heads read a KV head."""
        return max(self.block_m, next_power_of_2(group))

    def launch_arguments(self) -> dict[str, Any]:
        """The kernel's keyword arguments, except for BLOCK_M."""
        return {
            "BLOCK_N": self.block_n,
            "NUM_STAGES": self.num_stages,
            "num_warps": self.num_warps,
            "maxnreg": self.max_registers,
        }


DECODE_ROWS = 16  # of a tile, the fewest that tl.dot takes; an item with more rows has several tiles
SHORT_ROWS = 64  # extends with no more rows than this take short tiles
# Precision of the product that adds partial results: tf32 is more precise than a result in bfloat16.
MERGE_PRECISION = {torch.bfloat16: "tf32", torch.float16: "tf32x3", torch.float32: "ieee"}
MERGE_PARTIALS = 16  # partial results that `merge_partials` reads at a time
MERGE_WARPS = 2


def decode_config(
    gpu: GPU,
    head_dim: int,
    dtype: torch.dtype,
    *,
    alibi: bool,
    window: bool = False,
    e4m3: bool = False,
    tails: bool = False,
) -> AttentionConfig:
    """For queries of `dtype`. `e4m3`: the pool's dtype. `tails`: items are short and merge partial results."""
    _check_vendor(gpu)
    if dtype == torch.float32:
        return AttentionConfig(DECODE_ROWS, 16, num_warps=8, num_stages=1, max_registers=128)
    if e4m3:
        # With 128 registers four programs run side by side.
        registers = 255 if tails else 168 if alibi or window or head_dim > 128 else 128
        return AttentionConfig(DECODE_ROWS, 64 if head_dim <= 128 else 32, 4, 3, registers)
    if head_dim > 128:
        if gpu.has_wgmma:
            return AttentionConfig(DECODE_ROWS, 32, num_warps=4, num_stages=2)
        return AttentionConfig(DECODE_ROWS, 32, num_warps=8, num_stages=2, max_registers=255)
    few_warps = gpu.has_wgmma and not (alibi and head_dim > 64)
    if few_warps and tails:
        # One warp has too few registers to merge in tf32x3.
        num_warps = 2 if dtype == torch.float16 and head_dim > 64 else 1
        return AttentionConfig(DECODE_ROWS, 32, num_warps, num_stages=2)
    if few_warps:
        return AttentionConfig(DECODE_ROWS, 64, num_warps=2, num_stages=3, max_registers=168)
    needs_more = alibi or head_dim != next_power_of_2(head_dim)
    return AttentionConfig(DECODE_ROWS, 64, 4, 2, max_registers=168 if needs_more else None)


def extend_config(
    gpu: GPU, head_dim: int, dtype: torch.dtype, *, short: bool, alibi: bool = False, e4m3: bool = False
) -> AttentionConfig:
    """For queries of `dtype`. `short` tiles have at most `SHORT_ROWS` rows; `block_m` is the same for `alibi`."""
    _check_vendor(gpu)
    if dtype == torch.float32:
        tile = 32 if head_dim <= 64 else 16
        return AttentionConfig(tile, tile, 8, 1, max_registers=128)
    if e4m3 and gpu.has_wgmma:
        if head_dim > 128:
            return AttentionConfig(64 if short else 128, 32 if short else 16, 8, 1 if head_dim == 256 else 2)
        return AttentionConfig(64, 32, 4, 3, 168) if short else AttentionConfig(128, 32, 8, 2, 128)
    if not gpu.has_wgmma:
        if head_dim <= 64:
            return AttentionConfig(64 if short else 128, 64, 8, 2, max_registers=255)
        return AttentionConfig(64, 64 if head_dim <= 128 else 32, 8, 2)
    if head_dim > 128:
        return AttentionConfig(64, 32, 8, 2) if short else AttentionConfig(128, 16 if head_dim < 256 else 32, 8, 2)
    if short:
        return AttentionConfig(64, 32, 4, 3, max_registers=168)
    if head_dim <= 64:
        return AttentionConfig(128, 64, 4, 3)
    # Padded heads need registers for their masks, ALiBi for its distances.
    return AttentionConfig(128, 32, 8, 3, max_registers=128 if head_dim == 128 and not alibi else None)


def shared_config(gpu: GPU, head_dim: int, dtype: torch.dtype, *, e4m3: bool = False) -> AttentionConfig:
    """For queries of `dtype`. `e4m3`: the pool's dtype, on which `block_m` does not depend.

    Of Hopper's, only those of heads from 65 to 128 were measured.
    """
    _check_vendor(gpu)
    if dtype == torch.float32:
        tile = 32 if head_dim <= 64 else 16
        return AttentionConfig(tile, tile, 8, 1, max_registers=128)
    if head_dim > 128:
        if not gpu.has_wgmma:
            return AttentionConfig(32, 16, 8, 2, max_registers=255)
        return AttentionConfig(128, 16 if head_dim < 256 else 32, 8, 2)
    if not gpu.has_wgmma:
        return AttentionConfig(128, 64 if head_dim <= 64 else 32, 8, 2, max_registers=255)
    if head_dim <= 64:
        return AttentionConfig(128, 64, 4, 3)
    return AttentionConfig(128, 32, 8, 3, max_registers=None if e4m3 else 128)


def ordered_attention_config(
    gpu: GPU,
    head_dim: int,
    dtype: torch.dtype,
    *,
    kind: Literal["decode", "long", "short", "shared"],
    alibi: bool = False,
) -> AttentionConfig:
    """For deterministic attention of queries of `dtype`: tiles of decodes, of long and short extends, of shared
    items. The last three are those of the other kernels, and spill nothing within a superblock; that of decodes
    was the fastest on an H100 of those with 1, 2 and 4 warps. `block_n` is 16, 32 or 64.
    """
    if kind == "shared":
        return shared_config(gpu, head_dim, dtype)
    if kind != "decode":
        return extend_config(gpu, head_dim, dtype, short=kind == "short", alibi=alibi)
    _check_vendor(gpu)
    if dtype == torch.float32:
        return AttentionConfig(DECODE_ROWS, 16, num_warps=8, num_stages=1, max_registers=128)
    return AttentionConfig(DECODE_ROWS, 64 if head_dim <= 128 else 32, num_warps=4, num_stages=3)


def training_config(
    gpu: GPU, head_dim: int, dtype: torch.dtype, *, kind: Literal["forward", "dq", "dkv"]
) -> AttentionConfig:
    """For the kernels of `attention_with_grad`, heads of up to 128. "dkv": a tile of `block_n` keys reads
    `block_m` rows of queries a step. Of the backward pass none was measured. On Hopper tiles have 128 rows, as
    those of 64 would read twice as much of L2, and of small heads two or three run side by side on a
    multiprocessor.
    """
    if kind == "forward":
        return extend_config(gpu, head_dim, dtype, short=False)
    _check_vendor(gpu)
    if dtype == torch.float32:
        tile = 32 if head_dim <= 64 else 16
        return AttentionConfig(tile, tile, 8, 1)
    if not gpu.has_wgmma:
        return AttentionConfig(64, 64, 4 if head_dim <= 32 else 8, 2)
    if head_dim > 64:
        return AttentionConfig(128, 64, 8, 2) if kind == "dq" else AttentionConfig(32, 128, 8, 2)
    if kind == "dq":
        return AttentionConfig(128, 64, 8, 3, max_registers=128)
    if head_dim in (16, 32):  # padded heads need registers for their masks
        return AttentionConfig(32, 128, 4, 3, max_registers=168)
    return AttentionConfig(32, 128, 8, 3, max_registers=128)


# --- linear ---

SPLIT_K_COLUMNS = 64  # of the output a program: the rows of a wgmma, which a small batch would not fill
SPLIT_K_WARPS = 4
MAX_PARTS = 8  # reading them must stay cheap beside the weight


@dataclass(frozen=True)
class SplitKConfig:
    """How a product is cut.

    Attributes:
        rows: of x a program, a power of two from 16 on.
        depth: elements of the sum that are loaded at a time, a power of two from 16 on.
        stages: loads under way at a time.
        part_depth: elements of the sum a part, a multiple of `depth`; the last part may have fewer.
    """

    rows: int
    depth: int
    stages: int
    part_depth: int


@dataclass(frozen=True)
class _SplitKTile:
    """`max_programs`: about the number that an H200 runs at a time; more would have to wait."""

    rows: int
    depth: int
    stages: int
    max_programs: int


# By the largest number of x's rows: the fastest of those measured on an H200 in bfloat16, for outputs of 1024
# columns (sums of 2048 and 3072), of 4096 (sums of 4096), and of 4096 with deep sums (14336). Sums of 1024 gained
# little or nothing, nor did 256 rows of 4096 columns.
_FEW_COLUMNS = {
    16: _SplitKTile(16, 128, 5, 192),
    32: _SplitKTile(32, 64, 5, 192),
    64: _SplitKTile(64, 64, 5, 192),
    128: _SplitKTile(64, 64, 5, 192),
    256: _SplitKTile(128, 64, 4, 192),
}
_MANY_COLUMNS = {
    16: _SplitKTile(16, 128, 5, 192),
    32: _SplitKTile(32, 64, 5, 256),
    64: _SplitKTile(64, 64, 5, 256),
    128: _SplitKTile(128, 64, 4, 256),
}
_DEEP = {
    16: _SplitKTile(16, 128, 3, 256),
    32: _SplitKTile(32, 128, 5, 132),
    64: _SplitKTile(64, 128, 5, 132),
    128: _SplitKTile(128, 64, 4, 256),
}


@lru_cache(maxsize=4096)
def split_k_config(
    gpu: GPU, num_rows: int, num_columns: int, depth: int, dtype: torch.dtype
) -> SplitKConfig | None:
    """How to cut the product of `[num_rows, depth]` and `[num_columns, depth]` in `dtype`; None where
    `torch.nn.functional.linear` is as fast, or was not compared.
    """
    _check_vendor(gpu)
    if not gpu.has_wgmma or dtype not in (torch.float16, torch.bfloat16):
        return None
    if not (768 <= num_columns <= 4096 and depth >= 2048) or num_columns % SPLIT_K_COLUMNS:
        return None
    tiles = _FEW_COLUMNS if num_columns <= 2048 else _MANY_COLUMNS if depth <= 8192 else _DEEP
    max_rows = 256 if num_columns <= 1024 else 128
    if not 1 <= num_rows <= max_rows:
        return None
    tile = tiles[min(rows for rows in tiles if num_rows <= rows)]
    if depth % tile.depth:
        return None
    num_tiles = num_columns // SPLIT_K_COLUMNS * -(-num_rows // tile.rows)
    parts = min(MAX_PARTS, 1 << (tile.max_programs // num_tiles).bit_length() - 1)
    part_depth = -(-depth // (parts * tile.depth)) * tile.depth
    return SplitKConfig(tile.rows, tile.depth, tile.stages, part_depth)


@dataclass(frozen=True)
class TileConfig:
    """Programs, one for each multiprocessor, compute tile after tile: `TILE_ROWS` of x times `columns` of gate and
    as many of up, `TILE_DEPTH` elements of the sum a step, with the loads of `stages` steps under way.
    """

    columns: int
    stages: int


TILE_ROWS, TILE_DEPTH = 128, 64
TILE_WARPS = 8
TILE_GROUP = 16  # tiles of rows that read the same columns one after the other, so that these stay in L2
WIDE_GATED = TileConfig(128, 4)
NARROW_GATED = TileConfig(64, 6)
_NARROW_SPEED = 0.93  # of `NARROW_GATED`, whose tiles take more than half as long as those of `WIDE_GATED`


@lru_cache(maxsize=4096)
def gated_linear_config(
    gpu: GPU, num_rows: int, num_columns: int, depth: int, dtype: torch.dtype, *, gluon: bool
) -> TileConfig | None:
    """For `[num_rows, depth]` times gate and up, `[num_columns, depth]` each; None where a product and its
    activation are as fast, or were not compared, and without `gluon`, in which the kernel is written.

    Tiles are computed in waves, one on each multiprocessor. The last wave may have few, the last of them few rows:
    what they would have room for is lost. On an H100 the kernel was faster where at most a fifth is, of 256 rows
    and more (docs/lab-notebook).
    """
    _check_vendor(gpu)
    if not (gluon and gpu.has_wgmma) or dtype not in (torch.float16, torch.bfloat16) or num_rows < 256:
        return None
    if not (3072 <= num_columns <= 14_336 and 1024 <= depth <= 4096) or num_columns % 8 or depth % 8:
        return None
    wide, narrow = (_share_of_waves(gpu, num_rows, num_columns, tile) for tile in (WIDE_GATED, NARROW_GATED))
    narrow *= _NARROW_SPEED
    if max(wide, narrow) < 0.8:
        return None
    return WIDE_GATED if wide >= narrow else NARROW_GATED


def _share_of_waves(gpu: GPU, num_rows: int, num_columns: int, tile: TileConfig) -> float:
    """How much of its tiles' waves a result of `[num_rows, num_columns]` fills."""
    waves = cdiv(cdiv(num_rows, TILE_ROWS) * cdiv(num_columns, tile.columns), gpu.num_sms)
    return num_rows * num_columns / (waves * gpu.num_sms * TILE_ROWS * tile.columns)


@dataclass(frozen=True)
class FewRowsConfig:
    """A program computes `columns` of the output for `rows` of x, `depth` elements of the sum a step, with the
    loads of `stages` steps under way.
    """

    rows: int
    columns: int
    depth: int
    stages: int


FEW_ROWS_WARPS = 4
# Bytes of weights that are asked for before a product: more leave L2 before they are read. With those of Llama 3.1
# 8B a layer took a ninth longer on an H100, and cuBLAS was faster.
MAX_PREFETCHED = 2**24


@lru_cache(maxsize=4096)
def few_rows_config(
    gpu: GPU, num_rows: int, num_columns: int, depth: int, dtype: torch.dtype, *, gated: bool
) -> FewRowsConfig | None:
    """For `[num_rows, depth]` times `[num_columns, depth]`, or gate and up of that shape each; None where
    `torch.nn.functional.linear` is as fast, or was not compared.

    Measured on an H100 in bfloat16 at the shape of Qwen3 0.6B: sums of 1024, 4096 outputs or 3072 gated ones.
    """
    _check_vendor(gpu)
    columns = 32 if gated else 64
    num_bytes = (2 if gated else 1) * num_columns * depth * dtype.itemsize
    if not gpu.has_wgmma or dtype not in (torch.float16, torch.bfloat16) or not 1 <= num_rows <= FEW_ROWS:
        return None
    if num_columns < 2048 or depth < 512 or num_bytes > MAX_PREFETCHED:
        return None
    if num_columns % columns or depth % 128:
        return None
    rows = max(16, next_power_of_2(num_rows))
    return FewRowsConfig(rows, columns, depth=128, stages=6 if rows <= (16 if gated else 32) else 4)


@dataclass(frozen=True)
class Int4LinearConfig:
    """A program computes `rows` of x times `columns` of the output, a group of 128 elements of the sum a step."""

    rows: int
    columns: int
    stages: int
    num_warps: int


MAX_INT4_ROWS = 512  # of x: of more, the product is one of the dequantised weight
_INT4_TILES = (  # by the most rows of x
    (16, Int4LinearConfig(16, 64, 5, 4)),
    (32, Int4LinearConfig(32, 64, 5, 4)),
    (64, Int4LinearConfig(64, 64, 4, 4)),
    (MAX_INT4_ROWS, Int4LinearConfig(128, 128, 3, 8)),
)


def int4_linear_config(num_rows: int) -> Int4LinearConfig:
    """For a product of `num_rows` rows and a weight of 4 bits."""
    return next(tile for most, tile in _INT4_TILES if num_rows <= most)


@dataclass(frozen=True)
class OrderedLinearConfig:
    """A program computes `rows` of x times `columns` of the output, `depth` elements of the sum a step."""

    rows: int
    columns: int
    depth: int
    stages: int
    num_warps: int


_FEW_ROWS = 64  # of x: up to so many, reading the weight takes longer than the sums
# Rows, columns, depth, stages and warps. On an H100 those of 16 and 32 columns were the fastest at weights of
# 1,024 and 4,096 columns; those of 64, for wider weights, were not measured.
_FEW_ROWS_TILES = {
    16: ((16, 16, 256, 7, 2), (16, 32, 128, 7, 4), (16, 64, 64, 7, 4)),
    32: ((16, 16, 256, 7, 2), (32, 32, 128, 7, 4), (32, 64, 128, 5, 4)),
    64: ((64, 16, 128, 5, 4), (64, 32, 128, 5, 4), (64, 64, 64, 7, 4)),
}


@lru_cache(maxsize=4096)
def ordered_linear_config(gpu: GPU, num_rows: int, num_columns: int, dtype: torch.dtype) -> OrderedLinearConfig:
    """For an ordered product of `num_rows` rows. Those of many rows are like those of `expert_config`, unmeasured.

    Of few rows the tile is the one with which the busiest multiprocessor reads least, or all of them together:
    where there are too few programs for all, smaller ones read less each.
    """
    _check_vendor(gpu)
    rows = min(_FEW_ROWS, max(16, next_power_of_2(num_rows)))
    if dtype == torch.float32:
        return OrderedLinearConfig(rows, 64, 32, 3, 4)
    if num_rows > _FEW_ROWS:
        return OrderedLinearConfig(128, 128, 64, 3, 8)

    def num_read(tile: OrderedLinearConfig) -> int:
        num_programs = cdiv(num_rows, tile.rows) * cdiv(num_columns, tile.columns)
        return max(gpu.num_sms, num_programs) * (tile.rows + tile.columns)

    return min((OrderedLinearConfig(*tile) for tile in _FEW_ROWS_TILES[rows]), key=num_read)


@dataclass(frozen=True)
class E4M3LinearConfig:
    """A program computes `rows` of x times `columns` of the output, 128 elements of the sum a step; `columns` are
    a power of two up to 128, so that a block of weights has all of them.
    """

    rows: int
    columns: int
    stages: int
    num_warps: int


@lru_cache(maxsize=4096)
def e4m3_linear_config(gpu: GPU, num_rows: int, num_columns: int) -> E4M3LinearConfig:
    """For a product of e4m3. Not measured: small tiles where larger ones would leave multiprocessors idle, and for
    few rows more loads under way.
    """
    _check_vendor(gpu)
    rows = min(128, max(16, next_power_of_2(num_rows)))
    if rows <= 32:
        columns = 32 if cdiv(num_columns, 64) < gpu.num_sms else 64
        return E4M3LinearConfig(rows, columns, 8 if rows == 16 else 6, 4)
    if cdiv(num_rows, rows) * cdiv(num_columns, 128) < gpu.num_sms:
        return E4M3LinearConfig(64, 64, 6, 4)
    return E4M3LinearConfig(rows, 128, 3, 8)


# --- experts ---


@dataclass(frozen=True)
class ExpertConfig:
    """A program computes `rows` of an expert's tokens times `columns` of its outputs, `depth` inputs a step."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int = 3


MAX_PART_TOKENS = 64  # with more, the weighted outputs of all choices in float32 are too many for the next norm


def expert_rows(num_choices: int, num_experts: int, dtype: torch.dtype, *, mxfp4: bool = False) -> int:
    """The rows of a tile: `num_choices` are the rows of all experts. An expert's are chance, and a second tile
    reads its matrices again: a tile has as many as 19 of 20 experts have, if tokens choose evenly.
    """
    mean = num_choices / num_experts
    rows = max(16, next_power_of_2(math.ceil(mean + 1.65 * math.sqrt(mean))))
    if mxfp4:
        # To be unpacked to float32, matrices need registers of their own. In 16 bits, Triton would group the sums
        # of smaller tiles otherwise than Hopper's warpgroups do, whose product takes less time than to unpack.
        rows = min(32, rows) if dtype == torch.float32 else max(64, rows)
    return min(_largest_expert_tile(dtype), rows)


# By rows. At the shape of Qwen3-30B-A3B's experts, an H100 was at most 3 % faster with others of a sweep.
_EXPERT_TILES = {
    16: ExpertConfig(16, 64, 128, 4, 4),
    32: ExpertConfig(32, 64, 128, 4, 4),
    64: ExpertConfig(64, 128, 64, 4, 4),
    128: ExpertConfig(128, 128, 64, 8, 3),
}
_LARGE_EXPERT_TILE = ExpertConfig(128, 256, 64, 8, 3)  # too large for the shared memory of GPUs before Hopper


@lru_cache(maxsize=4096)
def expert_config(
    gpu: GPU,
    rows: int,
    num_tiles: int,
    size: int,
    inner: int,
    dtype: torch.dtype,
    *,
    mxfp4: bool = False,
    blocks: bool = False,
) -> ExpertConfig:
    """For about `num_tiles` tiles of `rows` (see `expert_rows`) times matrices `[size, inner]`. Where there are
    too few programs for all multiprocessors, they have fewer columns each.
    """
    _check_vendor(gpu)
    largest = _largest_expert_tile(dtype), max(16, next_power_of_2(size)), max(16, next_power_of_2(inner))
    if mxfp4 or dtype == torch.float32:
        columns, depth = min(largest[:2]), min(128 // dtype.itemsize, largest[2])
        return ExpertConfig(rows, columns, depth, num_warps=8 if rows == 128 else 4)
    if dtype == torch.float8_e4m3fn:
        # As scales of blocks and groups have it. Sums beside those of a tensor core need registers of their own.
        tile = replace(_EXPERT_TILES[rows], depth=128, num_stages=3, num_warps=4 if rows <= 32 else 8)
        if blocks and rows == 128:
            tile = replace(tile, columns=64)
    else:
        tile = _LARGE_EXPERT_TILE if rows == 128 and gpu.has_wgmma else _EXPERT_TILES[rows]
    columns = tile.columns
    if rows <= 32 and num_tiles * cdiv(size, columns) < 4 * gpu.num_sms:
        columns = 32
    return replace(tile, columns=min(columns, largest[1]), depth=min(tile.depth, largest[2]))


def mxfp4_stages(rows: int) -> int:
    """Steps of 128 inputs under way in Hopper's kernel for MXFP4: each takes 256 bytes a row and 16 KiB of
    matrices. Two more or less made no difference on an H200.
    """
    return {16: 8, 32: 8, 64: 6, 128: 4}[rows]


def expert_tiles_config(num_choices: int) -> BlockConfig:
    """Of choices that a program counts at a time."""
    if num_choices > 8192:
        return BlockConfig(8192, 16)
    return BlockConfig(2048, 8) if num_choices > 512 else BlockConfig(256, 4)


def _largest_expert_tile(dtype: torch.dtype) -> int:
    # Products in float32 do without tensor cores: larger tiles of them do not fit into the registers.
    return 64 if dtype == torch.float32 else 128


# --- rows: norms, routing ---

# Of a row that one program holds in its registers: 32768 elements of two bytes or 16384 of four. Models have up to
# 18432, and 16384 in what anyone would run in float32.
MAX_ROW_BYTES = 65536
# Rows up to this long are loaded together with weights and residuals; longer ones would not fit the registers.
EARLY_BLOCK: tl.constexpr = 8192 if tl is None else tl.constexpr(8192)
_ROW_TILE = 2048  # elements of a program of short rows
_ROW_ELEMENTS = 16  # of a thread: two accesses of 16 bytes


def row_blocks(size: int, dtype: torch.dtype, parts: int = 0) -> tuple[int, int, int]:
    """For kernels that hold whole rows of `size` elements: the block that a row is padded to, the rows of a
    program (several where they are short), its warps. Raises ValueError where a row is too long.

    With `parts`, each row is the sum of that many. Such batches are small: a program has one row, and enough
    threads to have all their loads under way at once.
    """
    if size * dtype.itemsize > MAX_ROW_BYTES:
        raise ValueError(f"rows of {size} elements of {dtype} exceed the kernel's limit of {MAX_ROW_BYTES} bytes")
    block = max(16, next_power_of_2(size))
    if parts:
        return block, 1, min(32, max(1, block * next_power_of_2(parts) // (32 * _ROW_ELEMENTS)))
    rows = max(1, _ROW_TILE // block)
    max_warps = 16 if block <= 16384 else 32
    return block, rows, min(max_warps, max(1, block * rows // (32 * _ROW_ELEMENTS)))


# --- recurrent layers ---

MAX_DELTA_DIM = 128  # of keys: a program holds whole columns of a state in registers
RECURRENT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class ChunksConfig:
    """How rows of several tokens are computed by a recurrent layer.

    Attributes:
        chunk: tokens, a power of two from 16 on.
        block_v: columns of a state a program has, where it goes from chunk to chunk.
        within_warps: of what is computed of a chunk by itself.
        across_warps, num_stages: of what is computed chunk after chunk.
        precision: of products of keys, queries and values, where they are float32.
        solve_precision: of those that invert the triangular systems of the gated delta rule, always float32.
    """

    chunk: int
    block_v: int
    within_warps: int
    across_warps: int
    num_stages: int
    precision: str = "tf32"
    solve_precision: str = "tf32"


def delta_chunks_config(gpu: GPU, k_dim: int, v_dim: int, dtype: torch.dtype) -> ChunksConfig:
    """For keys of up to `MAX_DELTA_DIM`."""
    _check_vendor(gpu)
    if dtype == torch.float32:
        return ChunksConfig(16, 16, 8, 8, 1, precision="ieee", solve_precision="ieee")
    # Chunks of 64 tokens take twice the time. Across chunks two warps, which cannot use wgmma: with it, Triton 3.6
    # multiplied the transposed keys wrongly wherever their loads were not pipelined.
    return ChunksConfig(32, min(32, max(16, next_power_of_2(v_dim))), 1, 2, 1, solve_precision="tf32x3")


def delta_step_config(gpu: GPU, v_dim: int, dtype: torch.dtype) -> tuple[int, int]:
    """For rows of one token: the columns of a state a program has, and its warps."""
    _check_vendor(gpu)
    most = 64 if dtype.itemsize == 2 else 32  # of float32, more would spill on an A100
    return min(most, max(16, next_power_of_2(v_dim))), 4


def token_by_token_config(gpu: GPU, k_dim: int, v_dim: int) -> tuple[int, int]:
    """For rows of any number of tokens, one after the other: the columns of a state a program has, and its warps.
    Of one warp, sums over keys need no barriers. The order of these sums depends on both numbers.
    """
    _check_vendor(gpu)
    most = 16 if k_dim <= 128 else 8
    return min(most, max(8, next_power_of_2(v_dim))), 1


MAX_STATE_SPACE_DIM = 256  # of states: as above


def state_space_chunks_config(gpu: GPU, k_dim: int, v_dim: int, dtype: torch.dtype) -> ChunksConfig:
    """For states of up to `MAX_STATE_SPACE_DIM`. A result in two bytes is no more precise than tf32."""
    _check_vendor(gpu)
    if dtype == torch.float32:
        return ChunksConfig(16, 16, 8, 8, 1, precision="ieee")
    # Chunks of 64 tokens take half as long again; by 64 columns products would use wgmma: see delta_chunks_config.
    return ChunksConfig(32, min(32, max(16, next_power_of_2(v_dim))), 1, 4 if k_dim <= 128 else 8, 1)


def state_space_step_config(gpu: GPU, k_dim: int, v_dim: int) -> tuple[int, int]:
    """For rows of one token: the columns of a state a program has, and its warps."""
    _check_vendor(gpu)
    return min(32, max(16, next_power_of_2(v_dim))), 8 if k_dim > 128 else 4


# --- single elements ---


@dataclass(frozen=True)
class BlockConfig:
    """A program of `num_warps` has `size` elements."""

    size: int
    num_warps: int

    def launch_arguments(self) -> dict[str, Any]:
        """The kernel's keyword arguments."""
        return {"BLOCK": self.size, "num_warps": self.num_warps}


ELEMENTWISE = BlockConfig(1024, 4)  # activations, and the weighted sum of experts
CONV_CHUNK = 16  # tokens of a program of a causal convolution, which is of this many channels:
CONV_EXTEND = BlockConfig(128, 4)
CONV_STEP = BlockConfig(256, 2)  # of one token
E4M3_ROW = BlockConfig(16_384, 16)  # at most, of a row that is quantised: shorter ones have as much for each warp
E4M3_GROUPS = BlockConfig(2048, 4)  # of a row that is quantised in groups
QK_NORM_ROPE = BlockConfig(2048, 4)  # a thread has 16 bytes of both halves of a head
ROW_TABLES = BlockConfig(256, 4)
LOGITS = BlockConfig(1024, 4)  # masks and penalties
INT4_ROWS = BlockConfig(32, 4)  # rows of a weight that a program dequantises

# --- KV copies ---

MAX_COPY_UNITS = 1024  # of a tile: each takes an address where rows are of odd sizes
COPY_WARPS = 8


@dataclass(frozen=True)
class CopyConfig:
    """`programs` copy `tile_bytes` at a time each."""

    programs: int
    tile_bytes: int


def copy_config(gpu: GPU, *, from_host: bool, to_host: bool) -> CopyConfig:
    """Over a link, programs and tiles together just cover its latency: more programs would only take
    multiprocessors from a pass that runs beside the copy.
    """
    _check_vendor(gpu)
    if from_host or to_host:
        return CopyConfig(8 if from_host else 4, 32768)
    return CopyConfig(2 * gpu.num_sms, 16384)


# --- sampling ---


@dataclass(frozen=True)
class CandidateConfig:
    """An attempt to draw from up to `size` candidates.

    Without top-k they are the logits that reach the chunk maximum of rank `guess`, or of `max_chunks` of all
    chunks, whichever rank is smaller. `chunks` are read at a time.
    """

    size: int
    guess: int
    max_chunks: float
    chunks: int
    num_warps: int
    max_registers: int | None = None


# With fewer registers, which the compiler takes if left to itself, kernels that sum masses spill.
SUM_REGISTERS = 128
CANDIDATES = (
    CandidateConfig(512, 128, 0.25, 4, 4, SUM_REGISTERS),
    CandidateConfig(2048, 512, 0.85, 8, 8, SUM_REGISTERS),
)
TOTALS_PARTS = 8  # programs of a row that add up its masses
TOTALS_WARPS = 2
CHUNK_MAXIMA_WARPS = 4
THRESHOLD_TILE = BlockConfig(4096, 8)  # with fewer logits a thread, it spills
MASS_PARTS = 4  # programs of a row where few rows are left to draw
MASS_WARPS = 1
DRAW_WARPS = 4
LOGPROBS = BlockConfig(4096, 4)
MAX_TOP_LOGPROBS = 32  # tokens that the kernel finds one after the other; torch's topk finds more
