"""How much of a GPU's memory passes need beside the weights and the KV pool: measured, with the largest one."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from memory_pool.req_to_token_pool import ReqToTokenPool, RowChanges
from memory_pool.token_to_kv_pool import TokenToKVPool
from radixrt.errors import ParameterError
from radixrt.execution.attention.planner import planner_of
from radixrt.execution.model_runner import ModelRunner
from radixrt.models.decoder import Decoder
from radixrt.sampling_params import SamplingParams
from radixrt.schedule.answer import Answer
from radixrt.schedule.passes import Pass
from radixrt.schedule.request import Request
from radixrt.schedule.request_log import RequestLog
from radixrt.schedule.sampling_table import SamplingTable, prepare_sampling

# Everything that a request can ask for and that takes memory a row of logits.
_WANTS_ALL = SamplingParams(
    max_new_tokens=2**16,
    top_k=50,
    top_p=0.9,
    min_p=0.1,
    repetition_penalty=1.1,
    logprobs=20,
    prompt_logprobs=20,
)


@dataclass(frozen=True)
class PassLimits:
    """The most that a pass holds.

    Attributes:
        max_running_requests: requests.
        chunked_prefill_size: prompt tokens.
    """

    max_running_requests: int
    chunked_prefill_size: int

    @property
    def max_samples(self) -> int:
        """Tokens that are drawn: one a request, and as many again for the first tokens of n answers."""
        return 2 * self.max_running_requests


def largest_pass(limits: PassLimits, context_length: int) -> Pass:
    """A pass at all limits at once, of tokens 0 whose KV goes to slot 0 and whose rows are 0, 1, ...

    Of its requests as many as it takes share the prompt tokens, whose log-probabilities are all wanted; the
    others decode.
    """
    count, longest = limits.max_running_requests, context_length - 1
    starts = np.arange(0, limits.chunked_prefill_size, longest)[:count]
    chunks = np.minimum(limits.chunked_prefill_size - starts, longest)
    new = np.ones(count, np.int32)
    new[: len(chunks)] = chunks
    num_scored = np.zeros(count, np.int32)
    num_scored[: len(chunks)] = chunks
    num_samples = np.ones(count, np.int32)
    num_samples[0] += limits.max_samples - count
    request = Request(0, np.zeros(1, np.int32), _WANTS_ALL, max_new_tokens=1, seed=0)
    answers = [Answer(request, arrival=0, log=RequestLog(submitted_at=0.0))] * count
    rows, nothing = np.arange(count, dtype=np.int32), np.zeros(0, np.int32)
    scored = np.arange(num_scored.sum(), dtype=np.int32)
    table = SamplingTable(count)
    for row, answer in enumerate(answers):
        table.admit(row, answer)
    return Pass(
        num_extends=int((new > 1).sum()),
        req_pool_indices=rows,
        prefix_lens=np.zeros(count, np.int32),
        seq_lens=new,
        input_ids=np.zeros(new.sum(), np.int32),
        out_cache_loc=np.zeros(new.sum(), np.int32),
        num_samples=num_samples,
        scored=scored,
        scored_targets=np.zeros_like(scored),
        num_scored=num_scored,
        num_top_scored=_WANTS_ALL.prompt_logprobs or 0,
        row_changes=RowChanges(nothing, nothing, nothing),
        sampling=prepare_sampling(table, answers, rows, new, num_samples),
    )


def measured_pass_memory(
    model: Decoder,
    rows: ReqToTokenPool,
    limits: PassLimits,
    kv_dtype: torch.dtype,
    *,
    captures: bool,
    tree: bool = False,
) -> int:
    """Bytes that passes up to `limits`, the tables on the device and, if there are to be any, graphs take.

    Runs the largest pass, and captures the largest graphs, over a pool of two slots. Contexts are short there:
    partial results of long ones, or of what requests share, are added.
    """
    config, device = model.config, model.placement.device

    def free() -> int:
        return torch.cuda.mem_get_info(device)[0]

    torch.cuda.empty_cache()
    before = free()
    pool = TokenToKVPool(2, config.num_layers, config.num_kv_heads, config.head_dim, dtype=kv_dtype, device=device)
    pool.buffer.zero_()
    runner = ModelRunner(
        model,
        rows,
        pool,
        device,
        max_captured_batch=limits.max_running_requests if captures else 0,
        max_captured_tokens=limits.chunked_prefill_size if captures else 0,
        tree=tree,
    )
    runner.collect(runner.launch(largest_pass(limits, config.context_length)))
    passes = before - free()
    torch.cuda.empty_cache()
    between = free()
    runner.capture_graphs(max_shapes=1)
    graphs = between - free()
    del runner, pool
    gc.collect()
    torch.cuda.empty_cache()
    planner = planner_of(config, model.placement, rows.req_to_token, kv_dtype, tree=tree)
    partials = planner.max_partial_bytes(limits.max_running_requests, limits.chunked_prefill_size)
    return max(0, passes) + max(0, graphs) + partials


@contextmanager
def room_for_passes() -> Iterator[None]:
    """Raises ParameterError with the remedies where there is no memory for a pass or its graphs."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ParameterError(
            f"there is no memory for the largest pass or its captured graphs beside the weights and the KV pool: "
            "lower max_running_requests, chunked_prefill_size or max_total_tokens, or leave the graphs out with "
            f"cuda_graphs=False ({str(error).splitlines()[0]})"
        ) from error
