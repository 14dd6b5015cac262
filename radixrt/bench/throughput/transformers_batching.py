"""transformers' continuous batching on the same lists. Its model has the same shape, dtype and kind of weights."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from radixrt.bench.report import reason_of
from radixrt.bench.run import TEMPERATURE
from radixrt.bench.throughput.figures import BaselineRun
from radixrt.errors import RadixrtError
from radixrt.workloads.lists import WorkloadPrompt

BLOCK_SIZE = 256  # tokens of a KV block, its default
WARM_UP_REQUESTS, WARM_UP_LEN, WARM_UP_TOKENS = 4, 16, 4
STOP_SECONDS = 60  # for the running pass to end


class TransformersBatching:
    """A model of transformers, and a manager of its continuous batching for each list.

    Args:
        model: folder or id. With load_format "dummy" its config alone is read and weights are random.
        device: where it runs; in float32 on a CPU, elsewhere in the config's dtype.
        max_total_tokens, max_batch_tokens: of the KV cache and of a pass; None: transformers' choice.
        seed: of random weights and draws.

    Attributes:
        name, settings: of transformers, for the report.

    Raises:
        Exception: of any kind, whatever transformers raises; the caller reports it.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        load_format: str,
        device: torch.device,
        max_total_tokens: int | None,
        max_batch_tokens: int | None,
        seed: int,
    ) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, __version__

        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
        config = AutoConfig.from_pretrained(model)
        dtype = torch.float32 if device.type == "cpu" else config.dtype
        own = {"dtype": dtype, "attn_implementation": _attention(device)}
        torch.manual_seed(seed)
        if load_format == "dummy":
            with device:
                self._model = AutoModelForCausalLM.from_config(config, **own)  # type: ignore[no-untyped-call]
        else:
            self._model = AutoModelForCausalLM.from_pretrained(model, **own).to(device)  # type: ignore[arg-type]
        self._config = ContinuousBatchingConfig(
            block_size=BLOCK_SIZE,
            num_blocks=None if max_total_tokens is None else max_total_tokens // BLOCK_SIZE,
            max_batch_tokens=max_batch_tokens,
            seed=seed,
        )
        self.name = f"transformers {__version__}"
        self.settings: dict[str, Any] = {
            "attn_implementation": own["attn_implementation"],
            "block_size": BLOCK_SIZE,
            "max_batch_tokens": max_batch_tokens,
        }
        self._stuck: str | None = None  # the reason why nothing can be timed any more

    def run(
        self, prompts: Sequence[WorkloadPrompt], warm_up: Sequence[WorkloadPrompt], limit: float
    ) -> BaselineRun:
        """Answer a list after a few short prompts of `warm_up`, each in at most `limit` seconds.

        An exception becomes the reason.
        """
        if self._stuck is not None:
            return BaselineRun(reason=self._stuck)
        manager = None
        try:
            manager = self.start_manager(prompts)
            short = [
                WorkloadPrompt(prompt.prompt_ids[:WARM_UP_LEN], WARM_UP_TOKENS)
                for prompt in warm_up[:WARM_UP_REQUESTS]
            ]
            if self.answer(manager, short, limit):
                began = time.perf_counter()
                if self.answer(manager, prompts, limit):
                    return BaselineRun(seconds=time.perf_counter() - began)
            return BaselineRun(stopped_after=limit, reason=f"stopped after {limit:g} s")
        except Exception as error:  # of any kind: our own figures are still shown
            return BaselineRun(reason=reason_of(error))
        finally:
            if manager is not None:
                self._stop(manager)

    def _stop(self, manager: Any) -> None:
        try:
            manager.stop(block=True, timeout=STOP_SECONDS, hard_stop=True)
            if manager.is_running():  # while it runs, nothing else can be timed
                self._stuck = f"the list before it still ran {STOP_SECONDS} s after it was told to stop"
            else:
                manager.destroy()
        except Exception as error:  # the device may be lost
            self._stuck = f"the list before it could not be stopped: {reason_of(error)}"

    def close(self) -> None:
        """Release the model and its memory."""
        del self._model
        gc.collect()
        torch.cuda.empty_cache()

    def start_manager(self, prompts: Sequence[WorkloadPrompt]) -> Any:
        """Start a manager of transformers with room for these prompts."""
        from transformers import GenerationConfig
        from transformers.generation.continuous_batching.utils import WorkloadHints

        generation = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=True, temperature=TEMPERATURE, top_k=0, top_p=1.0, eos_token_id=-1, max_new_tokens=1
        )
        hints = WorkloadHints(
            max_prompt_length=max(len(prompt.prompt_ids) for prompt in prompts),
            max_generated_length=max(prompt.max_new_tokens for prompt in prompts),
            num_requests=len(prompts),
        )
        gc.collect()  # the remains of a manager that could not be made
        manager = self._model.init_continuous_batching(
            generation_config=generation, continuous_batching_config=self._config, workload_hints=hints
        )
        manager.warmup()
        manager.start()
        return manager

    def answer(self, manager: Any, prompts: Sequence[WorkloadPrompt], limit: float) -> bool:
        """Whether all were answered within `limit` seconds."""
        began = time.perf_counter()
        # In the order in which its own `generate_batch` asks, for the sake of its prefix cache.
        for prompt in sorted(
            ((prompt.prompt_ids.tolist(), prompt.max_new_tokens) for prompt in prompts), reverse=True
        ):
            manager.add_request(prompt[0], max_new_tokens=prompt[1])
        wanted = sum(prompt.max_new_tokens for prompt in prompts)
        answered = tokens = 0
        while answered < len(prompts):
            left = limit - (time.perf_counter() - began)
            if left <= 0:
                return False
            result = manager.get_result(timeout=min(left, 1.0))
            if result is None:
                if not manager.is_running():
                    raise RadixrtError(f"its thread ended after {answered} of {len(prompts)} answers")
            elif result.error is not None:
                raise RadixrtError(result.error)
            elif result.is_finished():
                answered += 1
                tokens += len(result.generated_tokens)
        if tokens != wanted:
            raise RadixrtError(f"it made {tokens} of {wanted} tokens: nothing can be compared")
        return True


def _attention(device: torch.device) -> str:
    """The fastest installed paged attention; others would be fetched from the hub."""
    from transformers.utils.import_utils import is_flash_attn_2_available, is_flash_attn_3_available

    if device.type == "cuda":
        for version, is_available in ((3, is_flash_attn_3_available), (2, is_flash_attn_2_available)):
            if is_available():
                return f"paged|flash_attention_{version}"
    return "paged|sdpa"
