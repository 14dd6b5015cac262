"""The state space of Mamba-2: a recurrent state that decays by each token, to which the token is added.

Dao and Gu, Transformers are SSMs (2024), arXiv 2405.21060.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from triton_ops.implementation import Impl, cdiv, gpu_of, next_power_of_2, overlapped, runs_triton
from triton_ops.recurrent.recurrence import (
    CHUNK,
    TokenInputs,
    by_token,
    check_exact,
    check_heads,
    check_kernels,
    check_shapes,
    check_states,
    compute_rows,
    in_chunks,
)
from triton_ops.recurrent.rows import StateRows
from triton_ops.recurrent.softplus import softplus
from triton_ops.recurrent.state_space_kernels import (
    state_space_across_kernel,
    state_space_step_kernel,
    state_space_within_kernel,
)
from triton_ops.tuning import (
    MAX_STATE_SPACE_DIM,
    state_space_chunks_config,
    state_space_step_config,
    token_by_token_config,
)

UNLIMITED = (0.0, float("inf"))  # of dt


def state_space(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    a_log: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    rows: StateRows,
    *,
    dt_limits: tuple[float, float] = UNLIMITED,
    deterministic: bool = False,
    impl: Impl = "auto",
) -> Tensor:
    """The outputs of `state_space_reference`, whose states are read from and left in a pool.

    Args:
        x: `[T, num_heads, head_dim]`, any float dtype. Elements of a head lie side by side, in b and c too.
        dt: `[T, num_heads]` in x's dtype, any strides.
        b, c: `[T, num_groups, state_size]` in x's dtype. `num_heads` is a multiple of `num_groups`: head h has
            group `h // (num_heads // num_groups)`.
        a_log, d, dt_bias: `[num_heads]`, contiguous, any float dtype.
        states: `[num_states, num_heads, state_size, head_dim]`, float32 (or another float dtype: rounded when
            left), a state contiguous. Those that `rows` leave are written.
        dt_limits: the least and the largest step.
        deterministic: as in `gated_delta`.

    Returns `[T, num_heads, head_dim]` in x's dtype, contiguous. What it holds at tokens of no row is undefined.

    Raises ValueError where shapes or dtypes disagree, and where the kernels have no room for state_size.

    In torch everything is computed in float32, or in float64 from such x: rows of several tokens in chunks of 64,
    all rows of one token together. So do the kernels, but in a chunk they multiply in x's dtype and add in
    float32: the state is float32 from chunk to chunk, and rounded where a product reads it. A row's bits do not
    depend on other rows.
    """
    _check(x, dt, b, c, a_log, d, dt_bias, states)
    if deterministic:
        check_exact(states, x.dtype)
    if runs_triton(impl, x.device):
        return _launch(x, dt, b, c, a_log, d, dt_bias, states, rows, dt_limits, deterministic)

    def inputs_of(tokens: slice | Tensor) -> _Tokens:
        return _Tokens.of(x[tokens], dt[tokens], b[tokens], c[tokens], a_log, d, dt_bias, dt_limits)

    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    return compute_rows(inputs_of, states, rows, out, deterministic=deterministic)


def state_space_reference(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    a_log: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    dt_limits: tuple[float, float] = UNLIMITED,
) -> tuple[Tensor, Tensor]:
    """What the state space means, in float64, for the L tokens of one sequence, each head by itself.

    From a state S `[state_size, head_dim]`, token by token::

        step = clamp(softplus(dt + dt_bias), *dt_limits)
        S = exp(step * -exp(a_log)) * S + b (step * x)^T
        out = S^T c + d * x

    The arguments are those of `state_space`, of L tokens and one `state [num_heads, state_size, head_dim]`.
    Returns the outputs `[L, num_heads, head_dim]` and the state that is left, in float64.
    """
    at = _Tokens.of(x, dt, b, c, a_log, d, dt_bias, dt_limits, dtype=torch.float64)
    return at.one_by_one(state.double(), torch.empty_like(at.added))


@dataclass(frozen=True)
class _Tokens(TokenInputs):
    """What the state space takes of some tokens, for each head: in float32, or in float64 from such x.

    Attributes:
        added, skipped: `[n, num_heads, head_dim]`, what x adds to the state, and to the output beside it.
        b, c: `[n, num_heads, state_size]`.
        log_decay: `[n, num_heads]`.
    """

    added: Tensor
    skipped: Tensor
    b: Tensor
    c: Tensor
    log_decay: Tensor

    @staticmethod
    def of(
        x: Tensor,
        dt: Tensor,
        b: Tensor,
        c: Tensor,
        a_log: Tensor,
        d: Tensor,
        dt_bias: Tensor,
        dt_limits: tuple[float, float],
        dtype: torch.dtype = torch.float32,
    ) -> _Tokens:
        dtype = torch.promote_types(x.dtype, dtype)
        group = x.shape[1] // b.shape[1]
        step = softplus(dt.to(dtype) + dt_bias.to(dtype)).clamp(*dt_limits)
        x = x.to(dtype)
        return _Tokens(
            step[..., None] * x,
            d[:, None].to(dtype) * x,
            b.to(dtype).repeat_interleave(group, 1),
            c.to(dtype).repeat_interleave(group, 1),
            step * -a_log.to(dtype).exp(),
        )

    def step(self, state: Tensor) -> tuple[Tensor, Tensor]:
        state = state * self.log_decay.exp()[..., None, None] + self.b[..., None] * self.added[..., None, :]
        return (state * self.c[..., None]).sum(-2) + self.skipped, state

    def by_chunks(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """With G the sums of log decays from a chunk's begin, S the state there and u_t what token t adds, token t
        reads `exp(G_t) S^T c_t + sum_{i<=t} exp(G_t - G_i) (c_t . b_i) u_i`.
        """
        length = len(self.added)
        size = min(CHUNK, length)
        added, b, c = in_chunks(self.added, size), in_chunks(self.b, size), in_chunks(self.c, size)
        sums = in_chunks(self.log_decay, size).double().cumsum(2)  # of large ones, whose small differences count
        later = torch.ones(size, size, dtype=torch.bool, device=b.device).triu_(1)
        between = (sums[..., :, None] - sums[..., None, :]).to(b.dtype).masked_fill_(later, -torch.inf).exp_()
        read = (between * (c @ b.mT)) @ added
        c = sums.to(b.dtype).exp()[..., None] * c
        b = (sums[..., -1:] - sums).to(b.dtype).exp()[..., None] * b
        whole = sums[..., -1].to(b.dtype).exp()[..., None, None]
        for n in range(read.shape[1]):
            read[:, n] += c[:, n] @ state
            state = whole[:, n] * state + b[:, n].mT @ added[:, n]
        return read.movedim(0, 2).flatten(0, 1)[:length] + self.skipped, state


# --- the kernels ---


def _launch(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    a_log: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    rows: StateRows,
    dt_limits: tuple[float, float],
    deterministic: bool,
) -> Tensor:
    (num_tokens, num_heads, v_dim), (num_groups, k_dim), num_extends = x.shape, b.shape[1:], rows.num_extends
    check_kernels(x.dtype, k_dim, MAX_STATE_SPACE_DIM, names=("x", "state_size"))
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if deterministic:
        num_extends = 0  # the kernel of steps goes through all rows
    num_steps = len(rows.lens) - num_extends
    if num_tokens == 0:
        return out
    gpu, block_k = gpu_of(x.device), max(16, next_power_of_2(k_dim))
    keys = by_token("group", b=b, c=c) | {"K_DIM": k_dim, "BLOCK_K": block_k}
    heads = by_token("head", x=x, dt=dt) | {
        "a_log": a_log,
        "d": d,
        "dt_bias": dt_bias,
        "states": states,
        "out": out,
        "dt_min": float(dt_limits[0]),
        "dt_max": float(dt_limits[1]),
        "state_stride": states.stride(0),
        "NUM_HEADS": num_heads,
        "GROUP": num_heads // num_groups,
        "V_DIM": v_dim,
    }
    if num_extends:
        config = state_space_chunks_config(gpu, k_dim, v_dim, x.dtype)
        # As many chunks as the extends may have, however their tokens are shared out.
        num_chunks = num_tokens // config.chunk + num_extends
        products = torch.empty(num_chunks, num_groups, config.chunk, config.chunk, device=x.device)
        state_space_within_kernel[(num_chunks * num_groups,)](
            products=products,
            start_loc=rows.start_loc,
            lens=rows.lens,
            num_rows=num_extends,
            **keys,
            NUM_GROUPS=num_groups,
            CHUNK=config.chunk,
            PRECISION=config.precision,
            num_warps=config.within_warps,
        )
        state_space_across_kernel[(num_extends * num_heads * cdiv(v_dim, config.block_v),)](
            products=products,
            **rows.numbers(),
            **keys,
            **heads,
            BLOCK_V=config.block_v,
            CHUNK=config.chunk,
            NUM_STAGES=config.num_stages,
            PRECISION=config.precision,
            num_warps=config.across_warps,
        )
    if num_steps:
        block_v, num_warps = state_space_step_config(gpu, k_dim, v_dim)
        if deterministic:
            block_v, num_warps = token_by_token_config(gpu, k_dim, v_dim)
        state_space_step_kernel[(num_steps * num_heads * cdiv(v_dim, block_v),)](
            **rows.numbers(num_extends),
            **keys,
            **heads,
            BLOCK_V=block_v,
            LONG=deterministic,
            num_warps=num_warps,
            **overlapped(x.device, num_steps),
        )
    return out


def _check(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a_log: Tensor, d: Tensor, dt_bias: Tensor, states: Tensor
) -> None:
    check_heads(x=x, b=b, c=c)
    num_tokens, num_heads, v_dim = x.shape
    num_groups, k_dim = b.shape[1:]
    if num_groups == 0 or num_heads == 0 or num_heads % num_groups:
        raise ValueError(f"{num_heads} heads are no multiple of {num_groups} groups")
    check_shapes(
        x.dtype,
        dt=(dt, [num_tokens, num_heads]),
        b=(b, [num_tokens, num_groups, k_dim]),
        c=(c, [num_tokens, num_groups, k_dim]),
    )
    check_states(states, [num_heads, k_dim, v_dim], a_log=a_log, d=d, dt_bias=dt_bias)
