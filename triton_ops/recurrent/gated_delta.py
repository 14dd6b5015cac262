"""The gated delta rule: a recurrent state instead of keys and values, decayed and corrected by each token.

Yang, Kautz and Hatamizadeh, Gated Delta Networks (2024), arXiv 2412.06464; its form in chunks is that of Yang et
al., Parallelizing Linear Transformers with the Delta Rule over Sequence Length (2024), arXiv 2406.06484.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from triton_ops.implementation import Impl, cdiv, gpu_of, next_power_of_2, overlapped, runs_triton
from triton_ops.recurrent.gated_delta_kernels import (
    NORM_EPS,
    delta_across_kernel,
    delta_step_kernel,
    delta_within_kernel,
)
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
from triton_ops.tuning import MAX_DELTA_DIM, delta_chunks_config, delta_step_config, token_by_token_config


def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    rows: StateRows,
    *,
    deterministic: bool = False,
    impl: Impl = "auto",
) -> Tensor:
    """The outputs of `gated_delta_reference`, whose states are read from and left in a pool.

    Args:
        q, k: `[T, num_k_heads, k_dim]`, any float dtype, as the convolution leaves them: they are normalised here.
        v: `[T, num_v_heads, v_dim]` in the same dtype. `num_v_heads` is a multiple of `num_k_heads`: value head h
            has key head `h // (num_v_heads // num_k_heads)`. Elements of a head lie side by side, in q and k too.
        a, b: `[T, num_v_heads]` in q's dtype, any strides: of decay and of the share that is learnt.
        a_log, dt_bias: `[num_v_heads]`, contiguous, any float dtype.
        states: `[num_states, num_v_heads, k_dim, v_dim]`, float32 (or another float dtype: rounded when left), a
            state contiguous. Those that `rows` leave are written.
        deterministic: the bits of a token's output, and of the state that it leaves, depend on the tokens up to it
            alone, not on where its sequence was cut into extends: all rows go token by token. States are in the
            dtype that is computed in then.

    Returns `[T, num_v_heads, v_dim]` in q's dtype, contiguous. What it holds at tokens of no row is undefined.

    Raises ValueError where shapes or dtypes disagree, and where the kernels have no room for k_dim.

    In torch everything is computed in float32, or in float64 from such q: rows of several tokens in chunks of 64,
    all rows of one token together. So do the kernels, but in a chunk they multiply in q's dtype and add in
    float32: the state is float32 from chunk to chunk, and rounded where a product reads it. A row's bits do not
    depend on other rows.
    """
    _check(q, k, v, a, b, a_log, dt_bias, states)
    if deterministic:
        check_exact(states, q.dtype)
    if runs_triton(impl, q.device):
        return _launch(q, k, v, a, b, a_log, dt_bias, states, rows, deterministic)

    def inputs_of(tokens: slice | Tensor) -> _Tokens:
        return _Tokens.of(q[tokens], k[tokens], v[tokens], a[tokens], b[tokens], a_log, dt_bias)

    out = torch.zeros(v.shape, dtype=v.dtype, device=v.device)
    return compute_rows(inputs_of, states, rows, out, deterministic=deterministic)


def gated_delta_reference(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """What the gated delta rule means, in float64, for the L tokens of one sequence, each head by itself.

    From a state S `[k_dim, v_dim]`, token by token, with q and k divided by their lengths, and q by
    `sqrt(k_dim)`::

        decay = exp(-exp(a_log) * softplus(a + dt_bias))
        beta = sigmoid(b), rounded to b's dtype as in transformers
        S = decay * S
        S = S + k (beta * (v - S^T k))^T
        out = S^T q

    The arguments are those of `gated_delta`, of L tokens and one `state [num_v_heads, k_dim, v_dim]`. Returns the
    outputs `[L, num_v_heads, v_dim]` and the state that is left, in float64.
    """
    at = _Tokens.of(q, k, v, a, b, a_log, dt_bias, dtype=torch.float64)
    return at.one_by_one(state.double(), torch.empty_like(at.v))


@dataclass(frozen=True)
class _Tokens(TokenInputs):
    """What the rule takes of some tokens, for each value head: in float32, or in float64 from such q.

    Attributes:
        q, k: `[n, num_v_heads, k_dim]`, normalised.
        v: `[n, num_v_heads, v_dim]`.
        log_decay, beta: `[n, num_v_heads]`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor

    @staticmethod
    def of(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        a_log: Tensor,
        dt_bias: Tensor,
        dtype: torch.dtype = torch.float32,
    ) -> _Tokens:
        dtype = torch.promote_types(q.dtype, dtype)
        group = v.shape[1] // k.shape[1]
        # Of steps that torch computes alike at all places, as it does not in its own sigmoid.
        beta = (1.0 / (-b.to(dtype)).exp().add_(1.0)).to(b.dtype)
        return _Tokens(
            _normalised(q.to(dtype)).mul_(q.shape[-1] ** -0.5).repeat_interleave(group, 1),
            _normalised(k.to(dtype)).repeat_interleave(group, 1),
            v.to(dtype),
            softplus(a.to(dtype) + dt_bias.to(dtype)) * -a_log.to(dtype).exp(),
            beta.to(dtype),
        )

    def step(self, state: Tensor) -> tuple[Tensor, Tensor]:
        state = state * self.log_decay.exp()[..., None, None]
        predicted = (state * self.k[..., None]).sum(-2)
        state = state + self.k[..., None] * (self.beta[..., None] * (self.v - predicted))[..., None, :]
        return (state * self.q[..., None]).sum(-2), state

    def by_chunks(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """With G the sums of log decays from a chunk's begin, S the state there and u_t what token t adds to it,
        `u_t = beta_t (v_t - exp(G_t) S^T k_t - sum_{i<t} exp(G_t - G_i) (k_t . k_i) u_i)`: a triangular system,
        solved for all chunks at once, up to S. Then chunk after chunk
        `out_t = exp(G_t) S^T q_t + sum_{i<=t} exp(G_t - G_i) (q_t . k_i) u_i`.
        """
        length = len(self.q)
        size = min(CHUNK, length)
        q, k, v, beta, sums = (in_chunks(x, size) for x in (self.q, self.k, self.v, self.beta, self.log_decay))
        sums = sums.cumsum(2)
        later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu_(1)
        between = (sums[..., :, None] - sums[..., None, :]).masked_fill_(later, -torch.inf).exp_()
        system = beta[..., None] * between * (k @ k.mT)  # its diagonal, which is not 1, is not read
        decayed = sums.exp()[..., None]
        known = beta[..., None] * torch.cat([v, decayed * k], -1)
        solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
        own, per_state = solved.split([v.shape[-1], k.shape[-1]], -1)
        inside = between * (q @ k.mT)
        q = decayed * q
        k = (sums[..., -1:] - sums).exp()[..., None] * k
        whole = sums[..., -1].exp()[..., None, None]
        out = torch.empty_like(v)
        for c in range(v.shape[1]):
            added = own[:, c] - per_state[:, c] @ state
            out[:, c] = q[:, c] @ state + inside[:, c] @ added
            state = whole[:, c] * state + k[:, c].mT @ added
        return out.movedim(0, 2).flatten(0, 1)[:length], state


def _normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


# --- the kernels ---


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    rows: StateRows,
    deterministic: bool,
) -> Tensor:
    (num_tokens, num_heads, v_dim), k_dim, num_extends = v.shape, q.shape[2], rows.num_extends
    check_kernels(q.dtype, k_dim, MAX_DELTA_DIM, names=("q", "k_dim"))
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if deterministic:
        num_extends = 0  # the kernel of steps goes through all rows
    num_steps = len(rows.lens) - num_extends
    if num_tokens == 0:
        return out
    gpu, block_k = gpu_of(q.device), max(16, next_power_of_2(k_dim))
    heads = {"NUM_V_HEADS": num_heads, "GROUP": num_heads // k.shape[1], "K_DIM": k_dim, "BLOCK_K": block_k}
    queries_and_keys = by_token("head", q=q, k=k)
    gates = by_token("head", a=a, b=b) | {"a_log": a_log, "dt_bias": dt_bias}
    columns = by_token("head", v=v) | {
        "states": states,
        "out": out,
        "state_stride": states.stride(0),
        "V_DIM": v_dim,
    }
    if num_extends:
        config = delta_chunks_config(gpu, k_dim, v_dim, q.dtype)
        # As many chunks as the extends may have, however their tokens are shared out.
        num_chunks = num_tokens // config.chunk + num_extends
        tiles = torch.empty(2, num_chunks, num_heads, config.chunk**2, dtype=q.dtype, device=q.device)
        parts = {
            "solved": tiles[0],
            "inside": tiles[1],
            "factors": torch.empty(num_chunks, num_heads, 4, config.chunk, device=q.device),
        }
        delta_within_kernel[(num_chunks * num_heads,)](
            start_loc=rows.start_loc,
            lens=rows.lens,
            num_rows=num_extends,
            **queries_and_keys,
            **gates,
            **parts,
            **heads,
            CHUNK=config.chunk,
            PRECISION=config.precision,
            SOLVE_PRECISION=config.solve_precision,
            num_warps=config.within_warps,
        )
        delta_across_kernel[(num_extends * num_heads * cdiv(v_dim, config.block_v),)](
            **rows.numbers(),
            **queries_and_keys,
            **columns,
            **parts,
            **heads,
            BLOCK_V=config.block_v,
            CHUNK=config.chunk,
            NUM_STAGES=config.num_stages,
            PRECISION=config.precision,
            num_warps=config.across_warps,
        )
    if num_steps:
        block_v, num_warps = delta_step_config(gpu, v_dim, q.dtype)
        if deterministic:
            block_v, num_warps = token_by_token_config(gpu, k_dim, v_dim)
        delta_step_kernel[(num_steps * num_heads * cdiv(v_dim, block_v),)](
            **rows.numbers(num_extends),
            **queries_and_keys,
            **gates,
            **columns,
            **heads,
            BLOCK_V=block_v,
            LONG=deterministic,
            num_warps=num_warps,
            **overlapped(q.device, num_steps),
        )
    return out


def _check(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, states: Tensor
) -> None:
    check_heads(q=q, k=k, v=v)
    num_tokens, num_v_heads, v_dim = v.shape
    num_k_heads, k_dim = k.shape[1:]
    if num_k_heads == 0 or num_v_heads == 0 or num_v_heads % num_k_heads:
        raise ValueError(f"{num_v_heads} value heads are no multiple of {num_k_heads} key heads")
    check_shapes(
        q.dtype,
        q=(q, [num_tokens, num_k_heads, k_dim]),
        k=(k, [num_tokens, num_k_heads, k_dim]),
        v=(v, [num_tokens, num_v_heads, v_dim]),
        a=(a, [num_tokens, num_v_heads]),
        b=(b, [num_tokens, num_v_heads]),
    )
    check_states(states, [num_v_heads, k_dim, v_dim], a_log=a_log, dt_bias=dt_bias)
