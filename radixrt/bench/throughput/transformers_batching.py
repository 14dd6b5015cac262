"""transformers' continuous batching as an engine of `engine_worker`."""

from __future__ import annotations

import gc
import logging
from typing import Any

import torch

BLOCK_SIZE = 256  # tokens of a KV block, its default
WARM_UP_REQUESTS, WARM_UP_LEN, WARM_UP_TOKENS = 4, 16, 4
STOP_SECONDS = 60  # for the running pass to end


class TransformersBatching:
    """A model of transformers, and a manager of its continuous batching for each list.

    Args:
        model: folder or id. With load_format "dummy" its config alone is read and weights are random.
        seed: of random weights and draws.
        device: "cuda", or "cpu", in float32; elsewhere in the config's dtype.
        max_total_tokens, max_batch_tokens, max_requests: of the KV cache and of a pass, and requests of a pass;
            None: transformers' choice.
        from_text: prompts are texts.
    """

    def __init__(
        self,
        model: str,
        *,
        load_format: str,
        seed: int,
        device: str,
        max_total_tokens: int | None,
        max_batch_tokens: int | None,
        max_requests: int | None,
        from_text: bool,
    ) -> None:
        from transformers import (
            AutoConfig,
            AutoModelForCausalLM,
            AutoTokenizer,
            ContinuousBatchingConfig,
            __version__,
        )

        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
        config = AutoConfig.from_pretrained(model)
        dtype = torch.float32 if device == "cpu" else config.dtype
        own = {"dtype": dtype, "attn_implementation": _attention(device)}
        torch.manual_seed(seed)
        if load_format == "dummy":
            with torch.device(device):
                self._model = AutoModelForCausalLM.from_config(config, **own)  # type: ignore[no-untyped-call]
        else:
            self._model = AutoModelForCausalLM.from_pretrained(model, **own).to(device)  # type: ignore[arg-type]
        # Some of its versions have no such limit.
        limits: dict[str, Any] = {} if max_requests is None else {"max_requests_per_batch": max_requests}
        self._config = ContinuousBatchingConfig(
            block_size=BLOCK_SIZE,
            num_blocks=None if max_total_tokens is None else max_total_tokens // BLOCK_SIZE,
            max_batch_tokens=max_batch_tokens,
            seed=seed,
            **limits,
        )
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model) if from_text else None
        self._manager: Any = None
        self.name = f"transformers {__version__}"
        self.settings: dict[str, Any] = {
            "attn_implementation": own["attn_implementation"],
            "block_size": BLOCK_SIZE,
            "max_batch_tokens": max_batch_tokens,
            **limits,
        }

    def warm_up(self, warm_up: list[tuple[Any, int]], prompts: list[tuple[Any, int]], temperature: float) -> None:
        """Start a manager with room for `prompts`, which answers a few short ones of `warm_up`."""
        from transformers import GenerationConfig
        from transformers.generation.continuous_batching.utils import WorkloadHints

        self._stop()
        generation = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=True, temperature=temperature, top_k=0, top_p=1.0, eos_token_id=-1, max_new_tokens=1
        )
        hints = WorkloadHints(
            max_prompt_length=max(len(ids) for ids, _ in self._encoded(prompts)),
            max_generated_length=max(tokens for _, tokens in prompts),
            num_requests=len(prompts),
        )
        self._manager = self._model.init_continuous_batching(
            generation_config=generation, continuous_batching_config=self._config, workload_hints=hints
        )
        self._manager.warmup()
        self._manager.start()
        short = self._encoded(warm_up[:WARM_UP_REQUESTS])
        self._answer([(ids[:WARM_UP_LEN], WARM_UP_TOKENS) for ids, _ in short])

    def answer(self, prompts: list[tuple[Any, int]], temperature: float) -> int:
        """Answer a list at the temperature of the warm-up. Returns the number of generated tokens."""
        return self._answer(self._encoded(prompts))

    def _encoded(self, prompts: list[tuple[Any, int]]) -> list[tuple[list[int], int]]:
        """Prompts as ids, which is all that it takes."""
        if self._tokenizer is None:
            return prompts
        ids = self._tokenizer([text for text, _ in prompts])["input_ids"]
        return [(one, tokens) for one, (_, tokens) in zip(ids, prompts, strict=True)]

    def _answer(self, prompts: list[tuple[list[int], int]]) -> int:
        # In the order in which its own `generate_batch` asks, for the sake of its prefix cache.
        for ids, tokens in sorted(prompts, reverse=True):
            self._manager.add_request(ids, max_new_tokens=tokens)
        answered = made = 0
        while answered < len(prompts):
            result = self._manager.get_result(timeout=1.0)
            if result is None:
                if not self._manager.is_running():
                    raise RuntimeError(f"its thread ended after {answered} of {len(prompts)} answers")
            elif result.error is not None:
                raise RuntimeError(result.error)
            elif result.is_finished():
                answered += 1
                made += len(result.generated_tokens)
        return made

    def _stop(self) -> None:
        """End the manager of the list before."""
        manager, self._manager = self._manager, None
        if manager is not None:
            manager.stop(block=True, timeout=STOP_SECONDS, hard_stop=True)
            if manager.is_running():  # while it runs, nothing else can be timed
                raise RuntimeError(f"the list before it still ran {STOP_SECONDS} s after it was told to stop")
            manager.destroy()
            gc.collect()


def _attention(device: str) -> str:
    """The fastest installed paged attention; others would be fetched from the hub."""
    from transformers.utils.import_utils import is_flash_attn_2_available, is_flash_attn_3_available

    if device == "cuda":
        for version, is_available in ((3, is_flash_attn_3_available), (2, is_flash_attn_2_available)):
            if is_available():
                return f"paged|flash_attention_{version}"
    return "paged|sdpa"
