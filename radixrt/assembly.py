"""`assemble`: from a `RuntimeConfig` to the parts of a `Runtime`."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from memory_pool.req_to_token_pool import ReqToTokenPool
from memory_pool.token_to_kv_pool import KV
from radixrt.cache.prefix_cache import PrefixCache
from radixrt.cache.snapshot import Loaded, Saved
from radixrt.cache.states import States
from radixrt.config import RuntimeConfig
from radixrt.engine.engine import Engine
from radixrt.engine.parts import Parts, request_output
from radixrt.errors import DeviceLostError, RadixrtError
from radixrt.frontend.request_builder import RequestBuilder, chatting_tokenizer
from radixrt.kept_cache.identity import cache_identity, weight_fingerprint, weight_fingerprint_of_ranks
from radixrt.kept_cache.storage import CacheStorage
from radixrt.limits import RunLimits
from radixrt.models.config import generation_defaults, read_architecture
from radixrt.models.decoder import Decoder
from radixrt.models.loader import whole_of
from radixrt.models.registry import find_architecture
from radixrt.models.weight_files import WeightSource, WeightTensors
from radixrt.ranks.followers import Followers, start_followers
from radixrt.ranks.kept_parts import KeptParts
from radixrt.ranks.leading_runner import LeadingRunner
from radixrt.ranks.messages import identity_of
from radixrt.ranks.rank import RankParts, assemble_rank, check_config, context_beside, folder_of
from radixrt.sampling_params import SamplingParams
from radixrt.schedule.policy import SchedulePolicy, SchedulerConfig
from radixrt.schedule.scheduler import Scheduler
from radixrt.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


class LoadedModel:
    """Weights, KV pools and their files: a `ServedModel`."""

    def __init__(
        self, rank: RankParts, storage: CacheStorage, followers: Followers | None, tokenizer: Tokenizer | None
    ) -> None:
        self._rank, self._followers, self._tokenizer = rank, followers, tokenizer
        self.decoder, self.device = rank.decoder, rank.decoder.placement.device
        self.storage, self.kv_pool = storage, rank.kv_pool
        # Of the weights and scales of all ranks, once somebody has asked.
        self._fingerprint: tuple[str, torch.Tensor | None] | None = None

    def identity(self) -> dict[str, Any]:
        if self._fingerprint is None:
            self._fingerprint = self._fingerprinted()
        placement, (fingerprint, scales) = self.decoder.placement, self._fingerprint
        return cache_identity(self._rank.config, fingerprint, placement, self.storage.formats, scales)

    def _fingerprinted(self) -> tuple[str, torch.Tensor | None]:
        """Of the whole model's weights; and the scales of all heads, as `TokenToKVPool.scales`."""
        rank, followers = self._rank, self._followers
        if followers is None:
            return weight_fingerprint(self.decoder), self.kv_pool.scales
        asked = followers.ask({"identity": True})
        found = [rank.identity(), *map(identity_of, followers.wait_for(asked))]
        whole = whole_of(self.decoder, rank.config)
        fingerprint = weight_fingerprint_of_ranks(whole, [each.checksums for each in found])
        if self.kv_pool.scales is None:
            return fingerprint, None
        scales = torch.empty(self.storage.parts[KV].row_shape[:3], device="cpu")
        for each in found:
            first_layer, end_layer, first_head, end_head = each.place
            assert each.scales is not None
            scales[first_layer:end_layer, :, first_head:end_head] = torch.from_numpy(each.scales)
        return fingerprint, scales

    def reload(self, source: WeightSource, *, before_change: Callable[[], None]) -> None:
        self._fingerprint = None
        followers = self._followers
        if followers is None:
            self._rank.reload(source, before_change)
        elif isinstance(source, Mapping):
            asked: list[int] = []
            with TemporaryDirectory(prefix="radixrt-weights-") as folder:
                WeightTensors(source).write(file := Path(folder) / "weights.safetensors")
                try:
                    self._reload_all(followers, file, before_change, asked)
                finally:  # a Ctrl-C leaves others that read it
                    if asked:
                        followers.wait_for(*asked)
        else:
            if isinstance(source, (str, Path)) and os.path.exists(source):
                source = Path(source).resolve()  # others may have started in another folder
            self._reload_all(followers, source, before_change, [])

    def _reload_all(
        self, followers: Followers, source: str | Path, before_change: Callable[[], None], asked: list[int]
    ) -> None:
        def change() -> None:
            before_change()
            asked.append(followers.ask({"reload": str(source)}))  # they read what has been found sound here

        try:
            self._rank.reload(source, change)
        except Exception as error:
            # Others that compute scales wait for this rank.
            waits = not isinstance(error, RadixrtError) or self.kv_pool.scales is not None
            if asked and waits:
                raise DeviceLostError(followers.why_lost(error)) from error
            raise
        followers.wait_for(*asked)

    def save_cache(self, path: Path, weights_version: int, *, progress: bool) -> Saved:
        return self.storage.save(path, weights_version, self._identity_of_text(), progress=progress)

    def load_cache(self, path: Path, weights_version: int, *, progress: bool) -> Loaded:
        return self.storage.load(path, weights_version, self._identity_of_text(), progress=progress)

    def _identity_of_text(self) -> dict[str, Any]:
        """KV of a text that is encoded otherwise now would never be found: who loads it is told."""
        return {**self.identity(), "tokenizer": None if self._tokenizer is None else self._tokenizer.identity}


def assemble(config: RuntimeConfig, decoder: Decoder | None = None) -> Parts:
    """Load the model, make its pools, and capture its graphs, on all ranks. Raises as `Runtime` does.

    A `decoder` that another Runtime of the same model, dtype, device, context, impl and mode has loaded is used as
    it is, for one rank: Runtimes may share weights, as long as nobody changes them.
    """
    began = time.perf_counter()
    device, _, _ = check_config(config)
    folder = folder_of(config)
    with context_beside(device):  # mistakes show before the weights
        # Before the tokenizer: transformers, which converts some, reads config.json, too.
        model_config = find_architecture(read_architecture(folder)).config_class.from_folder(folder)
        tokenizer = chatting_tokenizer(folder, config.chat_template_kwargs)
    if config.num_ranks > 1:  # what cannot be done is refused before processes are started
        model_config.check_stages(config.pipeline_parallel_size)
        model_config.for_ranks(config.tensor_parallel_size)
    followers = None if config.num_ranks == 1 else start_followers(config, device)
    try:
        if followers is None:
            rank = assemble_rank(config, folder, decoder=decoder)
        else:
            rank = assemble_rank(config, folder, followers.join(), followers.wait_until_loaded)
        parts = _assembled(config, tokenizer, rank, followers)
    except BaseException as error:
        if followers is not None:
            why = followers.reason_of(error)
            followers.close()
            if why is not None:
                raise why from error
        raise
    total = time.perf_counter() - began
    _log.info("ready after %.1f s", total)
    return replace(parts, start_up={**parts.start_up, "total": total})


def _assembled(
    config: RuntimeConfig, tokenizer: Tokenizer | None, rank: RankParts, followers: Followers | None
) -> Parts:
    """The first rank's parts, and all else that a Runtime is made of."""
    limits, kv_pool, host_pool, decoder = rank.limits, rank.kv_pool, rank.host_pool, rank.decoder
    defaults = generation_defaults(rank.folder) if config.generation_config == "auto" else SamplingParams()
    host, enabled = None if host_pool is None else host_pool.allocator, config.enable_prefix_cache
    on_gpu = decoder.placement.device.type == "cuda"
    rows, own_rows = rank.rows, None
    if config.pipeline_parallel_size > 1 and not on_gpu:  # this rank computes later than is planned
        rows, own_rows = ReqToTokenPool(rows.max_requests, rows.max_context_len), rows
    runner = rank.runner if followers is None else LeadingRunner(rank.runner, followers, own_rows)
    states, host_states = kv_pool.states, None if host_pool is None else host_pool.states
    layout = rank.config.kv_layout(kv_pool.dtype, state_dtype=decoder.placement.dtype)
    cache = PrefixCache(
        rows,
        kv_pool.allocator,
        host_slots=host,
        states=None if states is None else States(states.allocator, rows.max_requests),
        host_states=None if host_states is None else host_states.allocator,
        tokens_each_state=-(-layout.bytes_per_sequence // layout.bytes_per_token),
        enabled=enabled,
        force_miss=config.force_miss,
    )
    kept = rank.kept_parts
    storage = CacheStorage(cache, kept, None if followers is None else KeptParts(followers, kept))
    running, chunk, policy = limits.max_running_requests, limits.chunked_prefill_size, config.schedule_policy
    lanes = config.num_lanes
    scheduler = Scheduler(
        cache,
        SchedulerConfig(running, chunk, limits.max_samples, SchedulePolicy(policy), num_lanes=lanes),
    )
    return Parts(
        config=config,
        limits=RunLimits(
            kv_pool.allocator.capacity, running, chunk, 0 if states is None else states.allocator.capacity
        ),
        engine=Engine(scheduler, runner, max_in_flight=lanes if config.overlap else 0),
        builder=RequestBuilder(
            rank.config,
            tokenizer,
            decoder.config.context_length,
            config.run_seed,
            scheduler.refusal,
            kv_pool.allocator.capacity,
            defaults=defaults,
        ),
        model=LoadedModel(rank, storage, followers, tokenizer),
        output_of=partial(request_output, tokenizer=tokenizer),
        products=rank.products,
        start_up=rank.seconds,
        capture_next=rank.runner.capture_next,
        free_device=_free_gpu if on_gpu else lambda: None,
        close=(lambda: None) if followers is None else followers.close,
    )


def _free_gpu() -> None:
    gc.unfreeze()  # a call may still be open
    gc.collect()  # graphs hold on to their memory
    torch.cuda.empty_cache()
