"""The last answers of each tenant, in numbers."""

# Tests: tests/server/test_page.py

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from radixrt.output import Usage

_KEPT = 20  # of a tenant


class Recent:
    """Notes ids and counts of answers as they are made, from any thread, and nothing of their texts."""

    def __init__(self) -> None:
        self._by_tenant: dict[str | None, deque[dict[str, Any]]] = {}

    def note(self, tenant: str | None, answer_id: str, usages: Sequence[Usage], seconds: float) -> None:
        """Keep the id and the counts of an answer that took so long."""
        noted = {
            "id": answer_id,
            "prompt_tokens": sum(usage.prompt_tokens for usage in usages),
            "cached_tokens": sum(usage.cached_tokens for usage in usages),
            "completion_tokens": sum(usage.completion_tokens for usage in usages),
            "seconds": round(seconds, 3),
            "ended": time.monotonic(),
        }
        self._by_tenant.setdefault(tenant, deque(maxlen=_KEPT)).appendleft(noted)

    def of(self, tenant: str | None) -> list[dict[str, Any]]:
        """Those of a tenant, the last first; `age` in seconds."""
        now, noted = time.monotonic(), self._by_tenant.get(tenant, deque()).copy()
        return [
            {name: value for name, value in one.items() if name != "ended"} | {"age": round(now - one["ended"], 1)}
            for one in noted
        ]
