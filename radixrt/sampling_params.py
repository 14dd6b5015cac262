"""How one request's tokens are chosen and when it ends: a frozen, validated value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from radixrt.bounds import real, whole
from radixrt.errors import ParameterError

MAX_STOP_TOKEN_IDS = 128


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one request.

    Logits are divided by `temperature`, then filtered by `top_k`, `top_p` and `min_p` in this order, then
    one token is drawn. Every value out of bounds raises `ParameterError`.

    Attributes:
        max_new_tokens: most tokens to generate, 1 to 2**31 - 1. The model's context may end a request earlier.
        temperature: 0 to 100; 0 is greedy: the most likely token, and the three filters change nothing.
        top_k: draw from the k most likely tokens, ties at the k-th included; 0 or -1 draws from all.
        top_p: draw from the fewest tokens whose probability reaches top_p, in (0, 1]; 1 draws from all.
        min_p: leave out tokens less likely than min_p times the most likely one, 0 to 1.
        seed: 0 to 2**63 - 1. The same seed, prompt and parameters draw the same tokens in any batch. None:
            derived from the Runtime's seed and the prompt's place in the call.
        stop_token_ids: end at any of these tokens, besides the model's own end tokens. At most 128.
        ignore_eos: do not end at the model's end tokens (`stop_token_ids` still end).
    """

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("max_new_tokens", whole("max_new_tokens", self.max_new_tokens, 1, 2**31 - 1))
        put("temperature", real("temperature", self.temperature, 0.0, 100.0))
        put("top_k", max(0, whole("top_k", self.top_k, -1, 2**31 - 1)))
        put("top_p", real("top_p", self.top_p, 0.0, 1.0, above=True))
        put("min_p", real("min_p", self.min_p, 0.0, 1.0))
        if self.seed is not None:
            put("seed", whole("seed", self.seed, 0, 2**63 - 1))
        ids: object = self.stop_token_ids
        if isinstance(ids, (str, bytes)) or not isinstance(ids, Sequence):
            raise ParameterError(f"stop_token_ids is {ids!r}; it must be a list of token ids")
        if len(ids) > MAX_STOP_TOKEN_IDS:
            raise ParameterError(f"stop_token_ids has {len(ids)} ids; at most {MAX_STOP_TOKEN_IDS} are taken")
        put("stop_token_ids", tuple(whole("stop_token_ids", i, 0, 2**31 - 1) for i in ids))
        if not isinstance(self.ignore_eos, bool):
            raise ParameterError(f"ignore_eos is {self.ignore_eos!r}; it must be True or False")
