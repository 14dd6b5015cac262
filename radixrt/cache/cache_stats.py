"""`CacheStats`: what a cache has done, and what it has now."""

# Tests: tests/cache/test_prefix_cache.py

from __future__ import annotations

from dataclasses import dataclass

from radixrt.hit_rate import CountsHits


@dataclass(frozen=True)
class CacheStats(CountsHits):
    """Counters of a cache since it was made, and its sizes now. All are in tokens, a slot a token, but for numbers
    of states, which are 0 of a model that keeps none.
    """

    prompt_tokens: int  # of all prompts that were admitted, each once
    cached_tokens: int  # those of them that were found in the tree
    recomputed_tokens: int  # computed again, after a retraction or for one of several answers
    evicted_tokens: int  # had to leave the device
    capacity: int  # slots of the pool, without the reserved one; those by state add up to it
    free: int
    evictable: int
    locked: int
    private: int
    pending: int
    arriving: int
    stored_tokens: int = 0  # copied to the host
    loaded_tokens: int = 0  # copied back from it
    host_capacity: int = 0  # slots of the host's pool; 0 without one
    host_free: int = 0
    stateless_tokens: int = 0  # that were in the tree, and were computed again since no state was there
    states_given_up_unused: int = 0  # left where prompts part, and given up before any request began with them
    state_capacity: int = 0  # of the pool, without the reserved one: the next four, and arriving ones
    state_free: int = 0
    state_own: int = 0  # of running requests
    state_kept: int = 0  # at nodes of the tree
    state_pending: int = 0
    state_ends: int = 0  # of those that are kept: ends of answers that no request has gone on from
    state_unused: int = 0  # left where prompts part, with which no request has begun yet
    state_stored: int = 0  # copied to the host
    state_loaded: int = 0  # copied back from it
    state_on_host: int = 0  # that have a copy there
    state_nodes: int = 0  # nodes of the tree that have one, in one tier or both

    @property
    def host_tokens(self) -> int:
        """Tokens that have a copy on the host."""
        return self.host_capacity - self.host_free
