"""What the page shows: numbers of the engine, a tenant's part of the tree, and its last answers."""

# Tests: tests/server/test_page.py

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from radixrt.cache.cache_stats import CacheStats
from radixrt.cache.excerpt import Excerpts, TreeExcerpt
from radixrt.runtime import Runtime
from radixrt.server.event_frame import json_bytes
from radixrt.server.recent import Recent
from radixrt.server.refusal import Refusal

_FRESH = 0.5  # seconds in which all viewers get the same
_PATIENCE = 1.0  # for a pass to end; then viewers get what there was before
_KEPT = 60.0  # after a tenant's last view


@dataclass
class _View:
    """One tenant's.

    Attributes:
        excerpts: remember the nodes that were shown.
        body, made: the last JSON, and when it was.
        making: the next one.
        seen: when it was asked for.
    """

    excerpts: Excerpts
    body: bytes = b""
    made: float = float("-inf")
    making: asyncio.Future[bytes] | None = None
    seen: float = field(default_factory=time.monotonic)


class States:
    """Tells viewers how a server is: at most twice a second for each tenant, from a thread of its own."""

    def __init__(
        self, runtime: Runtime, name: str, recent: Recent, *, has_tenants: bool, status: Callable[[], str]
    ):
        """`status` is a word on whether it works; with tenants, each sees its own prefixes and answers."""
        self._runtime, self._name, self._recent, self._status = runtime, name, recent, status
        self._has_tenants = has_tenants
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="radixrt-state")  # it waits for passes
        self._views: dict[str | None, _View] = {}
        self._began = time.monotonic()

    async def of(self, tenant: str | None) -> bytes:
        """The state as JSON. Raises Refusal where there is none yet, as a pass takes long."""
        now = time.monotonic()
        self._forget(now)
        view = self._views.get(tenant)
        if view is None:
            view = self._views[tenant] = _View(
                Excerpts(lambda space: not self._has_tenants or space.tenant == tenant)
            )
        view.seen = now
        if view.making is None or view.making.done():
            if now - view.made <= _FRESH:
                return view.body
            view.making = asyncio.get_running_loop().run_in_executor(self._thread, self._make, view, tenant)
        making = view.making
        await asyncio.wait((making,), timeout=_PATIENCE)
        if making.done():
            return making.result()
        if not view.body:
            raise Refusal(503, "a pass takes long; come again", "busy", {"Retry-After": "1"})
        return view.body

    def _forget(self, now: float) -> None:
        for tenant, view in [*self._views.items()]:
            if now - view.seen > _KEPT and (view.making is None or view.making.done()):
                del self._views[tenant]

    def _make(self, view: _View, tenant: str | None) -> bytes:
        runtime = self._runtime
        excerpt = runtime.read_tree(view.excerpts.take)
        activity, cache = runtime.activity(), runtime.cache_stats()
        state = {
            "model": self._name,
            "status": self._status(),
            "uptime": round(time.monotonic() - self._began, 3),
            "requests": {"running": runtime.num_running, "waiting": runtime.num_waiting},
            "counters": {
                "passes": activity.passes,
                "extended_tokens": activity.extended_tokens,
                "decoded_tokens": activity.decoded_tokens,
                "prompt_tokens": cache.prompt_tokens,
                "cached_tokens": cache.cached_tokens,
                "recomputed_tokens": cache.recomputed_tokens,
                "evicted_tokens": cache.evicted_tokens,
            },
            "pool": {
                "capacity": cache.capacity,
                "free": cache.free,
                "evictable": cache.evictable,
                "locked": cache.locked,
                "private": cache.private,
                "pending": cache.pending,
                "host_capacity": cache.host_capacity,
                "host_free": cache.host_free,
            },
            **({} if not cache.state_capacity else {"states": _states(cache)}),
            "tree": _tree(excerpt),
            "recent": self._recent.of(tenant),
        }
        view.body, view.made = json_bytes(state), time.monotonic()
        return view.body


def _states(cache: CacheStats) -> dict[str, int]:
    return {
        "capacity": cache.state_capacity,
        "free": cache.state_free,
        "own": cache.state_own,
        "kept": cache.state_kept,
        "pending": cache.state_pending,
        "ends": cache.state_ends,
        "unused": cache.state_unused,
        "on_host": cache.state_on_host,
        "stored": cache.state_stored,
        "loaded": cache.state_loaded,
        "given_up_unused": cache.states_given_up_unused,
        "stateless_tokens": cache.stateless_tokens,
    }


def _tree(excerpt: TreeExcerpt) -> dict[str, Any]:
    names = ("ids", "parents", "tokens", "hits", "locks", "ages", "tiers")
    left_out = {
        "parents": [*excerpt.left_out],
        "children": [*excerpt.left_out.values()],
        "tokens": [*excerpt.left_out_tokens.values()],
    }
    return {**{name: getattr(excerpt, name) for name in names}, "left_out": left_out}
