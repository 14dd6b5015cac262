"""A program that runs lists of prompts through another engine, started by `engine_process`.

Its one argument is JSON: `engine`, one of ENGINES, and its keyword arguments. It prints lines of JSON: one when
the engine is up, with its name, version and settings; then, for each line on standard input (`temperature`,
`warm_up` and `prompts`, each of [token ids or text, new tokens]), one when it is warm and one with the list's
seconds and tokens, or the error.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

from radixrt.bench.throughput.transformers_batching import TransformersBatching

MAX_REQUESTS, PASS_TOKENS = 512, 16_384  # of passes; radixrt runs up to 2,048 requests at once by default

TokenRequests = list[tuple[Any, int]]
"""Prompts, all of them token ids or all texts, with the number of tokens to generate for each."""


class Engine(Protocol):
    """Another engine with the settings that suit whole lists."""

    name: str
    settings: dict[str, Any]

    def warm_up(self, warm_up: TokenRequests, prompts: TokenRequests, temperature: float) -> None:
        """Get ready to answer `prompts`, by other prompts of their kind; nothing is cached then."""

    def answer(self, prompts: TokenRequests, temperature: float) -> int:
        """Answer a list in one call. Returns the number of generated tokens."""


class VLLM:
    """vLLM's `LLM` with its prefix cache; compiled, with captured graphs, which are its defaults."""

    def __init__(
        self, model: str, *, load_format: str, seed: int, max_requests: int | None, from_text: bool
    ) -> None:
        vllm = importlib.import_module("vllm")
        self._given_as = "prompt" if from_text else "prompt_token_ids"
        self.settings = {
            "load_format": load_format,
            # Without texts a folder without weights has no tokenizer.
            "skip_tokenizer_init": load_format == "dummy" and not from_text,
            "enable_prefix_caching": True,
            "max_num_seqs": max_requests or MAX_REQUESTS,
            "max_num_batched_tokens": PASS_TOKENS,
            "gpu_memory_utilization": 0.9,
            "enforce_eager": False,
            "seed": seed,
        }
        self._llm = vllm.LLM(model=model, **self.settings)
        self._params = vllm.SamplingParams
        self.name = f"vLLM {vllm.__version__}"

    def warm_up(self, warm_up: TokenRequests, prompts: TokenRequests, temperature: float) -> None:
        self.answer(warm_up, temperature)
        if self._llm.reset_prefix_cache() is False:
            raise RuntimeError("vLLM's prefix cache could not be emptied")

    def answer(self, prompts: TokenRequests, temperature: float) -> int:
        detokenize = not self.settings["skip_tokenizer_init"]
        outputs = self._llm.generate(
            [{self._given_as: prompt} for prompt, _ in prompts],
            [
                self._params(temperature=temperature, max_tokens=tokens, ignore_eos=True, detokenize=detokenize)
                for _, tokens in prompts
            ],
            use_tqdm=False,
        )
        return sum(len(output.outputs[0].token_ids) for output in outputs)


class SGLang:
    """SGLang's `Engine` with its radix cache, a token a page, the longest prefix first, and captured graphs."""

    def __init__(
        self, model: str, *, load_format: str, seed: int, max_requests: int | None, from_text: bool
    ) -> None:
        sglang = importlib.import_module("sglang")
        at_once = max_requests or MAX_REQUESTS
        self._given_as = "prompt" if from_text else "input_ids"
        self.settings = {
            "load_format": load_format,
            "skip_tokenizer_init": load_format == "dummy" and not from_text,
            "disable_radix_cache": False,
            "schedule_policy": "lpm",
            "page_size": 1,
            "max_running_requests": at_once,
            "chunked_prefill_size": PASS_TOKENS,
            "cuda_graph_max_bs": at_once,
            "random_seed": seed,
        }
        self._engine = sglang.Engine(model_path=model, **self.settings)
        self.name = f"SGLang {sglang.__version__}"

    def warm_up(self, warm_up: TokenRequests, prompts: TokenRequests, temperature: float) -> None:
        self.answer(warm_up, temperature)
        self._engine.flush_cache()

    def answer(self, prompts: TokenRequests, temperature: float) -> int:
        outputs = self._engine.generate(
            **{self._given_as: [prompt for prompt, _ in prompts]},
            sampling_params=[
                {"temperature": temperature, "max_new_tokens": tokens, "ignore_eos": True} for _, tokens in prompts
            ],
        )
        return sum(output["meta_info"]["completion_tokens"] for output in outputs)


ENGINES: dict[str, Callable[..., Engine]] = {
    "vllm": VLLM,
    "sglang": SGLang,
    "transformers": TransformersBatching,
}


def main() -> None:
    # What the engine and its processes print goes to stderr: standard output has our lines alone.
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(**values: Any) -> None:
        print(json.dumps(values), file=lines, flush=True)

    options = json.loads(sys.argv[1])
    engine = ENGINES[options.pop("engine")](**options)
    tell(name=engine.name, settings=engine.settings)
    for line in sys.stdin:
        job = json.loads(line)
        try:
            engine.warm_up(job["warm_up"], job["prompts"], job["temperature"])
            tell(is_warm=True)
            began = time.perf_counter()
            tokens = engine.answer(job["prompts"], job["temperature"])
            tell(seconds=time.perf_counter() - began, tokens=tokens)
        except Exception as error:  # of any kind: the benchmark shows it in the list's place
            tell(error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
