"""Programs: rounds of prompts that may depend on the answers of earlier rounds.

A program is a generator that yields all prompts of a round and is sent the answers, in the same order. A list of
prompts is a program of one round.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from radixrt.cache.radix_tree import Tokens
from radixrt.workloads import lists
from radixrt.workloads.lists import VOCAB_SIZE, Range, TokenSource, WorkloadPrompt
from radixrt.workloads.statistics import TokenStatistics, token_statistics

Answer = Sequence[int]
Program = Generator[Sequence[WorkloadPrompt], Sequence[Answer], None]


@dataclass(frozen=True)
class Round:
    """The prompts of a round, and the answer to each (empty for a score)."""

    prompts: Sequence[WorkloadPrompt]
    answers: Sequence[Answer]

    @property
    def inputs(self) -> list[Tokens]:
        """The tokens that the model read for each prompt, int32."""
        return [prompt.input_ids for prompt in self.prompts]

    @property
    def computed(self) -> list[Tokens]:
        """The tokens whose KV the round computed, int32: the last token of an answer was sampled, but not read."""
        return [
            np.concatenate([prompt.input_ids, np.asarray(answer[:-1], dtype=np.int32)])
            for prompt, answer in zip(self.prompts, self.answers, strict=True)
        ]


def play(program: Program, answer: Callable[[Sequence[WorkloadPrompt]], Sequence[Answer]]) -> Iterator[Round]:
    """Run a program: `answer` is called with each round's prompts and returns an answer to each."""
    try:
        prompts = next(program)
        while True:
            answers = answer(prompts)
            yield Round(prompts, answers)
            prompts = program.send(answers)
    except StopIteration:
        return


def with_history(rounds: Iterable[Round]) -> Iterator[tuple[Round, list[Tokens]]]:
    """Each round, and the token sequences that earlier rounds have computed."""
    history: list[Tokens] = []
    for played in rounds:
        yield played, history
        history = history + played.computed


def program_statistics(rounds: Iterable[Round]) -> TokenStatistics:
    """Token counts of a played program; its best_hit_rate is the best possible one.

    They follow from the tokens alone. A prompt can hit any prefix computed before it, of prompts with their
    answers, without the last token of each answer, which was sampled and never read. Prompts of one round can hit
    one another, in the best order; the answers of a round come after all its prompts. The cache is empty at first
    and unlimited.
    """
    return sum(
        (
            token_statistics(played.inputs, history, [prompt.num_computed for prompt in played.prompts])
            for played, history in with_history(rounds)
        ),
        TokenStatistics(),
    )


def one_round(prompts: Sequence[WorkloadPrompt]) -> Program:
    """A list of prompts as a program."""
    yield prompts


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
    """Conversations after one system prompt: a turn's prompt is the whole conversation so far."""
    source = TokenSource(seed, vocab_size)
    system = source.tokens(system_len)
    histories = [system] * conversations
    for _ in range(turns):
        prompts = [
            WorkloadPrompt(np.concatenate([history, source.some_tokens(user_len)]), source.length(new_tokens))
            for history in histories
        ]
        answers = yield prompts
        histories = [_extended(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]


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
    """Multiple choice: scores each choice after its question, with the same examples before all questions."""
    source = TokenSource(seed, vocab_size)
    examples = source.tokens(examples_len)
    prompts = []
    for _ in range(questions):
        question = np.concatenate([examples, source.some_tokens(question_len)])
        prompts += [WorkloadPrompt(question, 1, source.some_tokens(choice_len)) for _ in range(choices)]
    yield prompts


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
    """Branching programs: each round continues every kept text in several ways, and keeps a few of these.

    The choice is random, in place of a judge.
    """
    source = TokenSource(seed, vocab_size)
    trees = [[source.tokens(root_len)] for _ in range(roots)]
    for _ in range(rounds):
        prompts = [WorkloadPrompt(text, new_tokens) for texts in trees for text in texts for _ in range(branches)]
        answers = yield prompts
        children = iter([_extended(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)])
        trees = [
            source.random.sample(grown, min(kept, len(grown)))
            for grown in [[next(children) for _ in range(len(texts) * branches)] for texts in trees]
        ]


def _extended(prompt: WorkloadPrompt, answer: Answer) -> Tokens:
    return np.concatenate([prompt.prompt_ids, np.asarray(answer, dtype=np.int32)])


def _listed(make: Callable[..., list[WorkloadPrompt]]) -> Callable[..., Program]:
    def program(seed: int, **sizes: object) -> Program:
        return one_round(make(seed, **sizes))

    return program


PROGRAMS: dict[str, Callable[..., Program]] = {
    **{name: _listed(make) for name, make in lists.LISTS.items()},
    **{make.__name__: make for make in (chat, choices, tree_search)},
}
"""By name: called with a seed, sizes as keywords and vocab_size."""
