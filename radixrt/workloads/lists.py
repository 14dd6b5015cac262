"""Sixteen lists of prompts, determined by their seed.

Their tokens are random: the cost of a run depends on lengths and sharing, not on meaning. Sizes that vary are
ranges (minimum, maximum), both included.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from radixrt.cache.radix_tree import Tokens

FIRST_ID = 10  # lower ids are special tokens of many models
VOCAB_SIZE = 10_000

Range = tuple[int, int]


@dataclass(frozen=True, eq=False)
class WorkloadPrompt:
    """A prompt with the length of its answer, or with a continuation to score.

    Attributes:
        prompt_ids: `[n >= 1]` int32.
        max_new_tokens: tokens to generate.
        continuation_ids: `[m >= 1]` int32: score these after the prompt, instead of generating an answer.
        text: whose ids the prompt is, where it is to be given as text (`texts.as_texts`).
    """

    prompt_ids: Tokens
    max_new_tokens: int
    continuation_ids: Tokens | None = None
    text: str | None = None

    @property
    def input_ids(self) -> Tokens:
        """The tokens that the model reads: the prompt, then the continuation. `[n + m]` int32."""
        if self.continuation_ids is None:
            return self.prompt_ids
        return np.concatenate([self.prompt_ids, self.continuation_ids])

    @property
    def num_computed(self) -> int:
        """Tokens at its end that no cache can serve, because their logits are needed."""
        return 1 if self.continuation_ids is None else len(self.continuation_ids) + 1


class TokenSource:
    """Random tokens, with ids below `vocab_size`, and lengths from a seed."""

    def __init__(self, seed: int, vocab_size: int = VOCAB_SIZE) -> None:
        if vocab_size <= FIRST_ID:
            raise ValueError(f"vocab_size is {vocab_size}; ids are drawn from {FIRST_ID} on")
        self.random = random.Random(seed)
        self.vocab_size = vocab_size

    def length(self, sizes: Range) -> int:
        return self.random.randint(*sizes)

    def tokens(self, count: int) -> Tokens:
        """`[count]` int32."""
        return np.array([self.random.randrange(FIRST_ID, self.vocab_size) for _ in range(count)], dtype=np.int32)

    def some_tokens(self, sizes: Range) -> Tokens:
        return self.tokens(self.length(sizes))

    def tailed_length(self, sizes: Range, mean_log: float, deviation: float) -> int:
        """Of a long tail: the minimum and a log-normal number, whose logarithm has this mean and this standard
        deviation, but no more than the maximum.
        """
        minimum, maximum = sizes
        return int(min(maximum, self.random.lognormvariate(mean_log, deviation) + minimum))


def unshared(
    seed: int = 0,
    *,
    requests: int = 256,
    prompt_len: Range = (100, 1024),
    new_tokens: Range = (100, 1024),
    vocab_size: int = VOCAB_SIZE,
) -> list[WorkloadPrompt]:
    """Prompts without common tokens, to measure the cost of the cache where it cannot help."""
    source = TokenSource(seed, vocab_size)
    prompts = [source.some_tokens(prompt_len) for _ in range(requests)]
    return [WorkloadPrompt(prompt, source.length(new_tokens)) for prompt in prompts]


def fewshot(
    seed: int = 1,
    *,
    subjects: int = 57,
    questions: int = 20,
    head_len: int = 40,
    examples_len: Range = (400, 1400),
    question_len: Range = (40, 120),
    new_tokens: int = 8,
    vocab_size: int = VOCAB_SIZE,
) -> list[WorkloadPrompt]:
    """A few-shot evaluation: all prompts share a head, prompts of one subject its examples. Shuffled."""
    source = TokenSource(seed, vocab_size)
    head = source.tokens(head_len)
    prompts = []
    for _ in range(subjects):
        shared = np.concatenate([head, source.some_tokens(examples_len)])
        prompts += [_continued(shared, source.some_tokens(question_len), new_tokens) for _ in range(questions)]
    source.random.shuffle(prompts)
    return prompts


def docqa(
    seed: int = 2,
    *,
    documents: int = 4,
    document_len: int = 8192,
    questions: int = 64,
    question_len: Range = (20, 60),
    new_tokens: int = 128,
    vocab_size: int = VOCAB_SIZE,
) -> list[WorkloadPrompt]:
    """Many questions about each of a few long documents. Shuffled."""
    source = TokenSource(seed, vocab_size)
    prompts = []
    for _ in range(documents):
        document = source.tokens(document_len)
        prompts += [_continued(document, source.some_tokens(question_len), new_tokens) for _ in range(questions)]
    source.random.shuffle(prompts)
    return prompts


def system_prompt(
    seed: int = 3,
    *,
    requests: int = 512,
    system_len: int = 2048,
    user_len: Range = (32, 256),
    new_tokens: Range = (64, 256),
    vocab_size: int = VOCAB_SIZE,
) -> list[WorkloadPrompt]:
    """Many users after one system prompt."""
    source = TokenSource(seed, vocab_size)
    system = source.tokens(system_len)
    return [_continued(system, source.some_tokens(user_len), source.length(new_tokens)) for _ in range(requests)]


def samples(
    seed: int = 4,
    *,
    prompts: int = 16,
    prompt_len: int = 1024,
    samples: int = 32,
    new_tokens: int = 512,
    vocab_size: int = VOCAB_SIZE,
) -> list[WorkloadPrompt]:
    """Several answers to each of a few prompts."""
    source = TokenSource(seed, vocab_size)
    drawn = [source.tokens(prompt_len) for _ in range(prompts)]
    return [WorkloadPrompt(prompt, new_tokens) for prompt in drawn for _ in range(samples)]


def judging(
    seed: int = 5,
    *,
    questions: int = 200,
    rubric_len: int = 1536,
    question_len: Range = (80, 400),
    answers: int = 4,
    answer_len: Range = (50, 300),
    votes: int = 3,
    new_tokens: Range = (48, 96),
    vocab_size: int = VOCAB_SIZE,
) -> list[WorkloadPrompt]:
    """Votes on several answers to each question, under one rubric: a tree of four levels. Shuffled."""
    source = TokenSource(seed, vocab_size)
    rubric = source.tokens(rubric_len)
    prompts = []
    for _ in range(questions):
        question = np.concatenate([rubric, source.some_tokens(question_len)])
        for _ in range(answers):
            judged = np.concatenate([question, source.some_tokens(answer_len)])
            prompts += [WorkloadPrompt(judged, source.length(new_tokens)) for _ in range(votes)]
    source.random.shuffle(prompts)
    return prompts


def documents(
    seed: int = 6,
    *,
    documents: int = 12,
    document_len: Range = (2048, 16_384),
    questions: int = 40,
    question_len: Range = (10, 200),
    new_tokens: Range = (8, 1500),
    mean_tail: int = 120,
    vocab_size: int = VOCAB_SIZE,
) -> list[WorkloadPrompt]:
    """Questions about documents of very different lengths, with long-tailed answers. Shuffled.

    The logarithm of a document's length is uniform. An answer has the minimum of `new_tokens` and an exponential
    number of further tokens, `mean_tail` on average.
    """
    source = TokenSource(seed, vocab_size)
    shortest, longest = document_len
    doublings = math.log2(longest / shortest)
    minimum, maximum = new_tokens
    prompts = []
    for _ in range(documents):
        document = source.tokens(int(shortest * 2 ** source.random.uniform(0, doublings)))
        for _ in range(questions):
            question = source.some_tokens(question_len)
            answer_len = int(min(maximum, source.random.expovariate(1 / mean_tail) + minimum))
            prompts.append(_continued(document, question, answer_len))
    source.random.shuffle(prompts)
    return prompts


def rollouts(
    seed: int = 7,
    *,
    prompts: int = 32,
    prompt_len: Range = (80, 500),
    samples: int = 16,
    max_new_tokens: int = 3000,
    mean_log: float = 6,
    deviation: float = 0.8,
    vocab_size: int = VOCAB_SIZE,
) -> list[WorkloadPrompt]:
    """Several answers to each of a few short prompts, with long-tailed lengths (`TokenSource.tailed_length`)."""
    source = TokenSource(seed, vocab_size)

    def answer_len() -> int:
        return max(1, source.tailed_length((0, max_new_tokens), mean_log, deviation))

    drawn = []
    for _ in range(prompts):
        prompt = source.some_tokens(prompt_len)
        drawn += [WorkloadPrompt(prompt, answer_len()) for _ in range(samples)]
    return drawn


def classification(
    seed: int = 8,
    *,
    requests: int = 6000,
    instruction_len: int = 700,
    text_len: Range = (20, 150),
    new_tokens: int = 3,
    vocab_size: int = VOCAB_SIZE,
) -> list[WorkloadPrompt]:
    """Many short texts after one instruction, with answers of a few tokens."""
    source = TokenSource(seed, vocab_size)
    instruction = source.tokens(instruction_len)
    return [_continued(instruction, source.some_tokens(text_len), new_tokens) for _ in range(requests)]


def alone(
    seed: int = 9,
    *,
    requests: int = 8,
    prompt_len: int = 600,
    new_tokens: int = 700,
    vocab_size: int = VOCAB_SIZE,
) -> list[WorkloadPrompt]:
    """A few requests with long answers: a pass has few rows."""
    source = TokenSource(seed, vocab_size)
    return [WorkloadPrompt(source.tokens(prompt_len), new_tokens) for _ in range(requests)]


def agents(
    seed: int = 10,
    *,
    runs: int = 48,
    turns: int = 12,
    system_len: int = 1800,
    task_len: Range = (100, 600),
    call_len: Range = (20, 90),
    result_len: Range = (60, 1500),
    mean_log: float = 5.3,
    vocab_size: int = VOCAB_SIZE,
) -> list[WorkloadPrompt]:
    """Recorded runs of agents under one system prompt, a request a turn: what came before, with other calls than
    are generated now, and long-tailed results of tools (`TokenSource.tailed_length`). Shuffled.
    """
    source = TokenSource(seed, vocab_size)
    system = source.tokens(system_len)
    prompts = []
    for _ in range(runs):
        said = np.concatenate([system, source.some_tokens(task_len)])
        for _ in range(turns):
            prompts.append(WorkloadPrompt(said, source.length(call_len)))
            call = source.some_tokens(call_len)
            said = np.concatenate([said, call, source.tokens(source.tailed_length(result_len, mean_log, 0.9))])
    source.random.shuffle(prompts)
    return prompts


def repository(
    seed: int = 11,
    *,
    questions: int = 300,
    repository_len: int = 15_000,
    question_len: Range = (40, 400),
    new_tokens: Range = (200, 600),
    vocab_size: int = VOCAB_SIZE,
) -> list[WorkloadPrompt]:
    """Many questions about one repository, with long answers."""
    return system_prompt(
        seed,
        requests=questions,
        system_len=repository_len,
        user_len=question_len,
        new_tokens=new_tokens,
        vocab_size=vocab_size,
    )


def extraction(
    seed: int = 12,
    *,
    requests: int = 1500,
    instruction_len: int = 1200,
    document_len: Range = (200, 3000),
    mean_log: float = 6.4,
    new_tokens: int = 60,
    vocab_size: int = VOCAB_SIZE,
) -> list[WorkloadPrompt]:
    """Documents of long-tailed lengths (`TokenSource.tailed_length`) after one instruction."""
    source = TokenSource(seed, vocab_size)
    instruction = source.tokens(instruction_len)

    def document() -> Tokens:
        return source.tokens(source.tailed_length(document_len, mean_log, 0.7))

    return [_continued(instruction, document(), new_tokens) for _ in range(requests)]


def reasoning(
    seed: int = 13,
    *,
    prompts: int = 16,
    prompt_len: Range = (120, 400),
    samples: int = 8,
    max_new_tokens: int = 6000,
    mean_log: float = 7.2,
    vocab_size: int = VOCAB_SIZE,
) -> list[WorkloadPrompt]:
    """Several very long answers to each of a few short prompts: a long tail of few rows."""
    return rollouts(
        seed,
        prompts=prompts,
        prompt_len=prompt_len,
        samples=samples,
        max_new_tokens=max_new_tokens,
        mean_log=mean_log,
        deviation=0.7,
        vocab_size=vocab_size,
    )


def thoughts(
    seed: int = 14,
    *,
    roots: int = 24,
    depth: int = 4,
    branches: int = 3,
    kept: int = 9,
    instruction_len: int = 900,
    root_len: Range = (80, 250),
    thought_len: Range = (60, 160),
    judges: int = 2,
    question_len: int = 30,
    judgement_len: int = 6,
    vocab_size: int = VOCAB_SIZE,
) -> list[WorkloadPrompt]:
    """Recorded trees of thoughts under one instruction. Each thought is a prompt, which is continued, and what
    several judges are asked about. A level has several thoughts after each that was kept of the one before.
    Shuffled.
    """
    source = TokenSource(seed, vocab_size)
    instruction = source.tokens(instruction_len)
    prompts = []
    for _ in range(roots):
        level = [np.concatenate([instruction, source.some_tokens(root_len)])]
        for _ in range(depth):
            level = [
                np.concatenate([text, source.some_tokens(thought_len)]) for text in level for _ in range(branches)
            ]
            for text in level:
                prompts.append(WorkloadPrompt(text, source.length(thought_len)))
                prompts += [_continued(text, source.tokens(question_len), judgement_len) for _ in range(judges)]
            level = source.random.sample(level, min(kept, len(level)))
    source.random.shuffle(prompts)
    return prompts


def evaluation(
    seed: int = 15,
    *,
    tasks: int = 6,
    examples_len: Range = (300, 2200),
    questions: int = 250,
    question_len: Range = (30, 180),
    choices: int = 4,
    choice_len: Range = (1, 12),
    new_tokens: int = 1,
    vocab_size: int = VOCAB_SIZE,
) -> list[WorkloadPrompt]:
    """Multiple choice as a harness asks it: examples before each task's questions, a prompt a choice. Shuffled."""
    source = TokenSource(seed, vocab_size)
    prompts = []
    for _ in range(tasks):
        examples = source.some_tokens(examples_len)
        for _ in range(questions):
            question = np.concatenate([examples, source.some_tokens(question_len)])
            prompts += [_continued(question, source.some_tokens(choice_len), new_tokens) for _ in range(choices)]
    source.random.shuffle(prompts)
    return prompts


def _continued(shared: Tokens, own: Tokens, new_tokens: int) -> WorkloadPrompt:
    return WorkloadPrompt(np.concatenate([shared, own]), new_tokens)


LISTS: dict[str, Callable[..., list[WorkloadPrompt]]] = {
    make.__name__: make
    for make in (
        *(unshared, fewshot, docqa, system_prompt, samples, judging, documents, rollouts, classification, alone),
        *(agents, repository, extraction, reasoning, thoughts, evaluation),
    )
}
"""By name, in the order of their own seeds, which are 0 to 15."""
