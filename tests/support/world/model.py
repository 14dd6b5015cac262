"""The model of a world: KV, tokens and log-probabilities are hashes of what was read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from radixrt.cache.radix_tree import Namespace
from radixrt.schedule.passes import Logprobs
from tests.support.forms import RuleForm

VOCAB = 5
MASK = (1 << 64) - 1
POISON = 0xDEADDEADDEADDEAD  # the KV of slots that nobody may read
NOT_FINITE = POISON + 1  # the KV of a token whose numbers are not finite, as are those of all that read it


def mix(value: int) -> int:
    value = (value ^ (value >> 31)) * 0x9E3779B97F4A7C15 & MASK
    value = (value ^ (value >> 29)) * 0xBF58476D1CE4E5B9 & MASK
    return value ^ (value >> 32)


def start_of(namespace: Namespace, weights: int) -> int:
    return mix(sum(map(ord, repr(namespace))) + 1 + weights * 0x10001)


def read_on(read: int, kv: int) -> int:
    """What is known after one more position has been read."""
    return (read * 0x5851F42D4C957F2D + kv + 1) & MASK


def kv_of(read: int, token: int) -> int:
    return mix(read + 0x1000003 * (token + 1) & MASK)


def histories(namespace: Namespace, tokens: Sequence[int], weights: int = 0) -> list[int]:
    """The KV of each token, given all tokens before it."""
    read, out = start_of(namespace, weights), []
    for token in tokens:
        out.append(kv_of(read, int(token)))
        read = read_on(read, out[-1])
    return out


def draw(read: int, sample_index: int, allowed: Sequence[int] = range(VOCAB)) -> int:
    return allowed[mix(read + sample_index * 0x2545F491 & MASK) % len(allowed)]


def form_of(length: int) -> RuleForm:
    """A form of so many tokens: what may come next depends on all before it, and on how many these are."""

    def allowed(tokens: Sequence[int]) -> set[int]:
        if len(tokens) == length:
            return set()
        if (sum(tokens) + len(tokens)) % 7 < 3 or len(tokens) % 5 == 3:  # some tokens are forced, often in a row
            return {(3 * len(tokens) + sum(tokens)) % VOCAB}
        return {token for token in range(VOCAB) if (token + 2 * sum(tokens) + len(tokens)) % 3}

    return RuleForm(VOCAB, allowed)


def continuation(
    namespace: Namespace,
    prompt: Sequence[int],
    count: int,
    stop_ids: frozenset[int],
    sample_index: int = 0,
    weights: int = 0,
    form: RuleForm | None = None,
) -> list[int]:
    """What the model says after a prompt when nothing goes wrong."""
    tokens, read = list(map(int, prompt)), start_of(namespace, weights)
    for kv in histories(namespace, tokens, weights):
        read = read_on(read, kv)
    out: list[int] = []
    while len(out) < count:
        token = draw(read, sample_index, range(VOCAB) if form is None else sorted(form.allowed(out)))
        out.append(token)
        if token in stop_ids or (form is not None and not form.allowed(out)):
            break
        read = read_on(read, kv_of(read, token))
    return out


def logprob_of(token: int) -> np.float32:
    """A log-probability that tells which token it is of."""
    return np.float32(mix(token + 1))


def logprobs_of(tokens: Sequence[int]) -> Logprobs:
    return Logprobs(
        np.array([logprob_of(token) for token in tokens], dtype=np.float32),
        np.ones(len(tokens), np.int32),
        np.zeros((len(tokens), 0), np.int32),
        np.zeros((len(tokens), 0), np.float32),
    )
