"""A mixture of gated feed-forward experts (Shazeer et al., 2017; SwiGLU experts as in Mixtral, 2024)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from triton_ops.activations.clamped_swiglu import clamped_swiglu, clamped_swiglu_of
from triton_ops.activations.elementwise import row_and_columns
from triton_ops.activations.quantised_rows import quantise_rows
from triton_ops.activations.silu_and_mul import silu_and_mul, silu_times
from triton_ops.activations.squared_relu import squared_relu
from triton_ops.implementation import (
    Impl,
    cdiv,
    gdc_launch_dependents,
    gdc_wait,
    gpu_of,
    next_power_of_2,
    overlapped,
    runs_triton,
    tl,
    triton,
)
from triton_ops.linear.e4m3_linear import e4m3_linear
from triton_ops.linear.ordered_linear import ordered_linear
from triton_ops.moe.e4m3 import ScaledE4M3
from triton_ops.moe.expert_tiles import expert_tiles
from triton_ops.moe.mxfp4 import GROUP, Mxfp4, dequantised_tile
from triton_ops.moe.mxfp4_hopper import launch_hopper, takes_words
from triton_ops.tuning import ELEMENTWISE, MAX_PART_TOKENS, MAX_PARTS, expert_config, expert_rows

# From gate | up `[..., 2 * size]` to `[..., size]`, with `deterministic` and `impl` as `silu_and_mul` has them.
# Those of `_UNGATED` have up alone, `[..., size]`.
Activation = Callable[..., Tensor]
Matrices = Tensor | Mxfp4 | ScaledE4M3
# Of the activations that the first product's kernel computes itself; others are launches of their own.
_GATES: dict[Activation, str] = {silu_and_mul: "silu", clamped_swiglu: "clamped"}
_UNGATED = (squared_relu,)
_Weights = tuple[Matrices, Tensor | None]  # of all experts, and their biases


def moe(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Matrices,
    down: Matrices,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: Activation = silu_and_mul,
    deterministic: bool = False,
    parts_ok: bool = False,
    impl: Impl = "auto",
) -> Tensor:
    """For each token, the sum of its experts' outputs `down(activation(gate(x) | up(x)))` times their weights.

    Args:
        x: `[num_tokens, hidden_size]`, any float dtype.
        weights: float32 `[num_tokens, top_k]`.
        experts: int64 `[num_tokens, top_k]`, each below `num_experts`, no two of a token's the same.
        gate_up: `[num_experts, 2 * intermediate_size, hidden_size]` in x's dtype, MXFP4 or e4m3: gate over up. For
            `squared_relu` up alone, of `intermediate_size`.
        down: `[num_experts, hidden_size, intermediate_size]`, likewise. Results of MXFP4 are those of the same
            matrices dequantised to x's dtype, which all of them never are at once. For those of e4m3 x and the
            activation are quantised by `quantise_rows`, in groups where blocks have scales.
        gate_up_bias, down_bias: `[num_experts, 2 * intermediate_size]` and `[num_experts, hidden_size]` in x's
            dtype, added before a product is rounded; None: none.
        activation: of gate | up, in both forms; SwiGLU's by default.
        deterministic: the bits of a token's result depend on its own row, weights and experts alone. The kernels
            see to that in any case: see `_expert_product_kernel`.
        parts_ok: on a GPU, the results of few tokens may be in parts, whose rounding differs.

    Returns:
        `[num_tokens, hidden_size]` in x's dtype: experts' outputs in that dtype, summed in float32 in the order in
        which a token has them. Or their parts, float32 `[top_k, num_tokens, hidden_size]`: the weighted outputs.

    Experts without tokens cost nothing. On a GPU the torch form waits for the device, to read how many tokens each
    expert has; the kernels do not.
    """
    matrices = ((gate_up, gate_up_bias), (down, down_bias))
    if runs_triton(impl, x.device):
        return _launch(x, weights, experts, matrices, activation, parts_ok)
    return _moe_fast_cpu(x, weights, experts, matrices, activation, deterministic)


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2)
    return gate / (1 + torch.exp(-gate)) * up


def moe_reference(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Matrices,
    down: Matrices,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: Callable[[Tensor], Tensor] = _swiglu,
) -> Tensor:
    """What `moe` means, in float64: token by token, and for each the sum over its experts."""
    x, out = x.double(), torch.zeros_like(x, dtype=torch.float64)

    def product(row: Tensor, matrices: Matrices, biases: Tensor | None, expert: int) -> Tensor:
        if isinstance(matrices, ScaledE4M3):
            codes, scale = quantise_rows(row.unsqueeze(0), groups=matrices.by_blocks, impl="torch")
            row = (
                codes[0].double() * scale[0].repeat_interleave(128 if matrices.by_blocks else len(row))[: len(row)]
            )
        result = _matrix(matrices, expert, torch.float64).double() @ row
        return result if biases is None else result + biases[expert].double()

    for token, (row, chosen) in enumerate(zip(weights.tolist(), experts.tolist(), strict=True)):
        for weight, expert in zip(row, chosen, strict=True):
            activated = activation(product(x[token], gate_up, gate_up_bias, expert))
            out[token] += weight * product(activated, down, down_bias, expert)
    return out


def _moe_fast_cpu(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    matrices: tuple[_Weights, _Weights],
    activation: Activation,
    deterministic: bool,
) -> Tensor:
    """Expert by expert, the rows of each together."""
    (gate_up, gate_up_bias), (down, down_bias) = matrices
    plain = partial(ordered_linear, impl="torch") if deterministic else linear

    def product(rows: Tensor, matrices: Matrices, biases: Tensor | None, expert: int) -> Tensor:
        bias = None if biases is None else biases[expert]
        if isinstance(matrices, ScaledE4M3):
            return e4m3_linear(rows, matrices.values[expert], matrices.scale[expert], bias, impl="torch")
        return plain(rows, _matrix(matrices, expert, rows.dtype), bias)

    top_k = experts.shape[1]
    parts = x.new_empty(experts.numel(), x.shape[1])
    order = experts.flatten().argsort(stable=True)  # token and choice, by expert
    counts = torch.bincount(experts.flatten(), minlength=gate_up.shape[0])
    for expert, chosen in enumerate(torch.split(order, counts.tolist())):
        if chosen.shape[0] == 0:
            continue
        gated = product(x[chosen // top_k], gate_up, gate_up_bias, expert)
        activated = activation(gated, deterministic=deterministic, impl="torch")
        parts[chosen] = product(activated, down, down_bias, expert)
    # One choice after the other: a token's sum does not depend on which of its experts came first.
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for part, weight in zip(parts.view(-1, top_k, x.shape[1]).unbind(1), weights.unbind(1), strict=True):
        out += part.float() * weight.unsqueeze(1)
    return out.to(x.dtype)


def _matrix(matrices: Matrices, expert: int, dtype: torch.dtype) -> Tensor:
    matrix = matrices[expert]
    return matrix if isinstance(matrix, Tensor) else matrix.dequantised(dtype)


def _launch(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    matrices: tuple[_Weights, _Weights],
    activation: Activation,
    parts_ok: bool,
) -> Tensor:
    _check(x, matrices, activation)
    (gate_up, gate_up_bias), (down, down_bias) = matrices
    (num_tokens, hidden_size), top_k, num_experts = x.shape, experts.shape[1], gate_up.shape[0]
    x, weights = x.contiguous(), weights.contiguous()
    out = torch.empty_like(x)
    if num_tokens == 0:
        return out

    # An expert's rows, each of them a token and one of its choices, are cut into tiles.
    num_choices = experts.numel()
    gate, gpu = _GATES.get(activation, ""), gpu_of(x.device)
    mxfp4 = isinstance(gate_up, Mxfp4) or isinstance(down, Mxfp4)
    in_words = isinstance(gate_up, Mxfp4) and gate_up.in_words
    if in_words:
        gate = gate if gate == "clamped" else ""
        x = x.clone() if x.data_ptr() % 16 else x  # rows are copied by 16 bytes
    tile_rows = expert_rows(num_choices, num_experts, x.dtype, mxfp4=mxfp4 and not in_words)
    order, tiles = expert_tiles(experts, num_experts, tile_rows, impl="triton")
    overlap = overlapped(x.device, 0)  # however many tiles there are

    def product(
        a: Tensor, matrices: Matrices, biases: Tensor | None, rows_of_a: int, *, gate: str = "", to: str = "row"
    ) -> Tensor:
        """Each row, in the order of experts, times its expert's matrix, plus its bias. A row of `a` is read
        `rows_of_a` times.
        """
        _, size, inner = matrices.shape
        columns = size // 2 if gate else size
        shape = (top_k, num_tokens, columns) if to == "part" else (num_choices, columns)
        result = torch.empty(shape, dtype=torch.float32 if to == "part" else x.dtype, device=x.device)
        if isinstance(matrices, Mxfp4) and matrices.in_words:
            launch_hopper(
                a,
                matrices,
                biases,
                weights,
                result,
                order,
                tiles,
                tile_rows,
                gpu.num_sms,
                num_tokens=num_tokens,
                rows_of_a=rows_of_a,
                top_k=top_k,
                gate=gate,
                to=to,
            )
            return result
        num_tiles = min(num_choices, num_experts)
        is_mxfp4, a_scales, by = isinstance(matrices, Mxfp4), None, ""
        if isinstance(matrices, ScaledE4M3):
            by = "block" if matrices.by_blocks else "row"
            a, a_scales = quantise_rows(a, groups=matrices.by_blocks, impl="triton")
        config = expert_config(
            gpu, tile_rows, num_tiles, size, inner, a.dtype, mxfp4=is_mxfp4, blocks=by == "block"
        )
        numbers, scales = _parts_of(matrices)
        _expert_product_kernel[(len(tiles) * cdiv(size, config.columns),)](
            a,
            a_scales,
            numbers,
            scales,
            biases,
            weights,
            result,
            order,
            tiles,
            num_tokens,
            CHOICES=rows_of_a,
            TOP_K=top_k,
            GATE=gate,
            TO=to,
            HAS_BIAS=biases is not None,
            E4M3_BY=by,
            GROUP=GROUP if is_mxfp4 else 0,
            SIZE=size,
            INNER=inner,
            ROWS=config.rows,
            COLUMNS=config.columns,
            DEPTH=config.depth,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **overlap,
        )
        return result

    activated = product(x, gate_up, gate_up_bias, top_k, gate=gate)
    if not gate:
        activated = activation(activated, impl="triton")
    if parts_ok and num_tokens <= MAX_PART_TOKENS and top_k <= MAX_PARTS:
        return product(activated, down, down_bias, 0, to="part")
    parts = product(activated, down, down_bias, 0, to="choice")
    block = min(ELEMENTWISE.size, max(16, next_power_of_2(hidden_size)))
    _weighted_sum_kernel[(num_tokens * cdiv(hidden_size, block),)](
        parts,
        weights,
        out,
        TOP_K=top_k,
        SIZE=hidden_size,
        BLOCK=block,
        num_warps=ELEMENTWISE.num_warps,
        **overlap,
    )
    return out


def _check(x: Tensor, matrices: tuple[_Weights, _Weights], activation: Activation) -> None:
    """Raise ValueError where the kernels do not take these matrices."""
    (gate_up, gate_up_bias), (down, down_bias) = matrices
    hidden_size, num_experts, inner_size = x.shape[1], gate_up.shape[0], down.shape[2]
    first_size = inner_size if activation in _UNGATED else 2 * inner_size
    for name, given, shape in (
        ("gate_up", gate_up, (num_experts, first_size, hidden_size)),
        ("down", down, (num_experts, hidden_size, inner_size)),
        ("gate_up_bias", gate_up_bias, (num_experts, first_size)),
        ("down_bias", down_bias, (num_experts, hidden_size)),
    ):
        if given is not None and (given.shape != shape or not given.is_contiguous()):
            raise ValueError(f"{name} must be contiguous {[*shape]}, but is {[*given.shape]}")
    dtypes = [given.dtype if isinstance(given, Tensor) else x.dtype for given in (gate_up, down)]
    if dtypes != [x.dtype] * 2:
        raise ValueError(f"x, gate_up and down are {x.dtype}, {dtypes[0]} and {dtypes[1]}")
    if isinstance(gate_up, ScaledE4M3) is not isinstance(down, ScaledE4M3):
        raise ValueError(f"gate_up and down are {type(gate_up).__name__} and {type(down).__name__}")
    in_words = [isinstance(given, Mxfp4) and given.in_words for given in (gate_up, down)]
    if any(in_words) and not (all(in_words) and takes_words(gpu_of(x.device), x.dtype)):
        raise ValueError("matrices in words are for bfloat16 on Hopper, both of them")


def _parts_of(matrices: Matrices) -> tuple[Tensor, Tensor | None]:
    """Numbers and scales."""
    if isinstance(matrices, Mxfp4):
        return matrices.blocks, matrices.scales
    return (matrices.values, matrices.scale) if isinstance(matrices, ScaledE4M3) else (matrices, None)


@triton.jit(do_not_specialize=["num_tokens"])
def _expert_product_kernel(
    a_ptr,
    a_scales_ptr,
    matrices_ptr,
    scales_ptr,
    biases_ptr,
    weights_ptr,
    out_ptr,
    order_ptr,
    tiles_ptr,
    num_tokens,
    CHOICES: tl.constexpr,
    TOP_K: tl.constexpr,
    GATE: tl.constexpr,
    TO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    E4M3_BY: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Rows of `a [..., INNER]` times their experts' `[SIZE, INNER]`, transposed, plus their biases `[SIZE]`. A
    program computes a tile of one expert: see `expert_tiles`.

    Matrices are MXFP4 with scales for GROUP elements each, or dense without scales if GROUP is 0.

    E4M3_BY "row" or "block": matrices and `a` are in e4m3, with scales by row, or by block and group of 128. Sums
    over 128 elements are a tensor core's; these are added up in float32.

    Row r in the order of experts is choice `order[r]`. If CHOICES is above 0, row `order[r] // CHOICES` of `a` is
    read, otherwise row r. TO "row" writes row r, "choice" row `order[r]`, and "part" writes row
    `[order[r] % TOP_K, order[r] // TOP_K]`, times the choice's weight. With a GATE, which is an activation's name,
    SIZE is of gate | up, and their activation is written.

    A sum over INNER is one chain in ascending order, of single elements in float32 and of groups of 16 otherwise,
    whatever ROWS and COLUMNS are: the bits of a row do not depend on its tile. (Before Hopper, the groups of MXFP4
    are of elements that lie apart, of the same ones in all tiles: see `expert_rows`.)

    EARLY: it starts while the kernel before it ends.
    """
    if EARLY:
        gdc_launch_dependents()  # as soon as all programs have started, they fill what the last ones leave idle
        gdc_wait()
    num_columns: tl.constexpr = (SIZE + COLUMNS - 1) // COLUMNS
    record = tiles_ptr + tl.program_id(0) // num_columns * 3
    expert = tl.load(record).to(tl.int64)
    if expert >= 0:  # the grid is for the worst case
        row = (tl.load(record + 1) + tl.arange(0, ROWS)).to(tl.int64)
        is_row = row < tl.load(record + 2)
        place = tl.load(order_ptr + row, mask=is_row, other=0).to(tl.int64)
        a_row = place // CHOICES if CHOICES > 0 else row
        first_column = tl.program_id(0) % num_columns * COLUMNS
        column = first_column + tl.arange(0, COLUMNS)
        is_column = column < SIZE
        # Gate and up alternate, so that a thread has both of an element.
        column = column % 2 * (SIZE // 2) + column // 2 if GATE != "" else column
        depth = tl.arange(0, DEPTH)
        a = a_ptr + a_row[:, None] * INNER + depth[None, :]
        if GROUP > 0:
            group = tl.arange(0, DEPTH // GROUP)
            nth_group = (expert * SIZE + column)[:, None] * (INNER // GROUP) + group[None, :]
            scales = scales_ptr + nth_group
            b = matrices_ptr + nth_group[:, :, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, None, :]
        else:
            b = matrices_ptr + (expert * SIZE + column)[None, :] * INNER + depth[:, None]
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        if E4M3_BY == "block":
            groups: tl.constexpr = (INNER + 127) // 128
            a_scales = a_scales_ptr + a_row * groups
            column_scales = scales_ptr + (expert * ((SIZE + 127) // 128) + column // 128) * groups
        for start in range(0, INNER, DEPTH):
            is_inner = start + depth < INNER
            if GROUP > 0:
                left = tl.load(a + start, mask=is_row[:, None] & is_inner[None, :], other=0.0)
                is_group = is_column[:, None] & (start + group * GROUP < INNER)[None, :]
                blocks = tl.load(b + start // 2, mask=is_group[:, :, None], other=0)
                scale = tl.load(scales + start // GROUP, mask=is_group, other=0)
                right = tl.trans(dequantised_tile(blocks, scale, left.dtype))
            else:
                # Matrices first: they are far away, and do not wait for `order`.
                right = tl.load(b + start, mask=is_inner[:, None] & is_column[None, :], other=0.0)
                left = tl.load(a + start, mask=is_row[:, None] & is_inner[None, :], other=0.0)
            if E4M3_BY != "":
                part = tl.dot(left, right)
                if E4M3_BY == "block":
                    group = start // 128
                    a_scale = tl.load(a_scales + group, mask=is_row, other=0.0)
                    part *= a_scale[:, None] * tl.load(column_scales + group, mask=is_column, other=0.0)[None, :]
                total += part
            else:
                total = tl.dot(left, right, total, input_precision="ieee")
        if E4M3_BY == "row":
            total *= tl.load(a_scales_ptr + a_row, mask=is_row, other=0.0)[:, None]
            total *= tl.load(scales_ptr + expert * SIZE + column, mask=is_column, other=0.0)[None, :]
        if HAS_BIAS:
            bias = tl.load(biases_ptr + expert * SIZE + column, mask=is_column, other=0.0)
            total += bias.to(tl.float32)[None, :]
        to = row
        if TO == "choice":
            to = place
        if TO == "part":
            to = place % TOP_K * num_tokens + place // TOP_K
            total *= tl.load(weights_ptr + place, mask=is_row, other=0.0)[:, None]
        if GATE == "":
            out = out_ptr + to[:, None] * SIZE + column
            tl.store(out, total.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column)
        else:
            size: tl.constexpr = SIZE // 2
            gate, up = tl.split(tl.reshape(total.to(out_ptr.dtype.element_ty), (ROWS, COLUMNS // 2, 2)))
            activated = silu_times(gate, up) if GATE == "silu" else clamped_swiglu_of(gate, up)
            column = first_column // 2 + tl.arange(0, COLUMNS // 2)
            tl.store(out_ptr + to[:, None] * size + column, activated, mask=is_row[:, None] & (column < size))


@triton.jit
def _weighted_sum_kernel(
    parts_ptr,
    weights_ptr,
    out_ptr,
    TOP_K: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    token, column = row_and_columns(SIZE, BLOCK, EARLY)
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(TOP_K):
        place = token * TOP_K + choice
        part = tl.load(parts_ptr + place * SIZE + column, mask=column < SIZE, other=0.0)
        total += part.to(tl.float32) * tl.load(weights_ptr + place)
    tl.store(out_ptr + token * SIZE + column, total.to(out_ptr.dtype.element_ty), mask=column < SIZE)
