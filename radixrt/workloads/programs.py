"""Programs: rounds of prompts, each of which may depend on the answers to those before.

A program is a generator that yields what it asks in a round and is sent the answers, in the same order. All of a
round is known at once. A list that is known beforehand is a program of one round.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from radixrt.cache.radix_tree import Tokens
from radixrt.workloads.lists import (
    VOCAB_SIZE,
    Ask,
    Range,
    TokenSource,
    docqa,
    fewshot,
    samples,
    system_prompt,
    unshared,
)
from radixrt.workloads.statistics import TokenStatistics, token_statistics

Answer = Sequence[int]
Program = Generator[Sequence[Ask], Sequence[Answer], None]


@dataclass(frozen=True)
class Round:
    """What was asked together, and the answer to each (empty where a likelihood was asked for)."""

    asks: Sequence[Ask]
    answers: Sequence[Answer]

    @property
    def prompts(self) -> list[Tokens]:
        """All that the model read of each ask, int32."""
        return [ask.input_ids for ask in self.asks]

    @property
    def computed(self) -> list[Tokens]:
        """The tokens whose KV the round computed, int32: the last token of an answer was sampled, but not read."""
        return [
            np.concatenate([ask.input_ids, np.asarray(answer[:-1], dtype=np.int32)])
            for ask, answer in zip(self.asks, self.answers, strict=True)
        ]


def play(program: Program, answer: Callable[[Sequence[Ask]], Sequence[Answer]]) -> Iterator[Round]:
    """Run a program: `answer` is called with each round's asks and returns an answer to each."""
    try:
        asks = next(program)
        while True:
            answers = answer(asks)
            yield Round(asks, answers)
            asks = program.send(answers)
    except StopIteration:
        return


def with_history(rounds: Iterable[Round]) -> Iterator[tuple[Round, list[Tokens]]]:
    """Each round, and the token sequences that the rounds before it have computed."""
    history: list[Tokens] = []
    for played in rounds:
        yield played, history
        history = history + played.computed


def program_statistics(rounds: Iterable[Round]) -> TokenStatistics:
    """Token counts of a program that has been played; its best_hit_rate is the best possible one.

    From the token lists alone: a prompt can hit any prefix that was computed before it, of prompts or of prompts
    with their answers, but for the last token of each answer, which was sampled and never read. In a round,
    prompts can hit one another, in the order that is best; the answers of a round come after all its prompts.
    The cache is empty at first and has no limit.
    """
    return sum(
        (
            token_statistics(played.prompts, history, [ask.num_computed for ask in played.asks])
            for played, history in with_history(rounds)
        ),
        TokenStatistics(),
    )


def one_round(asks: Sequence[Ask]) -> Program:
    """A list that is known beforehand."""
    yield asks


def chat(
    seed: int = 5,
    *,
    conversations: int = 64,
    turns: int = 8,
    system_len: int = 1024,
    user_len: Range = (32, 256),
    new_tokens: Range = (64, 256),
    vocab_size: int = VOCAB_SIZE,
) -> Program:
    """Conversations behind one system prompt: a turn's prompt is all that was said, and what the user adds."""
    source = TokenSource(seed, vocab_size)
    system = source.tokens(system_len)
    histories = [system] * conversations
    for _ in range(turns):
        asks = [
            Ask(np.concatenate([history, source.some_tokens(user_len)]), source.length(new_tokens))
            for history in histories
        ]
        answers = yield asks
        histories = [_extended(ask, answer) for ask, answer in zip(asks, answers, strict=True)]


def choices(
    seed: int = 6,
    *,
    questions: int = 256,
    choices: int = 4,
    examples_len: int = 1024,
    question_len: Range = (64, 256),
    choice_len: Range = (4, 32),
    vocab_size: int = VOCAB_SIZE,
) -> Program:
    """Multiple choice: the likelihood of each choice after its question, all questions after the same examples."""
    source = TokenSource(seed, vocab_size)
    examples = source.tokens(examples_len)
    asks = []
    for _ in range(questions):
        question = np.concatenate([examples, source.some_tokens(question_len)])
        asks += [Ask(question, 1, source.some_tokens(choice_len)) for _ in range(choices)]
    yield asks


def tree_search(
    seed: int = 7,
    *,
    roots: int = 16,
    root_len: int = 1024,
    rounds: int = 5,
    branches: int = 8,
    kept: int = 4,
    new_tokens: int = 64,
    vocab_size: int = VOCAB_SIZE,
) -> Program:
    """Branching programs: each round, every kept text is continued in several ways, and few of these are kept.

    Chance decides which, in place of a judge.
    """
    source = TokenSource(seed, vocab_size)
    trees = [[source.tokens(root_len)] for _ in range(roots)]
    for _ in range(rounds):
        asks = [Ask(text, new_tokens) for texts in trees for text in texts for _ in range(branches)]
        answers = yield asks
        children = iter([_extended(ask, answer) for ask, answer in zip(asks, answers, strict=True)])
        trees = [
            source.random.sample(grown, min(kept, len(grown)))
            for grown in [[next(children) for _ in range(len(texts) * branches)] for texts in trees]
        ]


def _extended(ask: Ask, answer: Answer) -> Tokens:
    return np.concatenate([ask.prompt_ids, np.asarray(answer, dtype=np.int32)])


def _listed(make: Callable[..., list[Ask]]) -> Callable[..., Program]:
    def program(seed: int, **sizes: object) -> Program:
        return one_round(make(seed, **sizes))

    return program


PROGRAMS: dict[str, Callable[..., Program]] = {
    **{make.__name__: _listed(make) for make in (unshared, fewshot, docqa, system_prompt, samples)},
    **{make.__name__: make for make in (chat, choices, tree_search)},
}
"""By name: called with a seed, sizes as keywords and vocab_size."""
