"""SGLang's `/v1/score`: how likely the model finds each of some tokens after a query with each of some items."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from radixrt.checks import check_kind, check_prompt
from radixrt.errors import PromptError
from radixrt.frontend.openai import usage_fields
from radixrt.output import ScoreOutput, Usage
from radixrt.server.limits import Limits
from radixrt.server.openai_request import check_known, check_size, flag_of, model_of


@dataclass(frozen=True)
class AskedScores:
    """One body.

    Attributes:
        model: as the body calls it, or the server.
        prompts: the query with each item.
        labels: ids of the tokens to score after each.
        is_softmax: whether the scores after a prompt are to add up to 1.
    """

    model: str
    prompts: list[str | list[int]]
    labels: list[int]
    is_softmax: bool

    @property
    def num_scores(self) -> int:
        return len(self.prompts) * len(self.labels)


def read_scores(given: dict[str, Any], limits: Limits, name: str) -> AskedScores:
    """What a body without what is null asks for; `name` is the model's where the body has none.

    Raises ParameterError or PromptError, by name.
    """
    check_known(given, "query", "items", "label_token_ids", "apply_softmax", "item_first")
    query: Any = check_prompt("query", given.get("query"))
    items = given.get("items")
    items = [items] if isinstance(items, str) else check_kind("items", items, list, "a string or a list")
    item_first, is_softmax = (flag_of(given, name) for name in ("item_first", "apply_softmax"))
    prompts: list[str | list[int]] = []
    for place, item in enumerate(items):
        checked: Any = check_prompt(f"items[{place}]", item)
        if type(checked) is not type(query):
            raise PromptError(f"query and items[{place}] must both be text, or both token ids")
        prompts.append(checked + query if item_first else query + checked)
    labels = check_kind("label_token_ids", given.get("label_token_ids"), list, "a list of token ids")
    check_prompt("label_token_ids", labels)
    if not prompts:
        raise PromptError("items is empty")
    check_size(len(prompts), len(labels), limits)
    return AskedScores(model_of(given, limits, name), prompts, labels, is_softmax)


def scores_body(asked: AskedScores, scored: Sequence[Sequence[ScoreOutput]]) -> dict[str, object]:
    """For each prompt the probability of each label, among all tokens or, with softmax, among the labels."""
    scores = [[math.exp(score.logprob) for score in own] for own in scored]
    if asked.is_softmax:
        scores = [_softmax([score.logprob for score in own]) for own in scored]
    head = {"id": f"score-{uuid.uuid4().hex}", "object": "scoring", "created": int(time.time())}
    return {**head, "model": asked.model, "scores": scores, "usage": usage_fields(usage_of(scored))}


def usage_of(scored: Sequence[Sequence[ScoreOutput]]) -> Usage:
    """The counts of all prompts."""
    contexts = [own[0].usage for own in scored]  # its first label's, which is the last token
    return Usage(
        prompt_tokens=sum(one.prompt_tokens - 1 for one in contexts),
        cached_tokens=sum(one.cached_tokens for one in contexts),
        computed_tokens=sum(one.computed_tokens - 1 for one in contexts),
        completion_tokens=0,
    )


def _softmax(logprobs: Sequence[float]) -> list[float]:
    most = max(logprobs)
    weights = [math.exp(logprob - most) for logprob in logprobs]
    return [weight / sum(weights) for weight in weights]
