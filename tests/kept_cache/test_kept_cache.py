"""A cache kept across runs: what a second Runtime finds, which files are refused, what killing leaves behind."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from layers.formats.mxfp4 import Mxfp4Format
from layers.weight import Stack
from radixrt import CacheFileError, ParameterError, RadixrtError, RequestOutput, Runtime, SamplingParams
from radixrt.cache.radix_tree import DEVICE, Namespace
from radixrt.cache.snapshot import TreeSnapshot
from radixrt.files import atomic_file
from radixrt.kept_cache import cache_file, parts
from radixrt.kept_cache import storage as cache_storage
from radixrt.kept_cache.cache_file import CacheFileReader, CacheFileWriter, RowFormat, differences, row_counts
from radixrt.kept_cache.identity import weight_fingerprint
from radixrt.kept_cache.storage import NUM_BUFFERS
from radixrt.models.config import ModelConfig
from radixrt.models.loader import load_model
from tests.support.checkpoints import (
    DYNAMIC_ROPE,
    LLAMA3_ROPE,
    VOCAB_SIZE,
    exaone4,
    glm4_moe,
    gpt_oss_in_mxfp4,
    granite4,
    llama,
    ministral3,
    nemotron_h_moe,
    qwen3_moe,
    write,
)
from tests.support.small_tokenizers import byte_level

pytestmark = pytest.mark.usefixtures("device")

GREEDY = SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True)
HOME = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> Path:
    with torch.device("cpu"):
        return write(llama(), tmp_path_factory.mktemp("llama"))


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """More pieces of KV than there are buffers: a token of the small model has 256 bytes in float32."""
    monkeypatch.setattr(cache_file, "PIECE_BYTES", 256 * 7)


def runtime_of(folder: Path, **options: Any) -> Runtime:
    """Slots that nobody has filled hold NaN."""
    defaults = {"device": torch.get_default_device(), "max_total_tokens": 600, "dtype": "float32"}
    runtime = Runtime(folder, **{**defaults, **options})
    runtime.parts.model.kv_pool.fill(float("nan"))
    return runtime


def prompts(seed: int = 0) -> list[list[int]]:
    """Some share their beginnings, at several depths."""
    rng = np.random.default_rng(seed)

    def ids(n: int) -> list[int]:
        return [int(i) for i in rng.integers(3, VOCAB_SIZE, n)]

    head, left = ids(25), ids(13)
    return [head + left + ids(5), head + left + ids(9), head + ids(11), ids(31), head]


def answers(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


def cached(outputs: list[RequestOutput]) -> list[int]:
    return [output.usage.cached_tokens for output in outputs]


@pytest.fixture
def kept(folder: Path, tmp_path: Path) -> Path:
    """What a Runtime of the folder has kept."""
    path = tmp_path / "kept.safetensors"
    with runtime_of(folder) as runtime:
        runtime.generate(prompts(), GREEDY)
        assert runtime.save_cache(path) == runtime.cache_stats().evictable > 0
    return path


def contents(runtime: Runtime) -> dict[tuple[str | None, tuple[int, ...]], tuple[int, Tensor]]:
    """By tenant and path of each node that something ends at: its slots' KV on the CPU, bit by bit."""
    found = {}
    for namespace, root in runtime.parts.cache.tree.roots.items():
        stack = [root]
        while stack:
            node = stack.pop()
            stack += node.children.values()
            if not node.children:
                path = list(runtime.parts.cache.tree.path(node))[::-1]
                tokens = np.concatenate([step.tokens for step in path])
                slots = torch.from_numpy(runtime.parts.cache.tree.slots_of(node)).to(runtime.device)
                kv = runtime.parts.model.kv_pool.memory["kv"].index_select(2, slots).cpu()
                found[namespace.tenant, tuple(tokens.tolist())] = (len(tokens), kv)
    return found


# -- round trips -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.usefixtures("small_pieces")
def test_a_second_run_begins_with_the_cache_of_the_first(folder: Path, tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "kept.safetensors"
    with runtime_of(folder, dtype=dtype) as first:
        cold = first.generate(prompts(), GREEDY)
        warm = first.generate(prompts(), GREEDY)
        cold_hits = cached(first.generate(prompts(7), GREEDY, tenant="a"))
        saved, before = first.save_cache(path), contents(first)
        assert saved > 2 * NUM_BUFFERS * first.parts.model.storage.formats["kv"].piece_rows
    with runtime_of(folder, dtype=dtype) as second:
        assert second.load_cache(path) == saved == second.cache_stats().evictable
        after = contents(second)
        assert after.keys() == before.keys()
        bits = torch.int32 if dtype == "float32" else torch.int16
        for name, (_, kv) in after.items():
            assert torch.equal(kv.view(bits), before[name][1].view(bits))
        again = second.generate(prompts(), GREEDY)
        assert answers(again) == answers(warm)
        if dtype == "float32":
            assert answers(again) == answers(cold)
        assert cached(again) == cached(warm) == [len(prompt) - 1 for prompt in prompts()]
        assert cached(second.generate(prompts(7), GREEDY, tenant="b")) == cold_hits
        assert cached(second.generate(prompts(7), GREEDY, tenant="a")) == [len(p) - 1 for p in prompts(7)]
        # What both have is saved once more, and its leaves can be evicted.
        assert second.save_cache(path) > saved
        second.flush_cache()
        assert second.cache_stats().free == second.cache_stats().capacity


def test_other_libraries_read_the_file(kept: Path, folder: Path) -> None:
    with safe_open(kept, framework="pt", device="cpu") as file, CacheFileReader.open(kept) as reader:
        assert set(file.keys()) == {
            *("node_last_used", "node_lengths", "node_parents", "node_tenants", "tokens", "kv"),
            *("piece_sha256", "sha256"),
        }
        kv, tokens = file.get_tensor("kv"), file.get_tensor("tokens")
        assert kv.shape == (len(tokens), 2, 2, 2, 8)
        assert kv.isfinite().all()
        assert tokens.tolist() == reader.tree.tokens.tolist()
        assert file.metadata()["radixrt_cache_version"] == "1"
        assert json.loads(file.metadata()["identity"])["rope theta"] == 10000.0


def test_an_empty_cache(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "kept.safetensors"
    with runtime_of(folder) as runtime:
        assert runtime.save_cache(path) == 0
        assert runtime.load_cache(path) == 0
        assert not runtime.parts.cache.tree.roots
        assert runtime.cache_stats().free == runtime.cache_stats().capacity


def test_a_cache_of_experts(tmp_path: Path) -> None:
    """A set among the config's fields is in the file, too."""
    with torch.device("cpu"):
        folder = write(qwen3_moe(), tmp_path / "experts")
    path = tmp_path / "kept.safetensors"
    with runtime_of(folder) as runtime:
        runtime.generate(prompts(), GREEDY)
        saved = runtime.save_cache(path)
        runtime.flush_cache()
        assert runtime.load_cache(path) == saved > 0
        assert runtime.identity()["dense layers"] == sorted(runtime.config.dense_layers)


@pytest.mark.parametrize(
    "model", [glm4_moe, ministral3, granite4, exaone4, nemotron_h_moe], ids=lambda model: model.__name__
)
def test_the_numbers_of_a_family_are_part_of_the_identity(model: Callable[[], Any], tmp_path: Path) -> None:
    with torch.device("cpu"):
        folder = write(model(), tmp_path)
    with runtime_of(folder) as runtime:
        identity, config = runtime.identity(), runtime.config
    own = {field.name for field in fields(config)} - {field.name for field in fields(ModelConfig)}
    for name in own:
        assert identity[name.replace("_", " ")] == json.loads(json.dumps(getattr(config, name)))


def test_loading_twice_changes_nothing(kept: Path, folder: Path) -> None:
    with runtime_of(folder) as runtime:
        count = runtime.load_cache(kept)
        stats = runtime.cache_stats()
        assert runtime.load_cache(kept) == 0
        assert runtime.cache_stats() == stats
        assert stats.evictable == count


def test_what_is_there_already_stays(kept: Path, folder: Path) -> None:
    """Also where a kept node ends inside an edge, and an edge inside a kept node."""
    given = prompts()
    with runtime_of(folder) as runtime:
        cold = runtime.generate([given[0][:30], given[3][:10], [5, 5, 5]], GREEDY)
        slots = {
            node: node.slots[DEVICE].copy()
            for node in runtime.parts.cache.tree.roots[Namespace()].children.values()
        }
        held = runtime.cache_stats().evictable
        with CacheFileReader.open(kept) as reader:
            known = reader.tree.num_tokens - runtime.load_cache(kept)
        # The first two begin as kept prompts do; the continuations of cut prompts go their own way.
        assert known >= 40
        assert runtime.cache_stats().evictable == held + reader.tree.num_tokens - known
        for node, before in slots.items():
            path = runtime.parts.cache.tree.slots_of(node)
            assert (
                path[: len(before)].tolist() == before.tolist() or path[-len(before) :].tolist() == before.tolist()
            )
        outputs = runtime.generate(given, GREEDY)
        assert cached(outputs) == [len(prompt) - 1 for prompt in given]
        assert answers(runtime.generate([given[0][:30], given[3][:10], [5, 5, 5]], GREEDY)) == answers(cold)
    with runtime_of(folder, force_miss=True) as runtime:
        assert answers(runtime.generate(given, GREEDY)) == answers(outputs)


def test_too_few_slots_take_what_was_used_last(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "kept.safetensors"
    old, new = prompts(1)[3], prompts(2)[0]
    with runtime_of(folder) as runtime:
        for prompt in (new, old, new):
            runtime.generate(prompt, GREEDY)
        saved = runtime.save_cache(path)
    room = len(new) + 5 + 10  # all of the new one, and a beginning of the old one
    with runtime_of(folder, max_total_tokens=room) as runtime, caplog.at_level(logging.WARNING, "radixrt"):
        assert runtime.load_cache(path) == room
        assert f"{room} of its tokens are loaded, {saved - room} are left out" in caplog.text
        assert runtime.cache_stats().free == 0
        tree = runtime.parts.cache.tree
        assert tree.match(Namespace(), np.array(new, np.int32)).length == len(new)
        assert tree.match(Namespace(), np.array(old, np.int32)).length == 10
        # And the old one is the first to go.
        runtime.parts.cache.evict(10)
        assert tree.match(Namespace(), np.array(old, np.int32)).length == 0
        assert tree.match(Namespace(), np.array(new, np.int32)).length == len(new)


def test_what_this_run_has_used_is_evicted_last(kept: Path, folder: Path) -> None:
    with runtime_of(folder) as runtime:
        runtime.generate([9] * 20, GREEDY)
        own = runtime.cache_stats().evictable
        loaded = runtime.load_cache(kept)
        runtime.parts.cache.evict(loaded)
        assert runtime.cache_stats().evictable == own
        assert runtime.parts.cache.tree.match(Namespace(), np.full(20, 9, np.int32)).length == 20


def test_a_running_request_ends_first(kept: Path, folder: Path) -> None:
    with runtime_of(folder) as runtime:
        request = runtime.prepare(prompts(5)[0], GREEDY)
        runtime.submit(request)
        runtime.step()
        assert runtime.load_cache(kept) > 0
        assert not runtime.abort(request)  # it has ended
        assert runtime.step()[0].usage.completion_tokens == 6


def test_a_disabled_cache_keeps_nothing(kept: Path, folder: Path) -> None:
    with runtime_of(folder, enable_prefix_cache=False) as runtime:
        for keep in (runtime.save_cache, runtime.load_cache):
            with pytest.raises(
                ParameterError, match=r"_cache needs a prefix cache, but enable_prefix_cache is False"
            ):
                keep(kept)


# -- refused: what the KV depends on -----------------------------------------------------------------------------


def refusal(kept: Path, folder: Path, **options: Any) -> str:
    """Why a Runtime refuses a file; nothing of it has changed."""
    with runtime_of(folder, **options) as runtime:
        runtime.generate([7] * 9, GREEDY)
        before = runtime.cache_stats()
        with pytest.raises(CacheFileError) as caught:
            runtime.load_cache(kept)
        assert runtime.cache_stats() == before
        assert contents(runtime).keys() == {(None, path) for _, path in contents(runtime)}
    return str(caught.value)


def changed(folder: Path, change: Callable[[Any], None] = lambda model: None, **config: Any) -> Path:
    """The folder's model, a little different."""
    with torch.device("cpu"):
        model = llama(**config)
    change(model)
    return write(model, folder)


def one_ulp(model: Any) -> None:
    weight = model.model.layers[1].mlp.down_proj.weight.data
    weight.view(torch.int32)[3, 5] += 1


def exchange(model: Any) -> None:
    weight = model.model.layers[0].self_attn.k_proj.weight.data
    weight[[0, 1]] = weight[[1, 0]]


@pytest.mark.parametrize("change", [one_ulp, exchange])
def test_other_weights_are_refused(kept: Path, tmp_path: Path, change: Callable[[Any], None]) -> None:
    message = refusal(kept, changed(tmp_path / "other", change))
    assert "is of another model: weights is " in message
    assert ";" not in message


def test_what_differs_is_named(kept: Path, tmp_path: Path, folder: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    message = refusal(kept, changed(tmp_path / "rope", rope_parameters=rope))
    assert "rope theta is 10000.0 in the file, 500000.0 in the model; rope frequencies is " in message
    assert "weights" not in message
    message = refusal(kept, changed(tmp_path / "scaled", rope_parameters=LLAMA3_ROPE))
    assert "rope scaling is None in the file, {'kind': 'Llama3Scaling', " in message
    message = refusal(kept, folder, dtype="bfloat16")
    assert "dtype is float32 in the file, bfloat16 in the model" in message
    assert "dtype of KV is F32 in the file, BF16 in the model" in message
    message = refusal(kept, changed(tmp_path / "eps", rms_norm_eps=1e-4))
    assert "rms norm eps is 1e-06 in the file, 0.0001 in the model" in message
    message = refusal(kept, changed(tmp_path / "layers", num_hidden_layers=3))
    assert "num layers is 2 in the file, 3 in the model" in message


def test_text_that_is_encoded_otherwise_is_another(folder: Path, tmp_path: Path) -> None:
    """A file of what another tokenizer made of texts would be loaded, and none of it ever found."""
    one, other, path = tmp_path / "one", tmp_path / "other", tmp_path / "kept"
    for each, config in ((one, {}), (other, {"bos_token": "<s>", "add_bos_token": True})):
        shutil.copytree(folder, each)
        (each / "tokenizer.json").write_text(byte_level().backend_tokenizer.to_str())
        (each / "tokenizer_config.json").write_text(json.dumps(config))
    with runtime_of(one) as runtime:
        runtime.generate([7] * 9, GREEDY)
        runtime.save_cache(path)
    assert re.search(r"another model: tokenizer is \w+.* in the file, \w+.* in the model$", refusal(path, other))
    assert "tokenizer is None in the file" not in refusal(path, other)
    assert re.search(r"tokenizer is \w+.* in the file, None in the model$", refusal(path, folder))
    with runtime_of(one) as runtime:
        assert runtime.load_cache(path) > 0


def test_the_context_length_matters_where_the_rope_depends_on_it(tmp_path: Path) -> None:
    folder, path = changed(tmp_path / "dynamic", rope_parameters=DYNAMIC_ROPE), tmp_path / "kept.safetensors"
    with runtime_of(folder, context_length=512) as runtime:
        runtime.generate(prompts(), GREEDY)
        runtime.save_cache(path)
    message = refusal(path, folder, context_length=700)
    assert "rope frequencies" in message
    assert "rope theta" not in message
    plain = changed(tmp_path / "plain")
    with runtime_of(plain, context_length=128) as runtime:
        runtime.generate(prompts(), GREEDY)
        saved = runtime.save_cache(path)
    with runtime_of(plain, context_length=200) as runtime:
        assert runtime.load_cache(path) == saved


def test_new_weights_have_caches_of_their_own(folder: Path, tmp_path: Path) -> None:
    other, old, new = changed(tmp_path / "other", one_ulp), tmp_path / "old", tmp_path / "new"
    with runtime_of(folder) as runtime:
        runtime.generate(prompts(), GREEDY)
        runtime.save_cache(old)
        runtime.update_weights(other)
        assert runtime.save_cache(new) == 0
        with pytest.raises(CacheFileError, match="weights is "):
            runtime.load_cache(old)
        outputs = runtime.generate(prompts(), GREEDY)
        saved = runtime.save_cache(new)
    with runtime_of(other) as runtime:  # a first version there, a second one here
        assert runtime.load_cache(new) == saved
        assert answers(runtime.generate(prompts(), GREEDY)) == answers(outputs)
        assert runtime.cache_stats().cached_tokens == sum(len(prompt) - 1 for prompt in prompts())


def test_another_format_is_refused(kept: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(cache_file._VERSIONS, "1")
    assert "it is of format '1', and this radixrt reads '2'" in refusal(kept, folder)


def test_differences() -> None:
    assert differences({"a": 1, "b": [1, 2]}, {"a": 1, "b": [1, 2]}) == []
    assert differences({"a": 1, "c": "x" * 99}, {"a": 2, "b": None}) == [
        "a is 1 in the file, 2 in the model",
        "b is not named in the file, None in the model",
        f"c is {'x' * 57}... in the file, not named in the model",
    ]


def test_fingerprint(folder: Path, tmp_path: Path, device: torch.device) -> None:
    def of(source: Path, where: torch.device | str = device, **options: Any) -> str:
        with torch.device("cpu"):
            return weight_fingerprint(load_model(source, device=where, **{"dtype": "float32", **options})[0])

    first = of(folder)
    assert of(folder, "cpu") == first
    assert of(folder, dtype="bfloat16") == of(folder, "cpu", dtype="bfloat16")
    others = {of(folder, dtype="bfloat16"), of(folder, dtype="float16")}
    others |= {of(changed(tmp_path / str(i), change)) for i, change in enumerate((one_ulp, exchange))}
    assert len(others | {first}) == 5


def test_fingerprint_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(33, 7)
    whole = weight_fingerprint(model)
    monkeypatch.setattr("radixrt.kept_cache.identity._PIECE", 10)
    assert weight_fingerprint(model) == whole


@pytest.mark.parametrize("hidden", [64, 96])
def test_fingerprint_of_words(hidden: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU may hold MXFP4 in words: that is no other model."""
    write(gpt_oss_in_mxfp4(hidden_size=hidden), tmp_path)
    model, _ = load_model(tmp_path, dtype="bfloat16")
    stored = weight_fingerprint(model)
    found = [one for one in model.modules() if isinstance(one, Stack) and one.held == Mxfp4Format()]
    assert found
    for module in found:
        words, module.held = module.value.as_words(), Mxfp4Format(in_words=True)
        module.blocks, module.scales = (
            torch.nn.Parameter(part, requires_grad=False) for part in (words.blocks, words.scales)
        )
    monkeypatch.setattr("radixrt.kept_cache.identity._PIECE", 1000)
    assert weight_fingerprint(model) == stored
    found[-1].blocks[-1, 0, 0, 0] ^= 1
    assert weight_fingerprint(model) != stored


# -- refused: truncated and altered ------------------------------------------------------------------------------


@pytest.fixture
def small_file(folder: Path, tmp_path: Path, small_pieces: None) -> Path:
    """Of one prompt of 20 tokens, in three pieces of KV."""
    path = tmp_path / "small.safetensors"
    with runtime_of(folder) as runtime:
        runtime.generate(prompts()[0][:20], replace(GREEDY, max_new_tokens=1))
        runtime.save_cache(path)
    return path


def test_any_flipped_bit_is_found(small_file: Path, folder: Path) -> None:
    whole = small_file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    rng = random.Random(0)
    arrays = header + 8 + 3 * 4 + 20 * 4  # of one node with 20 tokens
    # All of the first bytes and of the arrays; of header, KV and hashes each some.
    places = [*range(12), *range(header, arrays), *rng.sample(range(header), 60)]
    places += [*rng.sample(range(arrays, len(whole)), 120), len(whole) - 1]
    with runtime_of(folder) as runtime:
        before = runtime.cache_stats()
        for place in places:
            altered = bytearray(whole)
            altered[place] ^= 1 << rng.randrange(8)
            small_file.write_bytes(altered)
            with pytest.raises(CacheFileError, match=f"the cache file {small_file} "):
                runtime.load_cache(small_file)
            assert runtime.cache_stats() == before, place
        small_file.write_bytes(whole)
        assert runtime.load_cache(small_file) == 20


def test_any_truncation_is_found(small_file: Path, folder: Path) -> None:
    whole = small_file.read_bytes()
    lengths = [*range(12), *random.Random(1).sample(range(len(whole)), 60), len(whole) - 1]
    with runtime_of(folder) as runtime:
        before = runtime.cache_stats()
        for length in lengths:
            small_file.write_bytes(whole[:length])
            with pytest.raises(CacheFileError, match="cut short"):
                runtime.load_cache(small_file)
        for more in (b"\0", whole):
            small_file.write_bytes(whole + more)
            with pytest.raises(CacheFileError, match="something follows its end"):
                runtime.load_cache(small_file)
        assert runtime.cache_stats() == before


def test_pieces_of_two_files_do_not_mix(small_file: Path, folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.safetensors"
    with runtime_of(folder) as runtime:
        runtime.generate([*prompts()[0][:19], 50], replace(GREEDY, max_new_tokens=1))
        runtime.save_cache(other)
    one, two = small_file.read_bytes(), other.read_bytes()
    assert len(one) == len(two)
    small_file.write_bytes(one[: len(one) // 2] + two[len(one) // 2 :])
    assert "has been altered" in refusal(small_file, folder)


def empty_pieces(num_rows: int, rows: RowFormat) -> Iterator[NDArray[np.uint8]]:
    """Room for each piece of so many rows."""
    for start in range(0, num_rows, rows.piece_rows):
        yield np.zeros(min(rows.piece_rows, num_rows - start) * rows.row_bytes, np.uint8)


def forged(path: Path, tree: TreeSnapshot, kept: Path) -> None:
    """A file whose hashes are right, of a tree that may be none."""
    with (
        CacheFileReader.open(kept) as reader,
        CacheFileWriter.open(path, tree, reader.formats, reader.identity) as writer,
    ):
        for name, count in row_counts(tree, reader.formats).items():
            for piece in empty_pieces(count, reader.formats[name]):
                writer.write(piece)
        writer.finish()


FORGERIES: dict[str, tuple[dict[str, Any], str]] = {
    "lengths": ({"lengths": [3, 2, 3]}, "lengths do not add up to 7 tokens"),
    "an empty node": ({"lengths": [5, 2, 0]}, "lengths do not add up"),
    "a negative length": ({"lengths": [8, -3, 2]}, "lengths do not add up"),
    "a child first": ({"parents": [1, -1, 0]}, "a node stands before its parent"),
    "its own parent": ({"parents": [-1, 1, 0]}, "a node stands before its parent"),
    "no such parent": ({"parents": [-1, 0, -2]}, "a node stands before its parent"),
    "no such tenant": ({"tenants": [0, 0, 2]}, "a node's tenant is none of 2"),
    "a tenant's child of another": ({"tenants": [0, 0, 1]}, "a node's tenant is not its parent's"),
    "a tenant twice": ({"tenant_names": ("a", "a")}, "a tenant is named twice"),
    "siblings": ({"tokens": [1, 2, 3, 4, 5, 4, 6]}, "two nodes go on from one place with the same token"),
    "a token too large": ({"tokens": [1, 2, 3, 4, 5, 6, VOCAB_SIZE]}, f"a token is not in 0 .. {VOCAB_SIZE - 1}"),
    "a negative token": ({"tokens": [1, 2, 3, 4, 5, 6, -1]}, "a token is not in 0 .. "),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_no_tree(kept: Path, folder: Path, tmp_path: Path, name: str) -> None:
    sound: dict[str, Any] = {
        "tokens": [1, 2, 3, 4, 5, 6, 7],
        "lengths": [3, 2, 2],
        "parents": [-1, 0, 0],
        "tenants": [0, 0, 0],
        "last_used": [3, 2, 9],
        "has_state": [0, 0, 0],
        "tenant_names": (None, "a"),
    }

    def tree(fields: dict[str, Any]) -> TreeSnapshot:
        dtypes = {"last_used": np.int64}
        return TreeSnapshot(
            **{
                key: value if key == "tenant_names" else np.array(value, dtypes.get(key, np.int32))
                for key, value in fields.items()
            }
        )

    path = tmp_path / "forged.safetensors"
    changes, message = FORGERIES[name]
    forged(path, tree(sound | changes), kept)
    assert message in refusal(path, folder)
    forged(path, tree(sound), kept)
    with runtime_of(folder) as runtime:
        assert runtime.load_cache(path) == 7


def test_files_of_another_kind(folder: Path, tmp_path: Path) -> None:
    assert "it is no cache file of radixrt" in refusal(folder / "model.safetensors", folder)
    with runtime_of(folder) as runtime:
        with pytest.raises(CacheFileError, match=r"none\.safetensors cannot be used: No such file or directory"):
            runtime.load_cache(tmp_path / "none.safetensors")
        with pytest.raises(CacheFileError, match="cannot be used: Is a directory"):
            runtime.load_cache(tmp_path)
    for text in (b"", b"\x02" + bytes(7) + b"[]", b"\x02" + bytes(7) + b"{}", b"\xff" * 100, b"[" * 100_000):
        (tmp_path / "x").write_bytes(text)
        with (
            pytest.raises(CacheFileError, match="cannot be used: it is no "),
            CacheFileReader.open(tmp_path / "x"),
        ):
            pass
    deep = b"[" * 100_000
    (tmp_path / "x").write_bytes(len(deep).to_bytes(8, "little") + deep)
    with (
        pytest.raises(CacheFileError, match="no cache file of radixrt"),
        CacheFileReader.open(tmp_path / "x"),
    ):
        pass


def test_ctrl_c_while_loading_changes_nothing(
    kept: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, small_pieces: None
) -> None:
    with runtime_of(folder) as runtime:
        runtime.generate(prompts()[3], GREEDY)
        path = kept.with_name("again")
        runtime.save_cache(path)
        runtime.flush_cache()
        before, copy, left = runtime.cache_stats(), parts.kv_copy, [2]

        def interrupted(*arguments: Any, **options: Any) -> None:
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt
            copy(*arguments, **options)

        monkeypatch.setattr(parts, "kv_copy", interrupted)
        with pytest.raises(KeyboardInterrupt):
            runtime.load_cache(path)
        assert runtime.cache_stats() == before
        monkeypatch.undo()
        assert runtime.generate(prompts()[3], GREEDY).finish_reason == "length"


@pytest.mark.usefixtures("small_pieces")
def test_no_buffer_is_used_while_it_is_copied(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reads or fills one, or lets go of it, has waited for the copy that was queued before."""
    copying: set[int] = set()
    copied, wait, contents_of = (getattr(cache_storage._Buffer, name) for name in ("copied", "wait", "bytes"))
    uses = []

    def queued(self: Any) -> None:
        copying.add(id(self))
        copied(self)

    def waited(self: Any) -> None:
        copying.discard(id(self))
        wait(self)

    def used(self: Any, num_tokens: int) -> Any:
        assert id(self) not in copying
        uses.append(num_tokens)
        return contents_of(self, num_tokens)

    for name, watched in (("copied", queued), ("wait", waited), ("bytes", used)):
        monkeypatch.setattr(cache_storage._Buffer, name, watched)
    with runtime_of(folder) as runtime:
        runtime.generate(prompts(), GREEDY)
        saved = runtime.save_cache(tmp_path / "kept")
        assert not copying
        runtime.flush_cache()
        assert runtime.load_cache(tmp_path / "kept") == saved
        assert not copying
    assert sum(uses) == 2 * saved


def test_a_runtime_whose_step_was_cut_keeps_nothing(kept: Path, folder: Path) -> None:
    """Nobody knows what is in memory, though nothing is left to run."""
    before = kept.read_bytes()
    with runtime_of(folder) as runtime:
        runtime.generate(prompts(3), GREEDY)
        runtime.parts.engine.is_cut = True
        for keep in (runtime.save_cache, runtime.load_cache):
            with pytest.raises(RadixrtError, match="an earlier step was cut in two"):
                keep(kept)
    assert kept.read_bytes() == before


# -- what the disk does ------------------------------------------------------------------------------------------


def test_a_full_disk_leaves_the_old_file(kept: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = kept.read_bytes()
    write_bytes, left = os.write, [2000]

    def full(fd: int, data: Any) -> int:
        if left[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = write_bytes(fd, data[: left[0]])
        left[0] -= count
        return count

    with runtime_of(folder) as runtime:
        runtime.generate(prompts(3), GREEDY)
        monkeypatch.setattr(atomic_file.os, "write", full)
        with pytest.raises(CacheFileError, match=f"cannot write {kept}: No space left on device"):
            runtime.save_cache(kept)
        monkeypatch.undo()
        assert kept.read_bytes() == whole
        assert os.listdir(kept.parent) == [kept.name]
        # Nothing is tried again, and the Runtime goes on.
        assert runtime.save_cache(kept) > 0
        assert kept.read_bytes() != whole


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_fails_at_the_end(
    kept: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    whole = kept.read_bytes()

    def fails(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with runtime_of(folder) as runtime:
        monkeypatch.setattr(atomic_file.os, call, fails)
        with pytest.raises(CacheFileError, match="Input/output error"):
            runtime.save_cache(kept)
        monkeypatch.undo()
    assert kept.read_bytes() == whole
    assert os.listdir(kept.parent) == [kept.name]


def test_no_folder(folder: Path, tmp_path: Path) -> None:
    with runtime_of(folder) as runtime, pytest.raises(CacheFileError, match="does not exist; make it first"):
        runtime.save_cache(tmp_path / "none" / "kept")


def test_what_is_no_name_of_a_file(folder: Path, tmp_path: Path) -> None:
    """Refused before anything is written, here or beside it."""
    (tmp_path / "kept").mkdir()
    names = {
        tmp_path / "kept": "is not a plain file",
        tmp_path / "ke\0pt": "is no name of a file",
        tmp_path / "a\0b" / "kept": "is no name of a file",
        Path("/"): "is no name of a file",
        Path(): "is no name of a file",
    }
    with runtime_of(folder) as runtime:
        runtime.generate(prompts()[0], GREEDY)
        for path, message in names.items():
            with pytest.raises(CacheFileError, match=message):
                runtime.save_cache(path)
        assert os.listdir(tmp_path) == ["kept"]
        for path in (tmp_path / "ke\0pt", tmp_path / "a\0b" / "kept"):
            with pytest.raises(CacheFileError, match="cannot be used: a path holds no NUL"):
                runtime.load_cache(path)


def test_two_processes_do_not_write_one_file(kept: Path, folder: Path) -> None:
    partial = kept.with_name(kept.name + ".partial")
    with runtime_of(folder) as runtime, open(partial, "wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(CacheFileError, match="another process is writing it"):
            runtime.save_cache(kept)
        assert partial.exists()
    with runtime_of(folder) as runtime:  # its process has ended, however it did
        runtime.save_cache(kept)
    assert not partial.exists()


SAVER = """
import os, sys
import numpy as np
from pathlib import Path
from radixrt.kept_cache import cache_file
from radixrt.kept_cache.cache_file import CacheFileWriter, RowFormat
from radixrt.cache.snapshot import TreeSnapshot

assert "torch" not in sys.modules
cache_file.PIECE_BYTES = 4096
path, number = Path(sys.argv[1]), 0
kv = RowFormat("F32", (2, 2, 2, 8))
print("ready", flush=True)
while True:
    number += 1
    ints = lambda *values: np.array(values, dtype=np.int32)
    tokens, last_used = np.full(2000, number % 97, np.int32), np.zeros(1, np.int64)
    tree = TreeSnapshot(tokens, ints(2000), ints(-1), ints(0), last_used, ints(0), (None,))
    with CacheFileWriter.open(path, tree, {"kv": kv}, {"number": number}) as writer:
        for _ in range(2000 // kv.piece_rows):
            writer.write(np.full(kv.piece_rows * kv.row_bytes, number % 251, np.uint8)).result()
        writer.finish()
"""


def read_all(path: Path) -> int:
    """The number of the save whose file it is; every byte is checked."""
    with CacheFileReader.open(path) as reader:
        number = int(reader.identity["number"])
        assert (reader.tree.tokens == number % 97).all()
        for piece in empty_pieces(reader.tree.num_tokens, reader.formats["kv"]):
            reader.read(piece).result()
            assert (piece == number % 251).all()
    return number


def test_a_killed_process_leaves_a_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It saves one file after the other; whenever it is killed, the file there is whole, of one save."""
    monkeypatch.setattr(cache_file, "PIECE_BYTES", 4096)
    path, partial = tmp_path / "kept", tmp_path / "kept.partial"
    rng = random.Random(0)
    environment = {**os.environ, "PYTHONPATH": str(HOME)}
    left_partial = 0
    for _ in range(8):
        process = subprocess.Popen(
            [sys.executable, "-c", SAVER, str(path)], stdout=subprocess.PIPE, env=environment
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        while not path.exists():
            time.sleep(0.001)
        time.sleep(rng.random() * 0.1)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        assert read_all(path) >= 1
        left_partial += partial.exists()
    assert left_partial, "it was never killed in the middle"
    assert set(os.listdir(tmp_path)) <= {"kept", "kept.partial"}


RUN_AND_BE_KILLED = """
import os, signal, sys
from radixrt import Runtime, SamplingParams
from radixrt.files import atomic_file
from radixrt.kept_cache import cache_file

cache_file.PIECE_BYTES = 256 * 7
folder, *killed = sys.argv[1:]
write, left = os.write, 0

def counted(fd, data):
    global left
    left -= 1
    if not left:
        write(fd, data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    return write(fd, data)

def run(path):
    with Runtime(folder, device="cpu", dtype="float32", max_total_tokens=600) as runtime:
        print(runtime.load_cache(path), flush=True)
        runtime.generate([5] * 40, SamplingParams(temperature=0, max_new_tokens=4))
        atomic_file.os.write = counted
        runtime.save_cache(path)

Runtime(folder, device="cpu", max_total_tokens=600).close()  # imports what a Runtime wants
for writes, path in (one.split(" ", 1) for one in killed):
    left = int(writes)
    child = os.fork()
    if not child:
        try:
            run(path)
        finally:
            os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_a_runtime_killed_while_it_saves(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the header, before the KV, in it, or in the hashes: yesterday's cache is there as it was."""
    monkeypatch.setattr(cache_file, "PIECE_BYTES", 256 * 7)
    paths = {writes: tmp_path / str(writes) / "kept" for writes in (1, 9, 24)}
    with runtime_of(folder, device="cpu") as runtime:
        cold = runtime.generate(prompts(), GREEDY)
        for path in paths.values():
            path.parent.mkdir()
            saved = runtime.save_cache(path)
    yesterday = {path: path.read_bytes() for path in paths.values()}
    done = subprocess.run(
        [sys.executable, "-c", RUN_AND_BE_KILLED, str(folder), *(f"{n} {path}" for n, path in paths.items())],
        env={**os.environ, "PYTHONPATH": str(HOME)},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    assert done.stdout == f"{saved}\n{-signal.SIGKILL}\n" * len(paths)
    for writes, path in paths.items():
        assert path.read_bytes() == yesterday[path], writes
        assert path.with_name("kept.partial").exists(), writes
        with runtime_of(folder, device="cpu") as runtime:
            assert runtime.load_cache(path) == saved
            warm = runtime.generate(prompts(), GREEDY)
            assert answers(warm) == answers(cold)
            assert cached(warm) == [len(prompt) - 1 for prompt in prompts()]
            runtime.save_cache(path)  # over what the killed one has left
        assert os.listdir(path.parent) == ["kept"]


def test_memory_does_not_grow_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece is the most that a hash or a write is of."""
    monkeypatch.setattr(cache_file, "PIECE_BYTES", 1000)
    kv = RowFormat("F16", (3, 2, 2, 5))
    assert kv.row_bytes == 120
    assert kv.piece_rows == 8
    assert RowFormat("F32", (100, 2, 8, 128)).piece_rows == 1
