"""Models whose layers keep states, on several ranks: answers, and what each rank keeps. Most ranks are threads."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import count
from operator import ge
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

import radixrt.assembly
from radixrt import limits
from radixrt.cache.radix_tree import Node
from radixrt.errors import DeviceLostError, ModelError
from radixrt.execution import memory_budget
from radixrt.kept_cache import cache_file
from radixrt.limits import requests_with_states
from radixrt.models.lfm2 import Lfm2Config
from radixrt.models.mamba2 import Mamba2Config
from radixrt.ranks import rank
from radixrt.ranks.kept_parts import KeptParts
from radixrt.runtime import Runtime
from radixrt.sampling_params import SamplingParams
from tests.models.test_hybrid import GREEDY, answers, prompts, shared_lens, tree
from tests.ranks.test_ranks import none_left, ranks_of_this_process, tokens_of
from tests.ranks.test_ranks import runtime as on_ranks
from tests.support import checkpoints
from tests.support.stages import followers_of, staged

# Some stages keep no states, the last one among them, and some have no attention.
NET, FULL = "linear_attention", "full_attention"
MODELS: dict[str, Callable[..., Any]] = {
    "qwen3.5": partial(checkpoints.qwen3_5, num_hidden_layers=4, layer_types=[NET, NET, NET, FULL]),
    "qwen3.5-moe": partial(checkpoints.qwen3_5_moe, layer_types=[NET, NET, FULL], tie_word_embeddings=True),
    "qwen3-next": partial(checkpoints.qwen3_next, layer_types=[FULL, NET, FULL]),
    "lfm2-moe": partial(checkpoints.lfm2_moe, conv_bias=True),
    "granite4-moe": partial(
        checkpoints.granite4_hybrid_moe, layer_types=["mamba", "mamba", "attention"], mamba_n_groups=1
    ),
    "nemotron-h-moe": checkpoints.nemotron_h_moe,
}
# Stages, ranks in each, and whether passes are padded to captured shapes.
SHAPES = {
    "qwen3.5": [(1, 2, True), (3, 1, True)],
    "qwen3.5-moe": [(1, 2, False), (2, 1, False), (2, 2, True)],
    "qwen3-next": [(2, 2, False), (3, 1, False)],
    "lfm2-moe": [(2, 2, False)],
    "granite4-moe": [(2, 2, True)],
    "nemotron-h-moe": [(1, 2, True), (3, 1, False)],
}
MANY = {"max_total_tokens": 2000, "chunked_prefill_size": 24}
ASKED = [*tree(depth=3), *prompts(1, 2, 70)]
QUICK = replace(GREEDY, max_new_tokens=4)
# A pool that holds a sixth of them; and one of hardly more states than two requests have.
TIERED = {"max_total_tokens": 220, "host_memory_gb": 0.01}
FEW_STATES = {**TIERED, "max_total_tokens": 600, "max_running_requests": 2}
SEVERAL = SamplingParams(temperature=0, n=3, max_new_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: checkpoints.write(make(), tmp_path_factory.mktemp("model")) for name, make in MODELS.items()}


@pytest.fixture(scope="module", autouse=True)
def small_pieces() -> Iterator[None]:
    """Kept caches have more pieces than there are buffers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_file, "PIECE_BYTES", 3 * 4096)
        yield


def all_parts(runtime: Runtime) -> list[Any]:
    """Of all ranks, by their numbers, once they have done all that they were told."""
    followers = followers_of(runtime)
    followers.wait_for(followers.ask({}))
    return [runtime.parts.model._rank, *(followers.parts[rank] for rank in sorted(followers.parts))]


def poison(pools: list[Any]) -> None:
    """Let unused slots and states hold NaN."""
    for pool in pools:
        pool.fill(torch.nan)


def memory_of(states: Any) -> list[Tensor]:
    """Each part `[num_layers, num_states, ...]`."""
    return [memory[:, 0] for memory in states.memory.values()]


def kept_states(runtime: Runtime, *, on_host: bool = False) -> dict[tuple[int, ...], int]:
    """The states that are kept in a tier, by the tokens that they are of."""
    found = runtime.parts.cache.states
    assert found is not None
    kept: Mapping[int, Node] = found.kept
    if on_host:
        assert found.host is not None
        kept = found.host.kept
    paths = {state: [*runtime.parts.cache.tree.path(node)][::-1] for state, node in kept.items()}
    return {tuple(t for step in path for t in step.tokens.tolist()): state for state, path in paths.items()}


def conv_parts(config: Any) -> list[int]:
    """The channels of a convolution, by what ranks divide by itself."""
    if isinstance(config, Lfm2Config):
        return [config.conv_channels]
    parts: list[int] = config.mamba_sizes.parts if isinstance(config, Mamba2Config) else config.delta_sizes.parts
    return parts


def whole_states(
    parts: list[Any], ranks: int, whole: Any, pool_of: Callable[[Any], Any] = lambda part: part.kv_pool
) -> tuple[Tensor, Tensor]:
    """The convolution's inputs and the matrices of all layers and heads, from all ranks' pools of a tier, stage by
    stage. `whole` is the config of one rank.
    """
    found: list[tuple[Tensor, Tensor]] = []
    for begin in reversed(range(0, len(parts), ranks)):  # ranks are counted from the last stage on
        stage = parts[begin : begin + ranks]
        sizes = conv_parts(stage[0].decoder.config)
        pools = [memory_of(pool_of(part).states) for part in stage]
        own = zip(*(conv.split(sizes, dim=2) for conv, _ in pools), sizes, conv_parts(whole), strict=True)
        # Where together they have more than there is, neighbours have the same.
        conv = torch.cat([torch.cat(of[:: ranks * size // every], dim=2) for *of, size, every in own], dim=2)
        found.append((conv, torch.cat([recurrent for _, recurrent in pools], dim=2)))
    conv, recurrent = (torch.cat(of_stages) for of_stages in zip(*found, strict=True))
    return conv, recurrent


@pytest.mark.long_unless(kept=lambda given: given["name"] in ("qwen3-next", "lfm2-moe", "granite4-moe"))
@pytest.mark.parametrize("name", MODELS)
def test_answers_and_states_are_those_of_one_rank(name: str, folders: dict[str, Path]) -> None:
    """In chunks, cold and warm, several to a prompt; prefixes are computed once. States have the same numbers."""
    with on_ranks(1, model=folders[name], dtype="float32", **MANY) as one:
        expected = [answers(one, ASKED) for _ in range(2)]
        forked = [answer.token_ids for answer in one.generate(ASKED[3], SEVERAL).outputs]
        right, layers, identity = kept_states(one), one.parts.model.kv_pool.states, one.identity()
        config = one.parts.model.decoder.config
    for stages, ranks, captured in SHAPES[name]:
        with staged(stages, ranks, captured=captured, model=folders[name], **MANY) as several:
            parts = all_parts(several)
            poison([part.kv_pool for part in parts])
            cold = several.generate(ASKED, GREEDY)
            assert [list(output.token_ids) for output in cold] == expected[0]
            assert sum(output.usage.cached_tokens for output in cold) == shared_lens(ASKED)
            assert answers(several, ASKED) == expected[1]
            assert several.identity() == identity
            assert [answer.token_ids for answer in several.generate(ASKED[3], SEVERAL).outputs] == forked
            found, own = kept_states(several), whole_states(all_parts(several), ranks, config)
            both = [*(found.keys() & right.keys())]
            assert len(both) > 20
            for path in both:
                for mine, theirs in zip(own, memory_of(layers), strict=True):
                    torch.testing.assert_close(mine[:, found[path]], theirs[:, right[path]], atol=1e-4, rtol=1e-4)


def test_draws_and_a_small_pool(folders: dict[str, Path]) -> None:
    """Answers are retracted where the pool does not hold all: their states are given up, and begun again."""
    params = [
        SamplingParams(max_new_tokens=40, temperature=0.9, top_k=8, seed=5, n=2, stop_token_ids=(7,)),
        SamplingParams(max_new_tokens=40, temperature=0.0, logprobs=2, stop_token_ids=(7,)),
    ]
    asked = prompts(*range(8, 16))
    given = [params[k % 2] for k in range(len(asked))]
    small = {"model": folders["qwen3.5-moe"], "max_total_tokens": 110}
    with on_ranks(1, dtype="float32", **small) as one:
        expected = tokens_of(one.generate(asked, given))
    with staged(2, 1, **small) as several:
        poison([part.kv_pool for part in all_parts(several)])
        assert tokens_of(several.generate(asked, given)) == expected
        assert several.parts.scheduler.num_retractions


def test_other_weights_and_identities(folders: dict[str, Path], tmp_path: Path) -> None:
    """KV in e4m3 has scales of the layers with attention alone, of which stages have one, or none."""
    name, options = "qwen3-next", {"kv_dtype": "fp8", "max_total_tokens": 300}
    other = checkpoints.write(MODELS[name](seed=1), tmp_path)
    asked, told = prompts(20, 5), []
    with staged(3, 1, model=folders[name], **options) as several:
        told = [(answers(several, asked), several.identity())]
        several.update_weights(other)
        told.append((answers(several, asked), several.identity()))
    for folder, (tokens, identity) in zip((folders[name], other), told, strict=True):
        with on_ranks(1, model=folder, dtype="float32", **options) as one:
            assert (answers(one, asked), one.identity()) == (tokens, identity)
    assert told[0] != told[1]


@pytest.mark.parametrize(("name", "stages", "ranks"), [("qwen3.5-moe", 2, 2), ("qwen3-next", 3, 1)])
def test_each_rank_holds_its_part(
    name: str, stages: int, ranks: int, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many states, and slots, as the rank that has least room for them."""
    pool_states, pool_slots, nth = rank.pool_states, rank.pool_slots, count()

    def fewer(*sizes: Any, promised: int) -> int:
        """But for the check before weights are read, to which they are promised."""
        return 0 if promised else pool_states(*sizes) - next(nth)

    monkeypatch.setattr(rank, "pool_states", fewer)
    monkeypatch.setattr(
        rank, "pool_slots", lambda *sizes, **more: min(pool_slots(*sizes, **more), 801 - next(nth))
    )
    with staged(stages, ranks, model=folders[name]) as several:
        parts = all_parts(several)
        last = len(parts) - 1
        assert several.parts.limits.num_states == 11 + 64 - last
        pools = [part.kv_pool for part in parts]
        for pool in pools:
            assert pool.memory["kv"].shape[2] == 801 - last - len(parts)
            conv, recurrent = memory_of(pool.states)
            assert conv.shape[1] == recurrent.shape[1] == 1 + 11 + 64 - last
            assert (conv.shape[2], recurrent.shape[2]) == (96 // ranks, 4 // ranks)
        kinds = [kind.is_recurrent for kind in parts[0].decoder.config.attention]
        assert sum(len(pool.states.memory["conv"]) for pool in pools) == ranks * sum(kinds)
        assert sum(len(pool.memory["kv"]) for pool in pools) == ranks * (len(kinds) - sum(kinds))


def test_ranks_of_one_host_share_its_memory(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """As many requests run at once as fit into one's share of it; so do the host's pools."""
    free = 40_000_000
    for module in (rank, memory_budget):
        monkeypatch.setattr(module, "free_bytes", lambda device: free)
    options: dict[str, Any] = {"max_running_requests": None, "max_total_tokens": 300, "host_memory_gb": 0.01}
    with staged(1, 2, model=folders["qwen3.5-moe"], **options) as both:
        layout = both.parts.model.decoder.kv_layout(torch.float32)
        share = both.parts.config.share_of_memory(on_gpu=False) / 2
        sizes = layout.bytes_per_sequence, layout.bytes_per_token
        found = both.parts.limits.max_running_requests
        assert found == requests_with_states(64, int(share * free), *sizes) < 64
        assert found < requests_with_states(64, 2 * int(share * free), *sizes)
        on_host = [part.host_pool.memory_of_all.values() for part in all_parts(both)]
        assert 9_900_000 < sum(memory.nbytes for memories in on_host for memory in memories) <= 10_000_000


# --- states on the host, and in kept caches ---


@dataclass
class Alone:
    """What one rank answers and keeps of ASKED, the second time, with room for all; and what it has saved."""

    config: Any
    answers: list[list[int]]
    cached: list[int]
    states: dict[tuple[int, ...], list[Tensor]]
    path: Path
    saved: int


def states_of(runtime: Runtime) -> dict[tuple[int, ...], list[Tensor]]:
    """One rank's on the device, by the tokens that they are of."""
    parts = memory_of(runtime.parts.model.kv_pool.states)
    return {path: [part[:, at].clone() for part in parts] for path, at in kept_states(runtime).items()}


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Alone]:
    @cache
    def of_model(name: str) -> Alone:
        path = tmp_path_factory.mktemp("kept") / "cache"
        with on_ranks(1, model=folders[name], dtype="float32", **MANY) as one:
            one.generate(ASKED, QUICK)
            found = one.generate(ASKED, QUICK)
            return Alone(
                one.parts.model.decoder.config,
                [list(output.token_ids) for output in found],
                [output.usage.cached_tokens for output in found],
                states_of(one),
                path,
                one.save_cache(path),
            )

    return of_model


def check_states(found: dict[tuple[int, ...], int], parts: tuple[Tensor, ...], right: Alone) -> int:
    """Compare those that one rank has, too. Returns how many these are."""
    both = found.keys() & right.states.keys()
    for path in both:
        for mine, theirs in zip(parts, right.states[path], strict=True):
            torch.testing.assert_close(mine[:, found[path]], theirs, atol=1e-4, rtol=1e-4)
    return len(both)


@pytest.mark.parametrize(
    ("name", "stages", "ranks", "options"),
    [
        ("granite4-moe", 2, 2, TIERED),
        ("qwen3.5-moe", 2, 1, FEW_STATES),
        ("nemotron-h-moe", 1, 2, {**TIERED, "overlap": False}),
        pytest.param("qwen3.5", 1, 2, {**FEW_STATES, "overlap": False}, marks=pytest.mark.long),
        pytest.param("qwen3-next", 3, 1, TIERED, marks=pytest.mark.long),
        pytest.param("lfm2-moe", 2, 2, FEW_STATES, marks=pytest.mark.long),
    ],
)
def test_states_go_to_the_host_and_back(
    name: str,
    stages: int,
    ranks: int,
    options: dict[str, Any],
    alone: Callable[[str], Alone],
    folders: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each rank's parts, in both tiers; a cache that is kept has those that the host alone has."""
    right, path = alone(name), tmp_path / "cache"
    if "max_running_requests" in options:
        monkeypatch.setattr(limits, "_FEWEST_KEPT", 2)
    with staged(stages, ranks, model=folders[name], **options) as several:
        poison([pool for part in all_parts(several) for pool in (part.kv_pool, part.host_pool)])
        for _ in range(2):
            assert answers(several, ASKED, QUICK) == right.answers
        stats = several.cache_stats()
        assert stats.state_loaded >= 5
        several.parts.engine.make_transfers()
        parts, on_host = all_parts(several), kept_states(several, on_host=True)
        check_states(kept_states(several), whole_states(parts, ranks, right.config), right)
        own = whole_states(parts, ranks, right.config, lambda part: part.host_pool)
        assert check_states(on_host, own, right) >= 10
        only_there = on_host.keys() - kept_states(several).keys()
        several.save_cache(path)
    with on_ranks(1, model=folders[name], dtype="float32", **MANY) as one:
        poison([one.parts.model.kv_pool])
        one.load_cache(path)
        assert only_there
        assert only_there <= kept_states(one).keys()
        assert check_states(kept_states(one), memory_of(one.parts.model.kv_pool.states), right) >= 10
        assert answers(one, ASKED, QUICK) == right.answers


@pytest.mark.parametrize(
    ("name", "stages", "ranks"),
    [
        ("granite4-moe", 2, 2),
        pytest.param("nemotron-h-moe", 3, 1, marks=pytest.mark.long),
        pytest.param("nemotron-h-moe", 1, 4, marks=pytest.mark.long),  # neighbours have one group of keys
        pytest.param("qwen3.5", 1, 2, marks=pytest.mark.long),
        pytest.param("qwen3-next", 2, 2, marks=pytest.mark.long),
        pytest.param("lfm2-moe", 2, 2, marks=pytest.mark.long),
    ],
)
def test_kept_caches_are_those_of_one_rank(
    name: str,
    stages: int,
    ranks: int,
    alone: Callable[[str], Alone],
    folders: dict[str, Path],
    tmp_path: Path,
) -> None:
    """What one has saved, several load and save, bit by bit; one loads what several have computed."""
    right, again, own = alone(name), tmp_path / "again", tmp_path / "own"
    with on_ranks(1, model=folders[name], dtype="float32", **MANY) as one:
        with staged(stages, ranks, model=folders[name], **MANY) as several:
            poison([part.kv_pool for part in all_parts(several)])
            assert several.identity() == one.identity()
            assert several.load_cache(right.path) == right.saved
            loaded, own_parts = kept_states(several), whole_states(all_parts(several), ranks, right.config)
            assert loaded.keys() == right.states.keys()
            for path, at in loaded.items():
                assert all(map(torch.equal, (part[:, at] for part in own_parts), right.states[path])), path
            assert several.save_cache(again) == right.saved
            warm = several.generate(ASKED, QUICK)
            assert [list(output.token_ids) for output in warm] == right.answers
            assert all(map(ge, (output.usage.cached_tokens for output in warm), right.cached))
            several.flush_cache()
            for _ in range(2):
                several.generate(ASKED, QUICK)
            several.save_cache(own)
        poison([one.parts.model.kv_pool])
        assert one.load_cache(again) == right.saved
        found = states_of(one)
        assert found.keys() == right.states.keys()
        for path, parts in found.items():
            assert all(map(torch.equal, parts, right.states[path])), path
        one.flush_cache()
        poison([one.parts.model.kv_pool])
        one.load_cache(own)
        assert check_states(kept_states(one), memory_of(one.parts.model.kv_pool.states), right) > 20
        found = one.generate(ASKED, QUICK)
        assert [list(output.token_ids) for output in found] == right.answers
        assert sum(output.usage.cached_tokens for output in found) >= 0.9 * sum(right.cached)


# --- processes ---


@pytest.mark.long
def test_processes(folders: dict[str, Path]) -> None:
    options = {"model": folders["qwen3.5-moe"], "dtype": "float32"}
    with on_ranks(1, **options, **MANY) as one:
        expected = answers(one, ASKED[::3])
    for pool in (MANY, TIERED):
        with none_left(), on_ranks(2, **options, **pool) as both:
            assert [answers(both, ASKED[::3]) for _ in range(2)] == [expected] * 2


@pytest.mark.long
def test_a_rank_that_is_lost_while_states_are_saved(
    alone: Callable[[str], Alone], folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older cache stays, which one process has saved and two load."""
    right, path = alone("granite4-moe"), tmp_path / "cache"
    path.write_bytes(right.path.read_bytes())
    buffers, gather = KeptParts.buffers, KeptParts.gather
    names: list[str] = []

    def named(self: KeptParts, name: str, count: int, num_rows: int) -> Any:
        names.append(name)
        return buffers(self, name, count, num_rows)

    with none_left(), on_ranks(2, model=folders["granite4-moe"], dtype="float32", **MANY) as both:
        (follower,) = ranks_of_this_process()
        assert both.load_cache(path) == right.saved
        found = both.generate(ASKED[::4], QUICK)
        assert [list(output.token_ids) for output in found] == right.answers[::4]
        assert all(map(ge, (output.usage.cached_tokens for output in found), right.cached[::4]))

        def killed(self: KeptParts, buffer: int, slots: Any) -> None:
            if names[-1] == "recurrent":
                os.kill(follower.pid, signal.SIGKILL)
            gather(self, buffer, slots)

        monkeypatch.setattr(KeptParts, "buffers", named)
        monkeypatch.setattr(KeptParts, "gather", killed)
        with pytest.raises(DeviceLostError, match="rank 1 of 2"):
            both.save_cache(path)
    assert names == ["kv", "conv", "recurrent"]
    assert path.read_bytes() == right.path.read_bytes()
    assert os.listdir(tmp_path) == ["cache"]


def test_what_cannot_be_done_is_refused(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """By name; no process is started."""
    started = Mock()
    monkeypatch.setattr(radixrt.assembly, "start_followers", started)
    sizes = "linear_num_key_heads 2 is not a multiple of tensor_parallel_size 4"
    stages = "num_hidden_layers 3 is less than pipeline_parallel_size 4"
    for options, message in (
        ({"tensor_parallel_size": 4}, sizes),
        ({"pipeline_parallel_size": 4}, stages),
    ):
        with pytest.raises(ModelError, match=message):
            Runtime(folders["qwen3.5-moe"], device="cpu", max_total_tokens=300, **options)
    started.assert_not_called()
