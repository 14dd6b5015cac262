"""The surface of SGLang 0.5 that the throughput benchmark calls."""

from __future__ import annotations

import os
from typing import Any

__version__ = "0.5.17"

ACCEPTED = {
    "load_format",
    "skip_tokenizer_init",
    "disable_radix_cache",
    "schedule_policy",
    "page_size",
    "max_running_requests",
    "chunked_prefill_size",
    "cuda_graph_max_bs",
    "random_seed",
}


class Engine:
    def __init__(self, *, model_path: str, **options: Any) -> None:
        assert os.path.isfile(os.path.join(model_path, "config.json"))
        assert set(options) <= ACCEPTED
        self.takes_text = not options["skip_tokenizer_init"]
        assert self.takes_text == os.path.isfile(os.path.join(model_path, "tokenizer.json"))
        assert options["cuda_graph_max_bs"] == options["max_running_requests"]

    def generate(
        self,
        prompt: list[str] | None = None,
        sampling_params: list[dict[str, Any]] | None = None,
        input_ids: list[list[int]] | None = None,
    ) -> list[dict[str, Any]]:
        given, other = (prompt, input_ids) if self.takes_text else (input_ids, prompt)
        assert sampling_params is not None
        assert given is not None
        assert other is None
        assert len(given) == len(sampling_params)
        assert all(isinstance(one[0], str if self.takes_text else int) for one in given)
        assert all(set(params) == {"temperature", "max_new_tokens", "ignore_eos"} for params in sampling_params)
        return [
            {"output_ids": [1], "meta_info": {"completion_tokens": params["max_new_tokens"]}}
            for params in sampling_params
        ]

    def flush_cache(self) -> None:
        pass
