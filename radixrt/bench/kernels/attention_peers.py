"""Other libraries' attention kernels on the same inputs. A peer that cannot run raises an exception.

SDPA and FlexAttention know no pool: for them KV is gathered beforehand, which is not timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from radixrt.bench.kernels.attention_inputs import AttentionInputs
from radixrt.bench.kernels.case import Call

FLASH_INFER_WORKSPACE = 128 * 2**20  # bytes


def sdpa_flash(inputs: AttentionInputs) -> Call:
    """torch's own FlashAttention-2."""
    return _sdpa(inputs, SDPBackend.FLASH_ATTENTION)


def sdpa_cudnn(inputs: AttentionInputs) -> Call:
    """cuDNN's attention through torch, which can mask only prompts without a prefix."""
    shape = inputs.shape
    if shape.prefix and shape.extend > 1:
        raise NotImplementedError("torch gives cuDNN no causal mask that ends at the last key")
    return _sdpa(inputs, SDPBackend.CUDNN_ATTENTION)


def _sdpa(inputs: AttentionInputs, backend: SDPBackend) -> Call:
    from torch.nn.attention.bias import causal_lower_right

    shape = inputs.shape
    q, keys, values = _batched(inputs)
    mask: Any = None
    if shape.prefix and shape.extend > 1:
        mask = causal_lower_right(shape.extend, shape.length)

    def run() -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(
                q,
                keys,
                values,
                attn_mask=mask,
                is_causal=shape.prefix == 0 and shape.extend > 1,
                scale=shape.scale,
                enable_gqa=shape.num_heads != shape.num_kv_heads,
            )

    return Call(run, _token_rows)


def flex_attention(inputs: AttentionInputs) -> Call:
    """FlexAttention compiled for this shape; its block mask is not timed."""
    from torch.nn.attention.flex_attention import create_block_mask
    from torch.nn.attention.flex_attention import flex_attention as attend

    shape = inputs.shape
    q, keys, values = _batched(inputs)
    mask = None
    if shape.extend > 1:

        def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return query + shape.prefix >= key

        mask = create_block_mask(visible, None, None, shape.extend, shape.length, device=str(q.device))
    compiled = torch.compile(attend, dynamic=False)

    def run() -> object:
        return compiled(q, keys, values, block_mask=mask, scale=shape.scale, enable_gqa=True)

    return Call(run, _token_rows)


def _batched(inputs: AttentionInputs) -> tuple[Tensor, Tensor, Tensor]:
    """q, keys and values as `[batch, heads, tokens, head_dim]`."""
    q = inputs.q.view(inputs.shape.batch, inputs.shape.extend, *inputs.q.shape[1:])
    dense = (inputs.dense(buffer) for buffer in (inputs.k_buffer, inputs.v_buffer))
    keys, values = (x.transpose(1, 2).contiguous() for x in dense)
    return q.transpose(1, 2).contiguous(), keys, values


def _token_rows(out: Any) -> Sequence[Tensor]:
    return (out.transpose(1, 2).flatten(0, 1),)


def flash_infer_decode(inputs: AttentionInputs) -> Call:
    """FlashInfer's batch decode on tensor cores, with pages of one token; its plan is not timed."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper  # type: ignore[import-not-found]

    wrapper = BatchDecodeWithPagedKVCacheWrapper(_workspace(inputs), "NHD", use_tensor_cores=True)
    wrapper.plan(
        _offsets(inputs.seq_lens),
        inputs.req_to_token.flatten(),
        torch.ones_like(inputs.seq_lens),
        *_heads(inputs),
        **_numbers(inputs),
    )
    return _flash_infer_call(wrapper.run, inputs)


def flash_infer_extend(inputs: AttentionInputs, backend: str) -> Call:
    """FlashInfer's batch prefill over pages of one token, the new tokens' among them."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    wrapper = BatchPrefillWithPagedKVCacheWrapper(_workspace(inputs), "NHD", backend=backend)
    wrapper.plan(
        _offsets(inputs.extend_seq_lens),
        _offsets(inputs.seq_lens),
        inputs.req_to_token.flatten(),
        torch.ones_like(inputs.seq_lens),
        *_heads(inputs),
        causal=True,
        **_numbers(inputs),
    )
    return _flash_infer_call(wrapper.run, inputs)


def flash_infer_cascade(inputs: AttentionInputs, levels: Sequence[tuple[int, int]]) -> Call:
    """FlashInfer's cascade: a launch for each of the (nodes, tokens of each) from the roots on, and merges of two
    between them. Pages of one token; requests below a node are next to one another; its plan is not timed.
    """
    from flashinfer import MultiLevelCascadeAttentionWrapper

    shape, int32 = inputs.shape, partial(torch.arange, dtype=torch.int32, device=inputs.q.device)
    queries, pages, page_lens, offsets, begin = [], [], [], [], 0
    for count, length in levels:
        each = shape.batch // count
        queries.append(int32(0, shape.batch + 1, each))
        offsets.append(int32(0, count * length + 1, length))
        pages.append(inputs.req_to_token[::each, begin : begin + length].flatten())
        page_lens.append(torch.ones(count, dtype=torch.int32, device=inputs.q.device))
        begin += length
    wrapper = MultiLevelCascadeAttentionWrapper(len(levels), _workspace(inputs), "NHD")
    wrapper.plan(
        queries,
        offsets,
        pages,
        page_lens,
        *_heads(inputs),
        **_numbers(inputs),
    )
    return _flash_infer_call(wrapper.run, inputs)


def _flash_infer_call(run: Callable[..., Any], inputs: AttentionInputs) -> Call:
    pool = (inputs.k_buffer.unsqueeze(1), inputs.v_buffer.unsqueeze(1))  # pages of one token

    return Call(lambda: run(inputs.q, pool))


def _heads(inputs: AttentionInputs) -> tuple[int, int, int, int]:
    """Heads of queries and of KV, their size, and that of a page."""
    return inputs.shape.num_heads, inputs.shape.num_kv_heads, inputs.shape.head_dim, 1


def _numbers(inputs: AttentionInputs) -> dict[str, Any]:
    shape = inputs.shape
    return {"sm_scale": shape.scale, "q_data_type": shape.dtype, "kv_data_type": shape.dtype}


def _offsets(lens: Tensor) -> Tensor:
    return torch.cat([lens.new_zeros(1), lens.cumsum(0, dtype=torch.int32)])


def _workspace(inputs: AttentionInputs) -> Tensor:
    return torch.zeros(FLASH_INFER_WORKSPACE, dtype=torch.uint8, device=inputs.q.device)
