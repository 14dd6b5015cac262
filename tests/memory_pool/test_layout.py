"""Layouts: what parts take, and one of latents, which no rank divides, through pools, tiers and a kept cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from layers.ranks import Ranks
from memory_pool.layout import Layout, Part
from memory_pool.pool import HostPool
from memory_pool.req_to_token_pool import ReqToTokenPool
from memory_pool.token_to_kv_pool import TokenToKVPool, kv_part
from radixrt.cache.prefix_cache import PrefixCache
from radixrt.cache.radix_tree import Namespace
from radixrt.execution.kv_mover import KVMover
from radixrt.kept_cache.parts import RowPart
from radixrt.kept_cache.storage import CacheStorage

CPU, HERE = torch.device("cpu"), Namespace()
LATENT = Part("latent", 3, (24,), torch.bfloat16)


def test_what_parts_take() -> None:
    """Layers may be of several kinds."""
    layout = Layout((kv_part(5, 4, 256, torch.bfloat16), Part("wide kv", 1, (2, 512), torch.float16, (2,), 2)))
    assert [part.num_bytes for part in layout.parts] == [2 * 5 * 4 * 256 * 2, 2 * 2 * 512 * 2]
    assert (layout.bytes_per_token, layout.bytes_per_sequence) == (24_576, 0)
    assert [part.row_shape for part in (*layout.tokens, LATENT)] == [(5, 2, 4, 256), (1, 2, 2, 512), (3, 24)]
    assert Layout((LATENT,), (LATENT, LATENT)).bytes_per_sequence == 2 * LATENT.num_bytes == 2 * 3 * 24 * 2
    with pytest.raises(ValueError, match=r"latent has 24 rows, but ranks divide \[8, 8\]"):
        Part("latent", 3, (24,), torch.bfloat16, (8, 8))
    with pytest.raises(ValueError, match="latent has 3 arrays in a layer"):
        Part("latent", 3, (24,), torch.bfloat16, num_arrays=3)


class Latents:
    """Pools of latents of one rank, and what moves and keeps them; no model."""

    def __init__(self, num_slots: int) -> None:
        self.pool = TokenToKVPool(num_slots, Layout((LATENT,)), device=CPU)
        self.pool.fill(torch.nan)
        self.host = HostPool(20, self.pool)
        self.mover = KVMover(self.pool, self.host, CPU, "torch")
        self.cache = PrefixCache(ReqToTokenPool(2, 16), self.pool.allocator, host_slots=self.host.allocator)
        self.storage = CacheStorage(self.cache, {"latent": self.part(0)})

    def part(self, rank: int) -> RowPart:
        memories = self.pool.memory["latent"], self.host.memory["latent"]
        return RowPart(*memories, "torch", LATENT, LATENT, Ranks(rank, 2))

    def move(self) -> None:
        """Make the transfers that are booked."""
        if transfers := self.cache.transfers.take():
            self.mover.run(transfers)

    def ask(self, *tokens: int) -> int:
        """Compute the latents of some tokens, in layer l 2^l times the id; return how many were there before."""
        ids = np.array(tokens, np.int32)
        lease = self.cache.acquire(HERE, ids, self.cache.match(HERE, ids, len(ids) - 1), 0)
        assert lease is not None
        assert self.cache.extend(lease, len(ids) - lease.matched) is not None
        self.move()
        slots = self.cache.rows.req_to_token[lease.row, : len(ids)]
        found = self.pool.memory["latent"][:, 0, slots]
        numbers = torch.outer(torch.tensor([1, 2, 4]), torch.from_numpy(ids))
        expected = numbers.bfloat16().unsqueeze(2).expand(-1, -1, 24)
        assert torch.equal(found[:, : lease.matched], expected[:, : lease.matched])
        self.pool.memory["latent"][:, 0, slots] = expected
        self.cache.pass_launched()
        self.cache.commit(lease, ids, len(ids))
        self.cache.release(lease)
        self.cache.pass_ended()
        return lease.matched


def test_latents_go_to_the_host_and_to_a_file(tmp_path: Path) -> None:
    """And back. Every rank has them whole; the first one gives them."""
    first, path, identity = Latents(8), tmp_path / "kept", {"vocab size": 100}
    assert [first.ask(*range(1, 6)), first.ask(*range(11, 16))] == [0, 0]
    assert first.cache.stats().host_tokens
    first.move()
    assert first.storage.save(path, 0, identity, progress=False).tokens == 10
    assert first.ask(1, 2, 3, 4, 5, 6) == 5
    with safe_open(path, "pt") as file:
        assert file.get_slice("latent").get_shape() == [10, 3, 24]
    again = Latents(30)
    assert again.storage.load(path, 0, identity, progress=False).tokens == 10
    assert [again.ask(*range(1, 7)), again.ask(*range(11, 17))] == [5, 5]
    whole, other = torch.rand(2, 3, 24).bfloat16(), Latents(4)
    other.part(1).scatter(whole, np.array([3, 2], np.int32))
    assert torch.equal(other.pool.memory["latent"][:, 0, [3, 2]].transpose(0, 1), whole)
    gathered = [torch.zeros_like(whole), torch.zeros_like(whole)]
    for rank, rows in enumerate(gathered):
        other.part(rank).gather(np.array([3, 2], np.int32), rows)
    assert torch.equal(gathered[0], whole)
    assert not gathered[1].any()
