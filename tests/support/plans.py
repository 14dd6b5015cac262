"""Plans of small lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from radixrt.planning.batch_plan import BatchPlan, plan_batch
from radixrt.planning.demands import Demands
from radixrt.planning.token_store import TokenStore


def planned(
    prompts: Sequence[Any], new_tokens: Any = 1, num_answers: Any = 1, match_limits: Any = None
) -> BatchPlan:
    """The plan of some lists of token ids."""
    store = TokenStore.of(prompts)
    return plan_batch(store, Demands.of(store.lengths, new_tokens, num_answers, match_limits))
