"""How many KV slots fit: what is free, less the memory that passes need, measured with the largest one."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import psutil
import torch

from memory_pool.layout import Layout
from memory_pool.req_to_token_pool import ReqToTokenPool
from memory_pool.token_to_kv_pool import TokenToKVPool
from radixrt.checks import check_float, check_int
from radixrt.errors import ParameterError
from radixrt.execution.model_runner import ModelRunner
from radixrt.execution.staging import padded
from radixrt.limits import PassLimits, states_in_pool, states_on_host
from radixrt.models.decoder import Decoder
from radixrt.sampling_params import SamplingParams
from radixrt.schedule.answer import Answer, RequestLog
from radixrt.schedule.passes import NO_ROWS, Pass
from radixrt.schedule.request import Request
from radixrt.schedule.sampling_table import SamplingTable

# Everything that a request can ask for and that takes memory a row of logits.
_WANTS_ALL = SamplingParams(
    max_new_tokens=2**16,
    top_k=50,
    top_p=0.9,
    min_p=0.1,
    repetition_penalty=1.1,
    logprobs=20,
    prompt_logprobs=20,
    logprobs_mode="processed_logprobs",
)


def largest_pass(limits: PassLimits, context_length: int) -> Pass:
    """A pass at all limits at once, of tokens 0 whose KV goes to slot 0 and whose rows are 0, 1, ... As many
    requests as it takes share the prompt tokens, whose log-probabilities are all wanted; the others decode.
    """
    count, longest = limits.max_running_requests, context_length - 1
    starts = np.arange(0, limits.chunked_prefill_size, longest)[:count]
    chunks = np.minimum(limits.chunked_prefill_size - starts, longest)
    new, num_scored = padded(chunks, count, 1), padded(chunks, count)
    num_samples = np.ones(count, np.int32)
    num_samples[0] += limits.max_samples - count
    request = Request(0, np.zeros(1, np.int32), _WANTS_ALL, max_new_tokens=1, seed=0)
    answers = [Answer(request, arrival=0, log=RequestLog(submitted_at=0.0))] * count
    rows, scored = np.arange(count, dtype=np.int32), np.arange(num_scored.sum(), dtype=np.int32)
    table = SamplingTable(count)
    for row, answer in enumerate(answers):
        table.admit(row, answer)
    return replace(
        NO_ROWS,
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
        sampling=table.prepare(answers, rows, new, num_samples),
    )


def measured_pass_memory(
    model: Decoder,
    rows: ReqToTokenPool,
    limits: PassLimits,
    kv_dtype: torch.dtype,
    *,
    captured: PassLimits,
    tree: bool,
) -> int:
    """Bytes that passes up to `limits`, the tables on the device, and graphs take; the last two as in ModelRunner.

    Runs the largest pass, and captures the largest graphs, over a pool of two slots. Contexts are short there:
    partial results of long ones, or of what requests share, are added.
    """
    config, device = model.config, model.placement.device

    def free() -> int:
        return torch.cuda.mem_get_info(device)[0]

    torch.cuda.empty_cache()
    before = free()
    pool = TokenToKVPool(2, model.kv_layout(kv_dtype), device=device)
    pool.fill(0.0)
    runner = ModelRunner(model, rows, pool, device, captured=captured, tree=tree)
    runner.collect(runner.launch(largest_pass(limits, config.context_length)))
    passes = before - free()
    torch.cuda.empty_cache()
    between = free()
    runner.capture_largest()
    graphs = between - free()
    partials = runner.planner.max_partial_bytes(limits.max_running_requests, limits.chunked_prefill_size)
    del runner, pool
    gc.collect()
    torch.cuda.empty_cache()
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


def free_bytes(device: torch.device) -> int:
    """Of the device's memory, or the host's for a CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


def pool_states(
    device: torch.device, layout: Layout, limits: PassLimits, memory_fraction: float, promised: int = 0
) -> int:
    """States of a pool, the reserved one included, in a share of free memory, of which weights or passes will have
    taken `promised` bytes; 0 where no layer of the model keeps any. Raises ParameterError where those of requests
    do not fit.
    """
    if not layout.sequences:
        return 0
    free = max(0, int((free_bytes(device) - promised) * memory_fraction))
    return states_in_pool(limits, free, max(1, layout.bytes_per_sequence))  # a stage may have none of these layers


def pool_slots(
    device: torch.device,
    bytes_per_slot: int,
    memory_fraction: float,
    max_total_tokens: int | None,
    promised: int,
    beside: int = 0,
) -> int:
    """Slots of a KV pool, the reserved one included: `max_total_tokens`, or what a share of free memory holds.

    `promised` bytes that are free are needed by passes, and `beside` of that share by what else the pool holds.
    Raises ParameterError where `max_total_tokens` exceeds what is free, or the share does not hold two slots.
    """
    free = free_bytes(device)
    if max_total_tokens is not None:
        return (
            check_int("max_total_tokens", max_total_tokens, 1, max(1, (free - beside) // bytes_per_slot - 1)) + 1
        )
    fitting = (int((free - promised) * memory_fraction) - beside) // bytes_per_slot
    if fitting < 2:
        needs = f", of which passes need {promised:,}" if promised else ""
        needs += f", states of sequences {beside:,}" if beside else ""
        raise ParameterError(
            f"memory_fraction is {memory_fraction:g}: of {free:,} free bytes{needs}, that is less than a KV slot "
            f"of {bytes_per_slot:,} bytes needs"
        )
    return fitting


def host_pool_sizes(
    host_memory_gb: float | None, layout: Layout, *, promised: int, num_ranks: int = 1
) -> tuple[int, int]:
    """Slots of a KV pool in a rank's equal part of `host_memory_gb` 10^9 bytes of the host's memory, and states
    beside them, if there are any, which take a share of it; 0 of both for none of it, or None.

    `promised` bytes that count as free are somebody's: memory is handed out when it is first written to. Raises
    ParameterError where that is more than is free, or too little for two slots and two states, of which one is
    reserved each.
    """
    if host_memory_gb is None:
        return 0, 0
    free = max(0, psutil.virtual_memory().available - promised)
    num_bytes = int(1e9 * check_float("host_memory_gb", host_memory_gb, 0.0, free / 1e9)) // num_ranks
    states = 0 if not layout.sequences else states_on_host(num_bytes, layout.bytes_per_sequence)
    slots = (num_bytes - states * layout.bytes_per_sequence) // max(1, layout.bytes_per_token)
    if num_bytes and (slots < 2 or (states < 2 and layout.sequences)):
        needs = f"two KV slots of {layout.bytes_per_token:,} bytes"
        if layout.sequences:
            needs += f" and, in a quarter of it, two states of {layout.bytes_per_sequence:,}"
        if num_ranks > 1:
            needs += f" on each of {num_ranks} ranks"
        raise ParameterError(f"host_memory_gb is {host_memory_gb:g}: {needs} need more")
    return slots, states
