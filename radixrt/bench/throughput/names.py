"""The names of what the throughput benchmark runs. Nothing heavy is imported."""

from __future__ import annotations

from typing import Any

LISTS = ("unshared", "fewshot", "docqa", "system_prompt", "samples")
CONFIGS = {"cpu": ("tiny",), "full": ("qwen3-0.6b", "llama-3.1-8b")}
"""By scale: the shapes that are measured where none is named."""
ABLATIONS: dict[str, dict[str, Any]] = {
    "no-prefix-cache": {"enable_prefix_cache": False},
    "no-overlap": {"overlap": False},
    "no-graphs": {"cuda_graphs": False},
    "flat": {"attention": "flat"},
}
"""By name: what the Runtime is made with."""
BASELINES = ("transformers",)
