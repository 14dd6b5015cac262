"""What tests of the host's tier share: of KV, and of states."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from radixrt import RequestOutput
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.world.world import World


def run(world: World, *prompts: list[int]) -> list[int]:
    """Run prompts one after the other; how many of each one's tokens were cached."""
    out = []
    for prompt in prompts:
        request = world.submit(prompt, 1)
        world.drain_requests()
        assert request is not None
        out.append(request.usage().cached_tokens)
    return out


def prompts_of_six_heads() -> list[list[int]]:
    """Six heads of 60 tokens, each with three tails, head after head and then all heads again."""
    rng = np.random.default_rng(0)
    heads = [rng.integers(3, VOCAB_SIZE, 60).tolist() for _ in range(6)]
    return [[*head, 3 + tail, *rng.integers(3, VOCAB_SIZE, 4).tolist()] for tail in range(3) for head in heads]


def tokens(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


def cut_short_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, is_under_way: bool) -> None:
    """The next call of a method raises, before it has done anything or once all of it is under way."""
    original = getattr(owner, name)

    def once(*arguments: Any) -> Any:
        monkeypatch.setattr(owner, name, original)
        if is_under_way:
            original(*arguments)
        raise RuntimeError("cut short")

    monkeypatch.setattr(owner, name, once)
