"""`assemble_rank`: from a `RuntimeConfig` to what one rank of a model has."""

# Tests: tests/test_assembly.py, tests/ranks/test_ranks.py

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from layers.formats.weight_format import PLAIN, WeightFormat
from layers.moe import SparseMoE
from layers.products import ProductTable
from layers.weight import Weight
from memory_pool.layout import Layout
from memory_pool.pool import HostPool
from memory_pool.req_to_token_pool import ReqToTokenPool
from memory_pool.token_to_kv_pool import TokenToKVPool
from radixrt.builtin import MODEL_PATH
from radixrt.config import RuntimeConfig
from radixrt.cpu_count import usable_cpus
from radixrt.errors import ParameterError
from radixrt.execution.device import check_kernels, choose_device
from radixrt.execution.kv_scales import calibrated_scales
from radixrt.execution.memory_budget import (
    free_bytes,
    host_pool_sizes,
    measured_pass_memory,
    pool_slots,
    pool_states,
    room_for_passes,
)
from radixrt.execution.model_runner import ModelRunner, Tuning
from radixrt.execution.products import compare_all
from radixrt.kept_cache.identity import rank_checksums
from radixrt.kept_cache.parts import RowPart
from radixrt.limits import NO_PASSES, PASS_BYTES, PassLimits, requests_at_once, requests_with_states
from radixrt.models.config import GENERATION_DEFAULTS, ModelConfig, generation_defaults
from radixrt.models.decoder import Decoder
from radixrt.models.loader import check_dtype, load_model, model_folder, reload_weights, whole_of
from radixrt.models.weight_files import WeightSource
from radixrt.ranks.group import ALONE, RankGroup
from radixrt.ranks.messages import RankIdentity
from radixrt.sampling_params import SamplingParams
from triton_ops.e4m3 import E4M3
from triton_ops.implementation import runs_triton

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankParts:
    """What a rank of a model has: its weights, its part of the pool, and what computes passes with them."""

    folder: Path
    decoder: Decoder
    config: ModelConfig  # of the whole model
    limits: PassLimits
    rows: ReqToTokenPool
    kv_pool: TokenToKVPool
    host_pool: HostPool | None
    runner: ModelRunner
    products: tuple[ProductTable, ...]  # of a deterministic model
    seconds: Mapping[str, float]  # of the steps, as in Runtime, without their total

    @property
    def kept_parts(self) -> dict[str, RowPart]:
        """Its parts of all that a kept cache has rows of, by name, those of tokens first."""
        placement, dtype = self.decoder.placement, self.kv_pool.dtype
        impl, ranks, before = placement.impl, placement.ranks, range(self.decoder.layers.start)
        whole, ahead = (self.config.kv_layout(dtype, layers, placement.dtype) for layers in (None, before))
        owns, memory = self.decoder.kv_layout(dtype), self.kv_pool.memory_of_all
        on_host = {} if self.host_pool is None else self.host_pool.memory_of_all
        return {
            part.name: RowPart(memory[part.name], on_host.get(part.name), impl, part, own, ranks, first.num_layers)
            for part, own, first in zip(whole.parts, owns.parts, ahead.parts, strict=True)
        }

    def identity(self) -> RankIdentity:
        """What its part of what tokens keep depends on."""
        part, scales = next(iter(self.kept_parts.values())), self.kv_pool.scales
        heads = next(part.runs).whole
        return RankIdentity(
            rank_checksums(self.decoder, whole_of(self.decoder, self.config)),
            (part.layers.start, part.layers.stop, heads.start, heads.stop),
            None if scales is None else scales.cpu().numpy(),
        )

    def reload(self, source: WeightSource, before_change: Callable[[], None] = lambda: None) -> None:
        """Read other weights of the same shape. Raises as `Runtime.update_weights`."""
        reload_weights(self.decoder, self.config, source, before_change=before_change)
        if self.kv_pool.scales is not None:
            # Nothing is cached now, so nothing is read with other scales than it was stored with.
            self.kv_pool.set_scales(calibrated_scales(self.decoder, self.decoder.placement.device))


def check_config(config: RuntimeConfig) -> tuple[torch.device, bool, bool]:
    """Check what of the options does not depend on the model. Raises as `Runtime` does.

    Returns the device, whether kernels run on it as a GPU, and whether passes are captured.
    """
    device = choose_device(config.device)
    check_kernels(config.impl, config.kv_dtype, device)
    check_dtype(config.dtype)
    _check_deterministic(config, device)
    runs_kernels = device.type == "cuda" and runs_triton(config.impl, device)
    return device, runs_kernels, _captures(config, runs_kernels)


def _check_deterministic(config: RuntimeConfig, device: torch.device) -> None:
    """Raise ParameterError where the options cannot promise equal bits."""
    if not config.deterministic:
        return
    if config.kv_dtype == "fp8":
        raise ParameterError(
            "deterministic is True and kv_dtype is 'fp8', whose attention cannot promise equal bits; leave one of "
            "them out"
        )
    if device.type == "cuda" and not runs_triton(config.impl, device):
        raise ParameterError(
            f"deterministic is True, but no kernels run on {device} with impl {config.impl!r}, and torch's sums "
            "depend on the size of a pass there; install Triton and leave impl out, or leave deterministic out"
        )


def _captures(config: RuntimeConfig, runs_kernels: bool) -> bool:
    """Whether passes are captured as graphs. Raises ParameterError if `cuda_graphs` demands the impossible."""
    can_capture = runs_kernels and os.environ.get("TRITON_INTERPRET") != "1"
    if config.cuda_graphs and not can_capture:
        raise ParameterError(
            f"cuda_graphs is True, but only kernels on a GPU can be captured; device is {config.device!r}"
        )
    return can_capture if config.cuda_graphs is None else config.cuda_graphs


@contextmanager
def context_beside(device: torch.device) -> Iterator[None]:
    """A GPU's context is made beside what is done inside: it keeps the driver busy, and not the host."""
    with ThreadPoolExecutor(max_workers=1) as background:
        made = background.submit(lambda: torch.empty(1, device=device))
        yield
        made.result()


def assemble_rank(
    config: RuntimeConfig,
    folder: Path,
    group: RankGroup = ALONE,
    loaded: Callable[[], None] = lambda: None,
    decoder: Decoder | None = None,
) -> RankParts:
    """Load a rank's part of the model in `folder`, make its pools, capture its graphs. Raises as `Runtime` does.

    All ranks of the group do so at once; `loaded` is called once the weights are there. `decoder`: see `assemble`.
    """
    began = time.perf_counter()
    device, runs_kernels, captures = check_config(config)
    impl, on_gpu = config.impl, device.type == "cuda"
    if not on_gpu or config.threads is not None:
        torch.set_num_threads(config.threads or min(torch.get_num_threads(), usable_cpus()))
    tree = config.attention == "tree"
    share, wanted = config.share_of_memory(on_gpu=on_gpu), config.max_total_tokens
    if not on_gpu:
        share /= group.shape.size  # all ranks take of the same memory

    if decoder is None:
        with context_beside(device):
            decoder, whole_config = load_model(
                folder,
                dtype=config.dtype,
                device=device,
                context_length=config.context_length,
                load_format=config.load_format,
                seed=config.seed or 0,
                impl=impl,
                deterministic=config.deterministic,
                quantization=config.quantization,
                ranks=group.ranks,
                stage=group.stage,
                check=partial(_check_states, config, device, share),
            )
    else:
        whole_config = decoder.config
    decoder.num_weights = group.least(decoder.num_weights)
    loaded()
    model_config = decoder.config
    context_length = model_config.context_length
    seconds = {"weights": time.perf_counter() - began}
    kv_dtype = E4M3 if config.kv_dtype == "fp8" else decoder.placement.dtype
    if kv_dtype == E4M3 and model_config.head_dim % 2:
        raise ParameterError(f"kv_dtype is 'fp8', which wants an even head_dim; it is {model_config.head_dim}")
    layout = decoder.kv_layout(kv_dtype)
    bytes_per_slot = _bytes_per_slot(layout)
    limits = _pass_limits(config, model_config, device, layout, share)
    limits = replace(limits, max_running_requests=group.least(limits.max_running_requests))
    captured = limits if captures else NO_PASSES
    products_began = time.perf_counter()
    on_device = torch.cuda.device(device) if on_gpu else nullcontext()
    with torch.inference_mode(), on_device, room_for_passes():
        products = compare_all(decoder, limits, Tuning.max_scored_at_once)
    if products:
        if on_gpu:
            torch.cuda.empty_cache()  # of what was compared: the pool measures what is free
        seconds["products"] = time.perf_counter() - products_began

    _log_weights(decoder, config, folder, seconds["weights"], generation_defaults(folder))

    # Before the pool takes the free memory: this needs some, too.
    scales = calibrated_scales(decoder, device) if kv_dtype == E4M3 else None
    rows = ReqToTokenPool(limits.num_rows, context_length)
    memory_began, for_passes = time.perf_counter(), 0
    if runs_kernels and config.max_total_tokens is None:  # references are not for passes of any size
        with room_for_passes():
            for_passes = measured_pass_memory(decoder, rows, limits, kv_dtype, captured=captured, tree=tree)
    seconds["memory"] = time.perf_counter() - memory_began

    num_states = group.least(pool_states(device, layout, limits, share, promised=for_passes))
    sizes = {"promised": for_passes, "beside": num_states * layout.bytes_per_sequence}
    slots = pool_slots(device, bytes_per_slot, memory_fraction=share, max_total_tokens=wanted, **sizes)
    slots = group.least(slots)
    kv_pool = TokenToKVPool(slots, layout, num_states=num_states, device=device)
    if scales is not None:
        kv_pool.set_scales(scales)
    host_pool = _host_pool(config, group, layout, kv_pool)
    graphs_began = time.perf_counter()
    with room_for_passes():
        runner = ModelRunner(decoder, rows, kv_pool, device, host_pool, captured=captured, tree=tree)
        runner.capture_largest()
        # Several ranks capture the rest now, too, all at once: if one of them alone had no memory for it later,
        # the others would wait for that one.
        while group.shape.size > 1 and runner.capture_next(spares_memory=False):
            pass
    seconds["graphs"] = time.perf_counter() - graphs_began
    parts = RankParts(folder, decoder, whole_config, limits, rows, kv_pool, host_pool, runner, products, seconds)
    _log_made(parts, layout)
    return parts


def _bytes_per_slot(layout: Layout) -> int:
    """1 in a stage that has no attention: other stages say how many slots there are."""
    return max(1, layout.bytes_per_token)


def _check_states(config: RuntimeConfig, device: torch.device, share: float, skeleton: Decoder) -> None:
    """Raise ParameterError where the weights will leave too little memory for the states of the requests at once
    that are asked for. Where nobody says how many, those run that find room.
    """
    if skeleton.config.keeps_states and config.max_running_requests is not None:
        weights = sum(weight.numel() * weight.itemsize for weight in skeleton.parameters())
        layout = skeleton.kv_layout(skeleton.placement.dtype)
        pool_states(device, layout, config.pass_limits(on_gpu=device.type == "cuda"), share, promised=weights)


def _host_pool(
    config: RuntimeConfig, group: RankGroup, layout: Layout, kv_pool: TokenToKVPool
) -> HostPool | None:
    """The pool's second tier, if the host has memory for one. Raises ParameterError where it cannot be had."""
    on_gpu = kv_pool.device.type == "cuda"
    promised = 0 if on_gpu else (kv_pool.allocator.capacity + 1) * _bytes_per_slot(layout)
    sizes = host_pool_sizes(config.host_memory_gb, layout, promised=promised, num_ranks=group.shape.size)
    slots, states = map(group.least, sizes)
    if not slots:
        return None
    try:
        return HostPool(slots, kv_pool, num_states=states)
    except RuntimeError as error:
        raise ParameterError(f"host_memory_gb is {config.host_memory_gb:g}: {error}") from error


def _log_made(parts: RankParts, layout: Layout) -> None:
    kv_pool, products, seconds = parts.kv_pool, parts.products, parts.seconds
    slots, states = kv_pool.allocator.capacity, kv_pool.states
    pool_bytes = (slots + 1) * _bytes_per_slot(layout)
    _log.info("KV pool: %s tokens, %.2f GiB in %s", f"{slots:,}", pool_bytes / 2**30, kv_pool.dtype)
    if states is not None:
        count = states.allocator.capacity
        state_bytes = (count + 1) * layout.bytes_per_sequence
        _log.info("states: %s sequences, %.2f GiB", f"{count:,}", state_bytes / 2**30)
    if parts.host_pool is not None:
        _log_host(parts.host_pool, layout)
    if products:
        replaced = sum(bool(table.ordered) for table in products)
        told = "products: %d shapes compared in %.1f s; torch's are replaced at some sizes in %d of them"
        _log.info(told, len(products), seconds["products"], replaced)
    if graphs := len(parts.runner.executor.graphs):
        told = "graphs: %d captured in %.1f s, and those of %d kinds of passes when the first of each comes"
        _log.info(told, graphs, seconds["graphs"], parts.runner.num_uncaptured)


def _log_host(host_pool: HostPool, layout: Layout) -> None:
    slots, states = host_pool.allocator.capacity, host_pool.states
    told = f"{slots:,} tokens, {slots * layout.bytes_per_token / 2**30:.2f} GiB"
    if states is not None:
        count = states.allocator.capacity
        told += f"; states: {count:,} sequences, {count * layout.bytes_per_sequence / 2**30:.2f} GiB"
    _log.info("host tier: %s", told)


def _pass_limits(
    config: RuntimeConfig, model: ModelConfig, device: torch.device, layout: Layout, share: float
) -> PassLimits:
    """The limits of a pass, once the weights are in place: on a GPU, or where each request has a state, as many
    requests at once as this share of memory allows.
    """
    on_gpu, wanted = device.type == "cuda", config.max_total_tokens
    limits = config.pass_limits(on_gpu=on_gpu)
    if config.max_running_requests is not None:
        return limits
    running, free = limits.max_running_requests, int(free_bytes(device) * share)
    if on_gpu:
        bytes_per_slot = _bytes_per_slot(layout)
        pool = free if wanted is None else wanted * bytes_per_slot
        sizes = {"context_length": model.context_length, "vocab_size": model.vocab_size}
        running = requests_at_once(running, free, pool, bytes_per_slot, **sizes)
        free = max(0, int((free_bytes(device) - PASS_BYTES) * share))
    running = requests_with_states(running, free, layout.bytes_per_sequence, _bytes_per_slot(layout))
    return replace(limits, max_running_requests=running)


def folder_of(config: RuntimeConfig) -> Path:
    """The folder of the options' model. Raises ModelError where there is none."""
    source = MODEL_PATH if config.model is None else config.model
    return model_folder(source, weights=config.load_format != "dummy", revision=config.revision)


def _log_weights(
    decoder: Decoder, config: RuntimeConfig, folder: Path, seconds: float, own_defaults: SamplingParams
) -> None:
    """Log what was loaded, and what generation_config.json says of parameters, used or not."""
    size = sum(weight.numel() * weight.itemsize for weight in decoder.parameters())
    kind = "random weights" if config.load_format == "dummy" else "weights"
    where = f"{decoder.placement.dtype} on {decoder.placement.device}"
    _log.info("%s of %s: %s bytes, %s, in %.1f s", kind, folder, f"{size:,}", where, seconds)
    if decoder.placement.quantization != PLAIN:
        _log_quantization(decoder, decoder.placement.quantization)
    named = {name: getattr(own_defaults, name) for name in GENERATION_DEFAULTS}
    if own := {name: value for name, value in named.items() if value != getattr(SamplingParams(), name)}:
        used = "used where none are given" if config.generation_config == "auto" else "not used"
        how = "" if config.generation_config == "auto" else '; generation_config="auto" uses them'
        _log.info("parameters of its generation_config.json are %s: %s%s", used, own, how)


def _log_quantization(decoder: Decoder, quantization: WeightFormat) -> None:
    """Log how much is held quantised, and warn of what is quantised in the checkpoint but not here."""
    weights = [module for module in decoder.modules() if isinstance(module, Weight)]
    held = sum(weight.shape.numel() for weight in weights if weight.held != PLAIN)
    placement, numbers = decoder.placement, quantization.numbers
    experts = any(one.held == PLAIN for one in decoder.modules() if isinstance(one, SparseMoE))
    if not placement.holds_quantised:
        _log.warning(
            "weights of %s are held in %s: their products need kernels and %s, and the model is on %s, with impl "
            "%r",
            *(numbers, placement.dtype, quantization.needs, placement.device, placement.impl),
        )
        return
    _log.info("%s weights are held in %s", f"{held:,}", numbers)
    if experts:
        _log.warning(
            "the weights of experts are held in %s: their products are not in %s", placement.dtype, numbers
        )
    if cut := sum(weight.held == PLAIN != weight.stored for weight in weights):
        _log.warning(
            "%d weights are held in %s: their checkpoint leaves a part as it is, or stores blocks or groups that "
            "parts of a stack or their sizes do not keep to",
            *(cut, placement.dtype),
        )
