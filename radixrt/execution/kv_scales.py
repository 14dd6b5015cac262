"""Calibrates the scales of an e4m3 pool from one pass."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from memory_pool.req_to_token_pool import ReqToTokenPool, RowChanges
from memory_pool.token_to_kv_pool import TokenToKVPool
from radixrt.execution.model_runner import ModelRunner
from radixrt.models.decoder import Decoder
from radixrt.schedule.passes import NO_ROWS
from triton_ops.e4m3 import E4M3_MAX

NUM_TOKENS = 256
SEED = 0
# e4m3 is a float: down to 2^-15 of its greatest number it is as precise at one scale as at another. So there is
# room for keys and values greater than those of the tokens that were tried.
MARGIN = 4.0


def calibrated_scales(model: Decoder, device: torch.device) -> Tensor:
    """The scales of keys and values for an e4m3 pool, as `TokenToKVPool.scales`, on `device`.

    One pass computes the KV of NUM_TOKENS pseudo-random tokens, always the same, after the model's first token. A
    scale is the power of two at or above MARGIN times the greatest magnitude of its layer and head over the
    greatest number of e4m3; 1 where all are 0, or one is not finite.
    """
    config = model.config
    num_tokens = min(NUM_TOKENS, config.context_length)
    ids = np.random.default_rng(SEED).integers(0, config.vocab_size, num_tokens, dtype=np.int32)
    if config.bos_token_id is not None:
        ids[0] = config.bos_token_id
    pool = TokenToKVPool(num_tokens + 1, model.kv_layout(model.placement.dtype), device=device)
    runner = ModelRunner(model, ReqToTokenPool(1, num_tokens), pool, device)
    zero, positions = np.zeros(1, np.int32), np.arange(num_tokens, dtype=np.int32)
    prompt = replace(
        NO_ROWS,
        num_extends=1,
        req_pool_indices=zero,
        prefix_lens=zero,
        seq_lens=zero + np.int32(num_tokens),
        input_ids=ids,
        out_cache_loc=positions + 1,
        num_samples=zero,
        num_scored=zero,
        row_changes=RowChanges(np.zeros_like(positions), positions, positions + 1),
    )
    runner.collect(runner.launch(prompt))
    least = pool.magnitudes().double().cpu().numpy() * MARGIN / E4M3_MAX
    mantissa, exponent = np.frexp(np.where(np.isfinite(least) & (least > 0), least, 1.0))  # mantissa below 1
    exponent = np.clip(exponent - (mantissa == 0.5), -100, 100)  # float32 can divide by them
    return torch.tensor(np.ldexp(np.float32(1.0), exponent), device=device)
