"""Kept caches of models whose layers keep states: which states come back, and which files are refused."""

from __future__ import annotations

import argparse
import json
import logging
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from layers.ranks import Ranks
from memory_pool.layout import Part
from radixrt import CacheFileError, Runtime
from radixrt.cache.radix_tree import Node
from radixrt.cache.snapshot import TreeSnapshot
from radixrt.cli.kept_cache import runtime_with_cache
from radixrt.kept_cache import cache_file, parts
from radixrt.kept_cache.cache_file import CacheFileReader, CacheFileWriter, RowFormat, row_counts
from radixrt.kept_cache.parts import RowPart
from tests.kept_cache.test_kept_cache import GREEDY, answers, cached, empty_pieces, prompts
from tests.support.checkpoints import llama, qwen3_5, write
from tests.support.interpreter import require_interpreter
from triton_ops.implementation import Impl

pytestmark = pytest.mark.usefixtures("device")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> Path:
    with torch.device("cpu"):
        return write(qwen3_5(), tmp_path_factory.mktemp("qwen3.5"))


def runtime_of(folder: Path, **options: Any) -> Runtime:
    """Slots and states that nobody has filled hold NaN."""
    defaults = {"device": torch.get_default_device(), "max_total_tokens": 600, "dtype": "float32"}
    runtime = Runtime(folder, **{**defaults, **options})
    runtime.parts.model.kv_pool.fill(float("nan"))
    return runtime


def keep(runtime: Runtime, path: Path) -> int:
    """Ask twice, so that states are left where prompts part, and keep the cache."""
    for _ in range(2):
        runtime.generate(prompts(), GREEDY)
    return runtime.save_cache(path)


@pytest.fixture
def kept(folder: Path, tmp_path: Path) -> Path:
    path = tmp_path / "kept.safetensors"
    with runtime_of(folder) as runtime:
        assert keep(runtime, path) > 0
    return path


def contents(runtime: Runtime) -> dict[tuple[int, ...], list[torch.Tensor]]:
    """By the path of each node with a state: its parts on the CPU."""
    cache, found = runtime.parts.cache, {}
    states = runtime.parts.model.kv_pool.states
    stack: list[Node] = [*cache.tree.roots.values()]
    while stack:
        node = stack.pop()
        stack += node.children.values()
        if node.state:
            tokens = np.concatenate([step.tokens for step in cache.tree.path(node)][::-1])
            found[tuple(tokens.tolist())] = [memory[:, 0, node.state].cpu() for memory in states.memory.values()]
    return found


@pytest.mark.parametrize("piece_bytes", [None, 2000, 3 * 4096])
def test_states_come_back_bit_by_bit(
    folder: Path, tmp_path: Path, piece_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces of all, of one and of some states."""
    if piece_bytes is not None:
        monkeypatch.setattr(cache_file, "PIECE_BYTES", piece_bytes)
    path = tmp_path / "kept.safetensors"
    with runtime_of(folder) as first:
        saved = keep(first, path)
        before = contents(first)
        assert len(before) == first.cache_stats().state_nodes > 5
        warm = first.generate(prompts(), GREEDY)
    with runtime_of(folder) as second:
        assert second.load_cache(path) == saved
        after = contents(second)
        assert after.keys() == before.keys()
        for tokens, own in before.items():
            assert all(torch.equal(part, other) for part, other in zip(after[tokens], own, strict=True))
        again = second.generate(prompts(), GREEDY)
        assert answers(again) == answers(warm)
        assert cached(again) == cached(warm)
        assert cached(again)[:3] == [38, 38, 25]  # the others save too little for a state
        assert second.load_cache(path) == 0  # nothing is lacking


def test_the_file(kept: Path) -> None:
    with safe_open(kept, framework="pt", device="cpu") as file, CacheFileReader.open(kept) as reader:
        has_state, conv, recurrent = (file.get_tensor(name) for name in ("node_has_state", "conv", "recurrent"))
        assert has_state.tolist() == reader.tree.has_state.tolist()
        assert conv.shape == (reader.tree.num_states, 2, 96, 3)
        assert recurrent.shape == (reader.tree.num_states, 2, 4, 16, 8)
        assert conv.isfinite().all()
        assert recurrent.isfinite().all()
        assert len({*map(tuple, recurrent.flatten(1).tolist())}) == reader.tree.num_states > 5
        assert file.metadata()["radixrt_cache_version"] == "2"
        assert json.loads(file.metadata()["identity"])["recurrent of states"] == "float32 [2, 4, 16, 8]"


def test_what_only_the_host_has_is_kept(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "kept"
    with runtime_of(folder) as roomy:
        warm = [roomy.generate(prompts(), GREEDY) for _ in range(3)][-1]
        right = contents(roomy)
    with runtime_of(folder, max_total_tokens=120, host_memory_gb=0.01) as tiered:
        keep(tiered, path)
        stats = tiered.cache_stats()
        assert stats.state_nodes > len(tiered.parts.cache.states.kept)
        on_device = {*contents(tiered)}
    with runtime_of(folder) as second:
        second.load_cache(path)
        assert second.cache_stats().state_nodes == stats.state_nodes
        found = contents(second)
        assert len(right.keys() & found.keys() - on_device) >= 2
        for tokens in right.keys() & found.keys():
            for part, expected in zip(found[tokens], right[tokens], strict=True):
                torch.testing.assert_close(part, expected, rtol=1e-4, atol=1e-5)
        again = second.generate(prompts(), GREEDY)
        assert answers(again) == answers(warm)
        assert cached(again)[:3] == [38, 38, 25]  # the others save too little for a state


def test_too_few_states_take_what_was_used_last(
    folder: Path, kept: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with runtime_of(folder) as runtime, CacheFileReader.open(kept) as reader:
        count, states = reader.tree.num_states, runtime.parts.cache.states
        taken = states.allocator.alloc(states.allocator.num_free - 3)
        with caplog.at_level(logging.WARNING, logger="radixrt"):
            runtime.load_cache(kept)
        assert f"3 of its states are loaded, {count - 3} are left out for lack of free states" in caplog.text
        nodes = [*states.kept.values()]
        assert len(nodes) == 3
        assert runtime.cache_stats().evictable == reader.tree.num_tokens
        latest = sorted(node.last_access for node in all_nodes(runtime))[-1]
        assert max(node.last_access for node in nodes) == latest
        states.allocator.free(taken)
        runtime.load_cache(kept)  # the rest
        assert len(contents(runtime)) == count


def all_nodes(runtime: Runtime) -> list[Node]:
    tree = runtime.parts.cache.tree
    stack, found = [*tree.roots.values()], list[Node]()
    while stack:
        node = stack.pop()
        stack += node.children.values()
        found += [node] if node.parent is not None else []
    return found


def test_half_a_node_takes_no_state(folder: Path, kept: Path) -> None:
    with runtime_of(folder, max_total_tokens=30) as small:
        small.load_cache(kept)
        assert small.cache_stats().free == 0
        with CacheFileReader.open(kept) as reader:
            ends = ends_of(reader)
        assert {*contents(small)} <= ends
        assert len(contents(small)) < len(ends)


def ends_of(reader: CacheFileReader) -> set[tuple[int, ...]]:
    """Where the nodes with states end."""
    paths: list[tuple[int, ...]] = []
    for parent, own in zip(reader.tree.parents, reader.tree.parts(reader.tree.tokens), strict=True):
        paths.append((() if parent < 0 else paths[parent]) + tuple(own.tolist()))
    return {path for path, has_state in zip(paths, reader.tree.has_state, strict=True) if has_state}


# -- refused ----------------------------------------------------------------------------------------------------


def refusal(kept: Path, folder: Path, **options: Any) -> str:
    """Why a Runtime refuses a file; nothing of it has changed."""
    with runtime_of(folder, **options) as runtime:
        runtime.generate([7] * 9, GREEDY)
        before = runtime.cache_stats()
        with pytest.raises(CacheFileError) as caught:
            runtime.load_cache(kept)
        assert runtime.cache_stats() == before
        states = runtime.parts.cache.states
        assert states is None or states.allocator.num_free == states.allocator.capacity - len(states.kept)
    return str(caught.value)


def test_other_layouts_are_refused(kept: Path, folder: Path, tmp_path: Path) -> None:
    with torch.device("cpu"):
        other = write(qwen3_5(linear_value_head_dim=16), tmp_path / "other")
        plain = write(llama(), tmp_path / "llama")
    message = refusal(kept, other)
    assert (
        "recurrent of states is float32 [2, 4, 16, 8] in the file, float32 [2, 4, 16, 16] in the model" in message
    )
    assert "conv of states is float32 [2, 96, 3] in the file, float32 [2, 128, 3] in the model" in message
    message = refusal(kept, folder, dtype="bfloat16")
    assert "conv of states is float32 [2, 96, 3] in the file, bfloat16 [2, 96, 3] in the model" in message
    assert "conv of states is float32 [2, 96, 3] in the file, not named in the model" in refusal(kept, plain)


@pytest.mark.parametrize(("impl", "on_host"), [("torch", False), ("torch", True), ("triton", False)])
def test_parts_of_ranks(impl: Impl, on_host: bool, device: torch.device) -> None:
    """Of four, in the last two layers of three. Two have each piece of the second and third kinds of channels."""
    on_gpu = device.type == "cuda"
    if impl == "triton" and not on_gpu:
        require_interpreter()
    memory: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "pin_memory": on_gpu}
    whole = torch.randn(5, 3, 16, 3, **memory)  # rows of 8, 4 and 4 channels
    first, second = [8, 9, 12, 13], [10, 11, 14, 15]
    of_model = Part("conv", 3, (16, 3), torch.float32, (8, 4, 4))
    cut = [[0, 1, *first], [2, 3, *first], [4, 5, *second], [6, 7, *second]]
    slots = np.array([3, 0, 1, 7, 2], np.int32)
    gathered = torch.full(whole.shape, torch.nan, **memory)
    for rank, channels in enumerate(cut):
        states, host = (torch.full((2, 8, 6, 3), torch.nan, device=at) for at in (device, "cpu"))
        own = Part("conv", 2, (6, 3), torch.float32, (2, 2, 2))
        part = RowPart(states.unsqueeze(1), host.unsqueeze(1), impl, of_model, own, Ranks(rank, 4), 1)
        assert part.row_shape == (3, 16, 3)
        part.scatter(whole, slots)
        for row, slot in enumerate(slots):
            if slot:
                assert torch.equal(states[:, slot].cpu(), whole[row][1:, channels])
        assert states[:, [0, 4, 5, 6]].isnan().all()
        if on_host:
            host[:, 4] = states[:, 1].cpu()
            states[:, 1] = torch.nan
        if rank % 2:  # the one before has them
            states[:, :, 2:], host[:, :, 2:] = 7, 7
        part.gather(np.array([3, 2, -4 if on_host else 1, 7], np.int32), gathered)
    if on_gpu:
        torch.cuda.synchronize()
    assert torch.equal(gathered[[0, 1, 2, 3], 1:], whole[[0, 4, 2, 3], 1:])
    assert gathered[:, 0].isnan().all()
    assert gathered[4].isnan().all()


def test_any_flipped_bit_is_found(folder: Path, tmp_path: Path) -> None:
    path, rng = tmp_path / "kept", random.Random(0)
    with runtime_of(folder) as runtime:
        runtime.generate(prompts()[0][:20], replace(GREEDY, max_new_tokens=1))
        runtime.save_cache(path)
        whole, before = path.read_bytes(), runtime.cache_stats()
        with CacheFileReader.open(path) as reader:
            counts = row_counts(reader.tree, reader.formats)
            rows = sum(count * reader.formats[name].row_bytes for name, count in counts.items())
        assert reader.tree.num_states == 1
        start = len(whole) - rows - 32 * (1 + 6 + 3)
        for place in [*range(start - 8, start), *(rng.randrange(start, len(whole)) for _ in range(40))]:
            altered = bytearray(whole)
            altered[place] ^= 1 << rng.randrange(8)
            path.write_bytes(altered)
            with pytest.raises(CacheFileError, match="has been altered"):
                runtime.load_cache(path)
            assert runtime.cache_stats() == before, place


@pytest.mark.parametrize("forge", [lambda has: has * 0, lambda has: has + 1])
def test_states_of_no_node(
    kept: Path, folder: Path, tmp_path: Path, forge: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file whose hashes are right has as many states as its nodes say."""
    path = tmp_path / "forged"
    with CacheFileReader.open(kept) as reader:
        tree = replace(reader.tree, has_state=forge(reader.tree.has_state))
        counts = row_counts(reader.tree, reader.formats)
        with monkeypatch.context() as patch:
            patch.setattr(cache_file, "row_counts", lambda tree, formats: counts)
            with CacheFileWriter.open(path, tree, reader.formats, reader.identity) as writer:
                for name, count in counts.items():
                    for piece in empty_pieces(count, reader.formats[name]):
                        writer.write(piece)
                writer.finish()
    message = refusal(path, folder)
    assert "its rows are not those of" in message or "a node has neither a state nor none" in message


def test_states_of_convolutions_alone(tmp_path: Path) -> None:
    """They have no bytes of the other part."""
    formats = {
        "kv": RowFormat("F16", (1, 2, 1, 4)),
        "conv": RowFormat("F16", (2, 3, 2)),
        "recurrent": RowFormat("F32", (2, 0, 4, 4)),
    }
    ints = [np.array(values, np.int32) for values in ([1, 2, 3], [3], [-1], [0], [5], [1])]
    tree = TreeSnapshot(*ints, (None,))
    with CacheFileWriter.open(tmp_path / "kept", tree, formats, {}) as writer:
        for name, count in row_counts(tree, formats).items():
            for piece in empty_pieces(count, formats[name]):
                writer.write(piece + 7)
        writer.finish()
    with CacheFileReader.open(tmp_path / "kept") as reader:
        assert reader.formats == formats
        for name, count in row_counts(reader.tree, reader.formats).items():
            for piece in empty_pieces(count, reader.formats[name]):
                reader.read(piece).result()
                assert (piece == 7).all()
                assert piece.nbytes == {"kv": 48, "conv": 24, "recurrent": 0}[name]


@pytest.mark.parametrize("nth", [2, 3])
def test_ctrl_c_while_states_are_loaded_changes_nothing(
    kept: Path, folder: Path, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After KV, and after one part of the states."""
    with runtime_of(folder) as runtime:
        before, copy, left = runtime.cache_stats(), parts.kv_copy, [nth]

        def interrupted(*arguments: Any, **options: Any) -> None:
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt
            copy(*arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(parts, "kv_copy", interrupted)
            with pytest.raises(KeyboardInterrupt):
                runtime.load_cache(kept)
        assert left == [0]
        assert runtime.cache_stats() == before
        states = runtime.parts.cache.states
        assert states.allocator.num_free == states.allocator.capacity
        assert runtime.load_cache(kept) > 0


def test_what_a_command_tells(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"model": folder, "device": str(torch.get_default_device()), "max_total_tokens": 300}
    with runtime_with_cache(argparse.Namespace(**options, save_cache=tmp_path / "kept")) as runtime:
        runtime.generate(prompts()[:2], GREEDY)
        count = runtime.cache_stats().state_nodes
    with runtime_with_cache(argparse.Namespace(**options, load_cache=tmp_path / "kept")) as runtime:
        assert runtime.cache_stats().state_nodes == count > 0
    told = capsys.readouterr().err
    assert told.count(f" cached tokens with {count} states ") == 2
