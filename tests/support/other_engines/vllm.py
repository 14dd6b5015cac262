"""The surface of vLLM 0.26 that the throughput benchmark calls. FAKE_ENGINE says what goes wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

__version__ = "0.26.0"

ACCEPTED = {
    "load_format",
    "skip_tokenizer_init",
    "enable_prefix_caching",
    "max_num_seqs",
    "max_num_batched_tokens",
    "gpu_memory_utilization",
    "enforce_eager",
    "seed",
}


@dataclass(kw_only=True)
class SamplingParams:
    temperature: float = 1.0
    max_tokens: int | None = 16
    ignore_eos: bool = False
    detokenize: bool = True


class LLM:
    def __init__(self, model: str, **options: Any) -> None:
        print("INFO the engine logs to standard output", flush=True)
        assert os.path.isfile(os.path.join(model, "config.json"))
        assert set(options) <= ACCEPTED
        self.calls: list[str] = []
        self.takes_text = not options["skip_tokenizer_init"]
        assert self.takes_text == os.path.isfile(os.path.join(model, "tokenizer.json"))
        if os.environ.get("FAKE_ENGINE") == "no start":
            raise RuntimeError("CUDA out of memory")
        if file := os.environ.get("FAKE_CHILD"):  # a worker of its own
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            with open(file, "w") as to:
                to.write(str(child.pid))

    def generate(
        self, prompts: list[dict[str, Any]], sampling_params: list[SamplingParams], *, use_tqdm: bool = True
    ) -> list[Any]:
        self.calls.append("generate")
        is_timed = self.calls[-2:] == ["reset", "generate"]
        wrong = os.environ.get("FAKE_ENGINE")
        if is_timed and wrong == "hangs":
            time.sleep(600)
        if is_timed and wrong == "fails":
            raise ValueError("the engine core\ndied")
        if is_timed and wrong == "crashes":
            print("Segmentation fault", file=sys.stderr, flush=True)
            os._exit(1)
        assert not use_tqdm
        assert all(list(prompt) == ["prompt" if self.takes_text else "prompt_token_ids"] for prompt in prompts)
        assert all(isinstance(given[0], str if self.takes_text else int) for (given,) in map(dict.values, prompts))
        return [
            SimpleNamespace(
                outputs=[SimpleNamespace(token_ids=[1] * ((params.max_tokens or 0) - (wrong == "short")))]
            )
            for params in sampling_params
        ]

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset")
        return True
