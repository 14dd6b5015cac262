"""Kept caches of Runtimes of several ranks: saved by some number of them, loaded by another."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from layers.ranks import ALONE, Ranks
from layers.stages import Stage
from radixrt.errors import CacheFileError, DeviceLostError
from radixrt.files import atomic_file
from radixrt.kept_cache import cache_file
from radixrt.kept_cache import identity as identity_of_kv
from radixrt.kept_cache.cache_file import RowFormat
from radixrt.kept_cache.identity import (
    cache_identity,
    rank_checksums,
    weight_fingerprint,
    weight_fingerprint_of_ranks,
)
from radixrt.models.decoder import Decoder
from radixrt.models.loader import load_model, whole_of
from radixrt.ranks import followers
from radixrt.ranks.kept_parts import KeptParts
from radixrt.runtime import Runtime
from tests.kept_cache.test_kept_cache import GREEDY, answers, cached, contents, prompts, runtime_of
from tests.models.test_parity import MODELS
from tests.models.test_ranks import DIVIDED, ON_FOUR, ON_TWO, QUANTISED
from tests.ranks.test_ranks import none_left, ranks_of_this_process
from tests.support.checkpoints import llama, write
from tests.support.ranks import on_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model with 2 heads of KV."""
    return write(llama(), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module", autouse=True)
def small_pieces() -> Iterator[None]:
    """More pieces of KV than there are buffers: a token has 256 bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_file, "PIECE_BYTES", 256 * 7)
        yield


def of_ranks(folder: Path, size: int, **options: Any) -> Runtime:
    return runtime_of(folder, tensor_parallel_size=size, threads=1, device="cpu", **options)


def of_stages(folder: Path, count: int, size: int = 1, **options: Any) -> Runtime:
    return of_ranks(folder, size, pipeline_parallel_size=count, **options)


@pytest.fixture(scope="module")
def kept(folder: Path, small_pieces: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one rank has kept."""
    path = tmp_path_factory.mktemp("kept") / "cache"
    with of_ranks(folder, 1) as alone:
        alone.generate(prompts(), GREEDY)
        assert alone.save_cache(path) > 0
    return path


@pytest.mark.parametrize(
    ("size", "stages"),
    [
        pytest.param(2, 1, marks=pytest.mark.long),
        (1, 2),
        pytest.param(4, 1, marks=pytest.mark.long),
        pytest.param(2, 2, marks=pytest.mark.long),
    ],
)
def test_any_number_of_ranks_loads_what_any_has_saved(
    size: int, stages: int, folder: Path, kept: Path, tmp_path: Path
) -> None:
    """Also what is on the host. Four ranks have each head twice. Nothing is left of the buffers."""
    path, again, damaged = (tmp_path / name for name in ("cache", "again", "damaged"))
    whole = bytearray(kept.read_bytes())
    whole[len(whole) // 2] ^= 1
    damaged.write_bytes(whole)
    with of_ranks(folder, 1) as alone:
        saved = alone.load_cache(kept)
        expected = {seed: alone.generate(prompts(seed), GREEDY) for seed in (0, 3, 4, 5)}
        computed, identity = contents(alone), alone.identity()
    with none_left(), of_stages(folder, stages, size, host_memory_gb=0.0001, max_total_tokens=250) as ranks:
        assert ranks.identity() == identity
        before = ranks.cache_stats()
        with pytest.raises(CacheFileError, match="altered"):
            ranks.load_cache(damaged)
        assert ranks.cache_stats() == before
        assert ranks.load_cache(kept) == saved
        ranks.save_cache(again)
        for seed, right in expected.items():
            found = ranks.generate(prompts(seed), GREEDY)
            assert answers(found) == answers(right)
            assert cached(found) == cached(right)
        assert ranks.cache_stats().host_tokens > 0
        count = ranks.save_cache(path)
        assert count > ranks.cache_stats().capacity
        ranks.flush_cache()
        assert ranks.load_cache(path) == ranks.cache_stats().capacity
        warm = ranks.generate(prompts(5), GREEDY)
        assert answers(warm) == answers(expected[5])
        assert cached(warm) == [len(prompt) - 1 for prompt in prompts(5)]
        file = ranks.parts.model.storage.others._file  # type: ignore[attr-defined]
        assert os.fstat(file).st_size > 0 == os.fstat(file).st_blocks
    with of_ranks(folder, 1) as alone:
        alone.load_cache(kept)
        first = contents(alone)
        alone.flush_cache()
        alone.load_cache(again)
        second = contents(alone)
        assert first.keys() == second.keys()
        assert all(torch.equal(kv, second[name][1]) for name, (_, kv) in first.items())
        alone.flush_cache()
        assert alone.load_cache(path) == count
        loaded = contents(alone)
        assert answers(alone.generate(prompts(5), GREEDY)) == answers(expected[5])
    for (_, tokens), (length, kv) in loaded.items():
        (right,) = (own for (_, path), (_, own) in computed.items() if path[:length] == tokens)
        torch.testing.assert_close(kv, right[:, :, :length], rtol=1e-4, atol=1e-5)


def test_what_ends_a_save_leaves_the_old_cache(
    folder: Path, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, or a Ctrl-C: the ranks go on. One of them that is killed: none does."""
    path = tmp_path / "cache"
    path.write_bytes(kept.read_bytes())
    write, asked = os.write, [0]

    def fails_after(count: int, what: Callable[[], Any]) -> Callable[..., int]:
        left = [count]

        def counted(fd: int, data: Any) -> int:
            left[0] -= 1
            if not left[0]:
                what()
            return write(fd, data)

        return counted

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def interrupted() -> None:
        signal.raise_signal(signal.SIGINT)

    with none_left(), of_ranks(folder, 2) as both:
        (rank,) = ranks_of_this_process()
        expected = both.generate(prompts(2), GREEDY)
        for what, error in ((full, CacheFileError), (interrupted, KeyboardInterrupt)):
            with monkeypatch.context() as patch:
                patch.setattr(atomic_file.os, "write", fails_after(12, what))
                with pytest.raises(error):
                    both.save_cache(path)
            assert path.read_bytes() == kept.read_bytes()
            assert os.listdir(tmp_path) == ["cache"]
            again = both.generate(prompts(2), GREEDY)
            assert answers(again) == answers(expected)
        gather = KeptParts.gather

        def killed(self: KeptParts, buffer: int, slots: Any) -> None:
            asked[0] += 1
            if asked[0] == 6:
                os.kill(rank.pid, signal.SIGKILL)
            gather(self, buffer, slots)

        monkeypatch.setattr(KeptParts, "gather", killed)
        with pytest.raises(DeviceLostError, match="rank 1 of 2"):
            both.save_cache(path)
        with pytest.raises(DeviceLostError):
            both.generate(prompts(), GREEDY)
    assert asked[0] >= 6
    assert path.read_bytes() == kept.read_bytes()
    assert os.listdir(tmp_path) == ["cache"]


@pytest.mark.long
def test_a_rank_that_hangs_while_it_saves(
    folder: Path, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen by its silence."""
    monkeypatch.setattr(followers, "SILENCE_SECONDS", 5.0)
    path = tmp_path / "cache"
    path.write_bytes(kept.read_bytes())
    with none_left(), of_ranks(folder, 2) as both:
        both.generate(prompts(2), GREEDY)
        (rank,) = ranks_of_this_process()
        os.kill(rank.pid, signal.SIGSTOP)
        with pytest.raises(DeviceLostError, match="hangs"):
            both.save_cache(path)
    assert path.read_bytes() == kept.read_bytes()
    assert os.listdir(tmp_path) == ["cache"]


# -- the identity ------------------------------------------------------------------------------------------------


def fingerprint(folder: Path, size: int, flaw: int = 0, *, num_stages: int = 1) -> str:
    """Of ranks that hold each stage of a model together; `flaw` is added to a checksum of the last one."""

    def of_rank(stage: Stage, ranks: Ranks) -> tuple[Decoder, dict[str, int]]:
        model, config = load_model(folder, ranks=ranks, stage=stage)
        whole = whole_of(model, config)
        return whole, rank_checksums(model, whole)

    stages = [Stage(index, num_stages) for index in reversed(range(num_stages))]
    found = [each for stage in stages for each in on_ranks(size, partial(of_rank, stage))]
    checksums = [own for _, own in found]
    name = next(iter(checksums[-1]))
    checksums[-1][name] += flaw
    return weight_fingerprint_of_ranks(found[-1][0], checksums)


FAMILIES = [*((name, 2) for name in ON_TWO), *((name, 4) for name in ON_FOUR)]
KEPT = [("phi3", 2), ("gpt-oss in MXFP4", 2), ("olmo2", 4), ("llama, heads wider than hidden", 4), ("gemma2", 4)]


@pytest.mark.long_unless(kept=lambda given: (given["name"], given["size"]) in KEPT)
@pytest.mark.parametrize(("name", "size"), FAMILIES)
def test_fingerprint(name: str, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is that of one rank, for every family; also in small pieces."""
    make: Any = MODELS[name]
    folder = write(make(vocab_size=DIVIDED) if size == 4 else make(), tmp_path)
    expected = weight_fingerprint(load_model(folder)[0])
    assert fingerprint(folder, size) == expected
    monkeypatch.setattr(identity_of_kv, "_PIECE", 100)
    assert fingerprint(folder, size) == expected
    assert fingerprint(folder, size, 1) != expected


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("is_tied", [False, True])
def test_fingerprint_of_stages(size: int, is_tied: bool, tmp_path: Path) -> None:
    """Layers have the numbers of the whole model; what two stages have counts once."""
    folder = write(llama(num_hidden_layers=3, tie_word_embeddings=is_tied), tmp_path)
    expected = weight_fingerprint(load_model(folder)[0])
    assert fingerprint(folder, size, num_stages=2) == fingerprint(folder, size, num_stages=3) == expected
    assert fingerprint(folder, size, 1, num_stages=2) != expected


def test_fingerprint_of_what_is_not_held_as_it_is_stored(tmp_path: Path) -> None:
    """It says of how many ranks it is, whose caches others refuse by name."""
    QUANTISED["fp8 blocks"](tmp_path)
    found = fingerprint(tmp_path, 2)
    assert found == fingerprint(tmp_path, 2) != fingerprint(tmp_path, 2, 1)
    assert found.startswith("of 2 ranks: ")
    assert fingerprint(tmp_path, 1, num_stages=2).startswith("of 2 ranks: ")


@pytest.mark.parametrize(("size", "stages"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.long)])
def test_kv_in_8_bits(size: int, stages: int, folder: Path, tmp_path: Path) -> None:
    """The scales of all heads are part of the identity."""
    paths = tmp_path / "one", tmp_path / "two"
    with of_ranks(folder, 1, kv_dtype="fp8") as alone, of_stages(folder, stages, size, kv_dtype="fp8") as both:
        assert both.identity() == alone.identity()
        assert "scales of KV" in alone.identity()
        expected = alone.generate(prompts(), GREEDY)
        count = alone.save_cache(paths[0])
        assert both.load_cache(paths[0]) == count > 0
        assert cached(both.generate(prompts(), GREEDY)) == [len(prompt) - 1 for prompt in prompts()]
        both.save_cache(paths[1])
        alone.flush_cache()
        assert alone.load_cache(paths[1]) >= count
        assert answers(alone.generate(prompts(), GREEDY)) == answers(expected)


def test_same_bits_are_those_of_a_number_of_ranks(folder: Path) -> None:
    """A deterministic Runtime takes no other one's cache."""

    def bits(ranks: Ranks) -> str:
        model, config = load_model(folder, deterministic=True, ranks=ranks)
        kv = RowFormat("F32", (2, 2, 2, 8))
        return str(cache_identity(config, "", model.placement, {"kv": kv}, None)["same bits"])

    alone = bits(ALONE)
    assert on_ranks(2, bits) == [f"{alone}, 2 ranks"] * 2
