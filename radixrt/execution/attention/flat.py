"""Plans without sharing: the KV of each request is cut so that all multiprocessors have work."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from triton_ops.attention.extend import extend_tile_tokens
from triton_ops.attention.plan import Int32Array
from triton_ops.attention.shared import shared_rows
from triton_ops.implementation import GPU
from triton_ops.tuning import SHORT_ROWS

DECODE_PROGRAMS_PER_SM = 4  # that contexts are cut for: four or five of the kernel's run side by side
MIN_DECODE_ITEM = 192  # tokens; shorter pieces of a context are not worth a partial result
MORE_WAVES = 3  # than fewest, less one, that contexts are cut for
ITEM_COST = 200  # of an item, in tokens that it could read instead
MERGE_COST = 50  # of merging partial results, in tokens that each program could read instead
EXTEND_PROGRAMS_PER_SM = 2  # of the kernel's that run side by side
MIN_EXTEND_ITEM = 512  # tokens; shorter pieces of a prefix are not worth a partial result


@dataclass(frozen=True)
class KernelShape:
    """What the attention of a model looks like to a GPU, and how much its kernels read in an item."""

    gpu: GPU
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype  # of queries

    @property
    def group(self) -> int:
        """Heads that read a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def shared_rows(self) -> int:
        """Query rows of a shared item."""
        return shared_rows(self.gpu, self.head_dim, self.group, self.dtype)

    @property
    def decode_wave(self) -> int:
        """Items of decodes that the multiprocessors run side by side."""
        return max(1, DECODE_PROGRAMS_PER_SM * self.gpu.num_sms // self.num_kv_heads)

    def decode_item_len(self, lens: Int32Array) -> int:
        """The greatest length of an item for requests that read `lens` int32 `[R]` tokens each.

        Items fill whole waves, unless longer ones in fewer waves cost less: each costs its tokens and something
        for itself (measured on an H200).
        """
        lens = lens[lens > 0]
        count, total = lens.size, int(lens.sum(dtype=np.int64))
        longest, wave = int(lens.max(initial=1)), self.decode_wave

        def cost(num_items: int, longest_item: int) -> float:
            waves = -(-num_items // wave)
            return max(waves * (total / num_items + ITEM_COST), longest_item + ITEM_COST)

        best_len, best = longest, cost(count, longest) if count else 0.0
        for waves in range(-(-count // wave), -(-count // wave) + MORE_WAVES):
            # A request's last piece is half empty on average.
            length = max(MIN_DECODE_ITEM, total // max(1, waves * wave - count // 2))
            while length < longest:
                length = -(-length // 64) * 64
                num_items = int((-(-lens // length)).sum())
                if num_items <= waves * wave:
                    found = cost(num_items, length) + MERGE_COST
                    if found < best:
                        best_len, best = length, found
                    break
                length += length // 8 + 1
        return best_len

    def max_decode_items(self, num_rows: int) -> int:
        """The most items that contexts of `num_rows` requests are cut into by `decode_item_len`."""
        return (-(-num_rows // self.decode_wave) + MORE_WAVES - 1) * self.decode_wave

    def tile_tokens(self, extend_seq_lens: Int32Array | None = None) -> int:
        """Tokens of a tile of extends of these lengths; None: of long ones."""
        short = extend_seq_lens is not None and int(extend_seq_lens.max(initial=0)) * self.group <= SHORT_ROWS
        return extend_tile_tokens(self.gpu, self.head_dim, self.group, self.dtype, short=short)

    def extend_item_len(
        self, prefix_lens: Int32Array, extend_seq_lens: Int32Array, tile_tokens: int, sliding_window: int | None
    ) -> int:
        """The greatest length of an item for tiles of extends that read `prefix_lens` `[R]` by themselves.

        KV is cut where it is more than a fair share for each of the programs that run side by side, unless the
        pieces were too short to be worth a partial result.
        """
        num_tiles = -(-extend_seq_lens.astype(np.int64) // tile_tokens)
        # A tile in the middle of the new tokens reads the mean of its request's.
        mean = prefix_lens + (extend_seq_lens + tile_tokens) // 2
        if sliding_window is not None:
            mean = mean.clip(max=sliding_window + tile_tokens)
        fair = self.fair_extend_len(int((num_tiles * mean).sum()))
        return -(-max(fair, MIN_EXTEND_ITEM) // 64) * 64

    def fair_extend_len(self, num_tokens: int) -> int:
        """The tokens of each item if one wave of equal items read `num_tokens` in all."""
        return num_tokens * self.num_kv_heads // (EXTEND_PROGRAMS_PER_SM * self.gpu.num_sms)

    @property
    def max_extra_extend_items(self) -> int:
        """The most items more than tiles that extends have by cutting: about twice the fair shares."""
        return 2 * -(-EXTEND_PROGRAMS_PER_SM * self.gpu.num_sms // self.num_kv_heads)
