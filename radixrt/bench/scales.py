"""How large the workloads of the prefix-reuse benchmark are at each scale. Nothing heavy is imported."""

from __future__ import annotations

from dataclasses import dataclass, field

Size = int | tuple[int, int]


@dataclass(frozen=True)
class Scale:
    """Sizes of the workloads, and what the Runtime is made with where the options do not say.

    Attributes:
        description: a line for people.
        shape: of the model, one of `shapes.SHAPES`.
        sizes: by workload, what differs from the definition in `radixrt.workloads`.
        chunked_prefill_size, max_total_tokens: None leaves the choice to the Runtime.
    """

    description: str
    shape: str
    sizes: dict[str, dict[str, Size]] = field(default_factory=dict)
    chunked_prefill_size: int | None = None
    max_total_tokens: int | None = None


WORKLOADS = ("unshared", "fewshot", "docqa", "system_prompt", "samples", "chat", "choices", "tree_search")

SCALES = {
    # Every shared prefix is longer than a pass may compute: requests that are admitted together must still share.
    "cpu": Scale(
        description="smaller sizes, a tiny model: at most 3 minutes on two CPU cores",
        shape="tiny",
        sizes={
            "unshared": {"requests": 48, "prompt_len": (20, 200), "new_tokens": (20, 64)},
            "fewshot": {
                "subjects": 8,
                "questions": 12,
                "head_len": 16,
                "examples_len": (200, 500),
                "question_len": (10, 30),
                "new_tokens": 8,
            },
            "docqa": {
                "documents": 3,
                "document_len": 1024,
                "questions": 12,
                "question_len": (10, 30),
                "new_tokens": 16,
            },
            "system_prompt": {"requests": 48, "system_len": 512, "user_len": (8, 64), "new_tokens": (16, 64)},
            "samples": {"prompts": 4, "prompt_len": 256, "samples": 12, "new_tokens": 48},
            "chat": {
                "conversations": 12,
                "turns": 4,
                "system_len": 256,
                "user_len": (16, 64),
                "new_tokens": (16, 64),
            },
            "choices": {
                "questions": 32,
                "choices": 4,
                "examples_len": 256,
                "question_len": (16, 64),
                "choice_len": (2, 8),
            },
            "tree_search": {
                "roots": 4,
                "root_len": 256,
                "rounds": 4,
                "branches": 4,
                "kept": 2,
                "new_tokens": 16,
            },
        },
        chunked_prefill_size=128,
        max_total_tokens=65_536,
    ),
    "full": Scale(description="the sizes of the definition, for a GPU", shape="qwen3-0.6b"),
}


def size_table(scale: str) -> list[tuple[str, str]]:
    """Each workload of a scale with its sizes in words."""

    def words(size: Size) -> str:
        return str(size) if isinstance(size, int) else f"{size[0]}-{size[1]}"

    return [
        (name, ", ".join(f"{size.replace('_', ' ')} {words(value)}" for size, value in sizes.items()))
        for name, sizes in SCALES[scale].sizes.items()
    ]
