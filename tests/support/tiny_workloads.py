"""Workloads of a few requests with a few tokens each, for tests of benchmarks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from radixrt.bench.catalogue import SCALES, Size
from radixrt.bench.run import Run

RUN = Run(
    seconds=2.0,
    requests=3,
    prompt_tokens=1000,
    cached_tokens=600,
    generated_tokens=200,
    recomputed_tokens=0,
    best_cached_tokens=700,
    bound_seconds=1.0,
)

SIZES: dict[str, dict[str, Size]] = {
    "unshared": {"requests": 4, "prompt_len": (4, 20), "new_tokens": (1, 5)},
    "fewshot": {"subjects": 2, "questions": 3, "head_len": 4, "examples_len": (20, 40), "question_len": (2, 5)},
    "docqa": {"documents": 2, "document_len": 50, "questions": 3, "question_len": (2, 5), "new_tokens": 3},
    "system_prompt": {"requests": 6, "system_len": 40, "user_len": (2, 9), "new_tokens": (1, 5)},
    "samples": {"prompts": 2, "prompt_len": 30, "samples": 4, "new_tokens": 4},
    "judging": {
        "questions": 2,
        "rubric_len": 30,
        "question_len": (2, 9),
        "answers": 2,
        "answer_len": (2, 9),
        "votes": 2,
        "new_tokens": (1, 5),
    },
    "documents": {
        "documents": 2,
        "document_len": (20, 60),
        "questions": 3,
        "question_len": (2, 9),
        "new_tokens": (1, 9),
        "mean_tail": 3,
    },
    "rollouts": {"prompts": 2, "prompt_len": (20, 40), "samples": 4, "max_new_tokens": 9, "mean_log": 1},
    "classification": {"requests": 8, "instruction_len": 30, "text_len": (2, 9)},
    "alone": {"requests": 2, "prompt_len": 10, "new_tokens": 9},
    "agents": {
        "runs": 2,
        "turns": 3,
        "system_len": 30,
        "task_len": (4, 9),
        "call_len": (1, 4),
        "result_len": (2, 20),
        "mean_log": 1,
    },
    "repository": {"questions": 4, "repository_len": 50, "question_len": (2, 9), "new_tokens": (1, 5)},
    "extraction": {"requests": 4, "instruction_len": 30, "document_len": (4, 30), "mean_log": 2, "new_tokens": 3},
    "reasoning": {"prompts": 2, "prompt_len": (20, 40), "samples": 3, "max_new_tokens": 12, "mean_log": 1},
    "thoughts": {
        "roots": 2,
        "depth": 2,
        "branches": 2,
        "kept": 2,
        "instruction_len": 30,
        "root_len": (2, 9),
        "thought_len": (2, 5),
        "question_len": 3,
        "judgement_len": 2,
    },
    "evaluation": {
        "tasks": 2,
        "examples_len": (20, 40),
        "questions": 3,
        "question_len": (2, 9),
        "choice_len": (1, 4),
    },
    "chat": {"conversations": 3, "turns": 3, "system_len": 30, "user_len": (2, 9), "new_tokens": (1, 5)},
    "choices": {"questions": 3, "choices": 3, "examples_len": 30, "question_len": (2, 9), "choice_len": (1, 4)},
    "tree_search": {"roots": 2, "root_len": 30, "rounds": 3, "branches": 2, "kept": 2, "new_tokens": 3},
}


def make_tiny(patch: pytest.MonkeyPatch) -> None:
    """Give the scale `cpu` these sizes; a pass computes less than a prefix still."""
    tiny = replace(SCALES["cpu"], sizes=SIZES, chunked_prefill_size=16, max_total_tokens=4096)
    patch.setitem(SCALES, "cpu", tiny)
