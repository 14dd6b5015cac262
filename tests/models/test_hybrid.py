"""Models whose layers keep states: greedy answers, what is loaded, how many states there are, and what is refused.

Logits: test_parity.py.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from layers.gated_delta_net import GatedDeltaNet
from layers.stages import Stage
from layers.weight import Weight
from memory_pool.layout import Layout
from memory_pool.req_to_token_pool import ReqToTokenPool
from memory_pool.state_pool import state_parts
from memory_pool.token_to_kv_pool import TokenToKVPool, kv_part
from radixrt import ModelError, ParameterError, Runtime, SamplingParams
from radixrt.execution import memory_budget
from radixrt.execution.memory_budget import largest_pass, pool_slots, pool_states
from radixrt.execution.model_runner import ModelRunner, Tuning
from radixrt.execution.pass_builder import PassKey
from radixrt.limits import NO_PASSES, PassLimits, requests_with_states
from radixrt.models.checkpoint import Checkpoint
from radixrt.models.decoder import Attention, Decoder
from radixrt.models.loader import load_model
from radixrt.models.qwen_hybrid import _regrouped
from radixrt.planning.cards import shape_of
from tests.support import checkpoints, quantised_checkpoints
from tests.support.passes import plain_pass
from tests.support.recomputing import Recomputing, planner_on_cpu

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
MODELS: dict[str, Callable[[], Any]] = {
    "qwen3-next": checkpoints.qwen3_next,
    "qwen3.5": partial(checkpoints.qwen3_5, tie_word_embeddings=True),
    "qwen3.5-moe": checkpoints.qwen3_5_moe,
    "qwen3.5, the text of a model with images": checkpoints.qwen3_5_with_images,
    "lfm2": checkpoints.lfm2,
    "lfm2-moe": partial(checkpoints.lfm2_moe, conv_bias=True, num_dense_layers=0),
    "nemotron-h, moe": checkpoints.nemotron_h_moe,
    "granite4 hybrid, moe": partial(checkpoints.granite4_hybrid_moe, tie_word_embeddings=True),
}


# What happens to states does not depend on the rest of a model: one of each kind of them.
each_kind = pytest.mark.long_unless(
    kept=lambda given: given["reference"] in ("qwen3.5-moe", "lfm2", "granite4 hybrid, moe")
)


@pytest.fixture(scope="module", params=MODELS)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    model = MODELS[request.param]()
    return model, checkpoints.write(model, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.write(checkpoints.qwen3_5(), tmp_path_factory.mktemp("qwen3.5"))


def small_runtime(folder: Path, **options: Any) -> Runtime:
    """A Runtime whose unused slots and states hold NaN."""
    runtime = Runtime(folder, **{"device": "cpu", "max_total_tokens": 600, **options})
    runtime.parts.model.kv_pool.fill(torch.nan)
    return runtime


def prompts(*lengths: int) -> list[list[int]]:
    return [np.random.default_rng(n).integers(3, checkpoints.VOCAB_SIZE, n).tolist() for n in lengths]


def expected(model: Any, prompt: list[int]) -> list[int]:
    """The greedy answer by transformers, without a cache."""
    return _expected(model, tuple(prompt))


@cache
def _expected(model: Any, prompt: tuple[int, ...]) -> list[int]:
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(GREEDY.max_new_tokens):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def answers(runtime: Runtime, asked: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [list(output.token_ids) for output in runtime.generate(asked, params)]


# --- answers ---

LENGTHS = 1, 2, 3, 40, 17, 70, 64, 5


@pytest.mark.each_once
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunked_prefill_size": 7},
        {"chunked_prefill_size": 65, "max_running_requests": 3},
        {"chunked_prefill_size": 1},
        {"overlap": False},
        {"enable_prefix_cache": False},
    ],
    ids=str,
)
def test_greedy_answers_are_those_of_transformers(reference: tuple[Any, Path], options: dict[str, Any]) -> None:
    """Extends of all lengths, whole and in chunks, beside decodes; rows that others had before."""
    model, folder = reference
    asked = prompts(*LENGTHS)
    with small_runtime(folder, **options) as runtime:
        for _ in range(2):
            assert answers(runtime, asked) == [expected(model, prompt) for prompt in asked]


@each_kind
def test_answers_that_were_retracted(reference: tuple[Any, Path]) -> None:
    model, folder = reference
    asked = prompts(*LENGTHS)
    told: dict[int, list[int]] = {}
    with small_runtime(folder, chunked_prefill_size=16) as runtime:
        for index, prompt in enumerate(asked):
            runtime.submit(runtime.prepare(prompt, GREEDY, index=index))
        steps = 0
        while runtime.has_work:
            told |= {output.index: list(output.token_ids) for output in runtime.step()}
            steps += 1
            running = runtime.parts.scheduler.running
            if steps < 30 and steps % 4 == 0 and running:  # for ever, none would end: all is computed again
                runtime.parts.scheduler.retract(running[steps % len(running)])
        assert runtime.parts.scheduler.num_retractions > 5
    assert [told[index] for index in range(len(asked))] == [expected(model, prompt) for prompt in asked]


@each_kind
def test_several_answers_to_a_prompt(reference: tuple[Any, Path]) -> None:
    """Each goes on from the prompt's state."""
    model, folder = reference
    (prompt,) = prompts(21)
    drawn = SamplingParams(temperature=1.5, n=4, max_new_tokens=9, ignore_eos=True, seed=3)
    with small_runtime(folder) as runtime:
        (output,) = runtime.generate(
            [prompt], SamplingParams(temperature=0, n=3, max_new_tokens=12, ignore_eos=True)
        )
        assert [list(one.token_ids) for one in output.outputs] == [expected(model, prompt)] * 3
        (output,) = runtime.generate([prompt], drawn)
        told = [list(one.token_ids) for one in output.outputs]
        assert len(set(map(tuple, told))) > 1
        for token_ids in told:  # what follows a token that was drawn
            begun = prompt + token_ids[:5]
            assert answers(runtime, [begun]) == [expected(model, begun)]


def test_log_probabilities_of_prompts(reference: tuple[Any, Path]) -> None:
    model, folder = reference
    (prompt,) = prompts(30)
    params = SamplingParams(temperature=0, max_new_tokens=1, prompt_logprobs=0)
    with torch.inference_mode():
        logprobs = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    told = [float(logprobs[at, token]) for at, token in enumerate(prompt[1:])]
    with small_runtime(folder, chunked_prefill_size=11) as runtime:
        (output,) = runtime.generate([prompt], params)
    found = [one.logprob for one in output.prompt_logprobs[-len(told) :]]
    assert found == pytest.approx(told, abs=1e-4)


# --- passes ---


def runner_of(model: Decoder, *, captures: bool, late: bool = False) -> ModelRunner:
    rows = ReqToTokenPool(5, 64)
    pool = TokenToKVPool(200, model.kv_layout(torch.float32), num_states=12, device=CPU)
    assert pool.states is not None
    pool.states.fill(torch.nan)
    pool.memory["kv"][:, :, 0] = 0.0  # padding reads what it has written
    planner = planner_on_cpu(model.config, rows.req_to_token)
    tuning = Tuning(token_sizes=(8, 24), recorder=Recomputing, planner=planner)
    captured = PassLimits(5, 24) if captures else NO_PASSES
    runner = ModelRunner(model, rows, pool, CPU, captured=captured, tuning=tuning)
    while not late and runner.capture_next():
        pass
    return runner


def states(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_padded_passes_find_what_others_do(reference: tuple[Any, Path]) -> None:
    """Rows leave other states than they begin with, also from decode to decode of the same rows."""
    model = load_model(reference[1], device=CPU)[0]
    rows, lens = np.array([2, 0, 4], np.int32), np.array([8, 4, 2], np.int32)
    passes = [plain_pass(rows, [0, 0, 0], [7, 3, 1], state_reads=states(0, 0, 0), state_writes=states(3, 7, 1))]
    begun = states(3, 7, 1)
    for i, left in enumerate(([3, 7, 1], [3, 7, 1], [9, 7, 2], [9, 10, 2])):
        slots = rows + np.int32(20 + 10 * i)
        kept = {"state_reads": begun, "state_writes": states(*left)}
        passes.append(plain_pass(rows, lens + i - 1, lens + i, input_ids=-(rows + 1), out_cache_loc=slots, **kept))
        begun = states(*left)
    # A chunk that goes on, beside a decode.
    mixed = {"state_reads": states(9, 10), "state_writes": states(9, 11)}
    slots = np.arange(100, 106, dtype=np.int32)
    passes.append(plain_pass([2, 0], [11, 7], [16, 8], out_cache_loc=slots, **mixed))
    found, launched = [], list[PassKey]()
    for captures in (False, True):
        runner = runner_of(model, captures=captures)
        graphs = runner.executor.graphs
        for key, launch in graphs.items():
            if isinstance(key, PassKey):
                graphs[key] = partial(lambda key, launch: (launched.append(key), launch()), key, launch)
        found.append([runner.collect(runner.launch(pass_)).token_ids.tolist() for pass_ in passes])
    assert [key.shape.is_decode for key in launched] == [False, *[True] * 4, False]
    late = runner_of(model, captures=True, late=True)  # captures run idle passes between those of the sequences
    found.append([late.collect(late.launch(pass_)).token_ids.tolist() for pass_ in passes])
    assert found[0] == found[1] == found[2]
    assert len({tuple(tokens) for tokens in found[0]}) > 3


def test_a_wrong_state_changes_what_is_drawn(folder: Path) -> None:
    """What makes the tests above worth something."""
    model = load_model(folder, device=CPU)[0]
    runner = runner_of(model, captures=False)
    begin = plain_pass([0, 1], [0, 0], [20, 19], state_reads=states(0, 0), state_writes=states(1, 2))
    runner.collect(runner.launch(begin))
    tokens = {}
    for name, begun in (("right", (1, 2)), ("swapped", (2, 1)), ("zeros", (0, 0))):
        slots = np.arange(60, 68, dtype=np.int32)
        kept = {"state_reads": states(*begun), "state_writes": states(0, 0)}
        after = plain_pass([0, 1], [20, 19], [24, 23], out_cache_loc=slots, **kept)
        tokens[name] = runner.collect(runner.launch(after)).token_ids.tolist()
    assert tokens["right"] != tokens["swapped"]
    assert tokens["right"] != tokens["zeros"]


def test_the_largest_pass_needs_no_states(folder: Path) -> None:
    model = load_model(folder, device=CPU)[0]
    pool = TokenToKVPool(2, model.kv_layout(torch.float32), device=CPU)
    pool.fill(0.0)
    runner = ModelRunner(model, ReqToTokenPool(5, 256), pool, CPU)
    assert runner.collect(runner.launch(largest_pass(PassLimits(4, 40), 256))).finite.all()


def test_kv_in_e4m3(folder: Path) -> None:
    """Scales are of the layers that have KV."""
    with Runtime(folder, device="cpu", kv_dtype="fp8", max_total_tokens=300) as runtime:
        pool = runtime.parts.model.kv_pool
        assert pool.scales.shape == (1, 2, 2)
        assert pool.states.memory["conv"].dtype == torch.float32
        assert [len(tokens) for tokens in answers(runtime, prompts(20, 5))] == [12, 12]


# --- what is loaded ---


def test_layers_that_predict_ahead_are_not_loaded(folder: Path, tmp_path: Path) -> None:
    model = checkpoints.qwen3_5()
    checkpoints.write(model, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    ahead = {"mtp.fc.weight": torch.zeros(4, 4), "mtp.layers.0.self_attn.q_proj.weight": torch.zeros(4, 4)}
    save_file(tensors | ahead, file, metadata={"format": "pt"})
    ours, theirs = (dict(load_model(each, device=CPU)[0].named_parameters()) for each in (tmp_path, folder))
    assert all(torch.equal(weight, theirs[name]) for name, weight in ours.items())


@pytest.mark.parametrize(
    ("make", "layers"),
    [
        (checkpoints.granite4_hybrid_moe, {"layer_types": ["mamba", "attention", "mamba"]}),
        (checkpoints.nemotron_h_moe, {"layers_block_type": None, "hybrid_override_pattern": "MEM*-ME"}),
    ],
    ids=["granite4", "nemotron-h"],
)
def test_names_of_the_hub_and_of_transformers(
    make: Callable[..., Any], layers: dict[str, Any], tmp_path: Path
) -> None:
    """Of tensors, which transformers calls otherwise than it stores them, and of kinds of layers."""
    reference = make()
    as_stored = checkpoints.write(reference, tmp_path / "stored")
    as_called = checkpoints.write(reference, tmp_path / "called", save_original_format=False)
    names = (load_file(each / "model.safetensors").keys() for each in (as_stored, as_called))
    assert len(set.symmetric_difference(*map(set, names))) > 2
    file = as_stored / "config.json"
    given = {**json.loads(file.read_text()), **layers}
    file.write_text(json.dumps({name: value for name, value in given.items() if value is not None}))
    ours, theirs = (load_model(each, device=CPU) for each in (as_stored, as_called))
    assert ours[1] == theirs[1]
    others = dict(theirs[0].named_parameters())
    assert all(torch.equal(weight, others[name]) for name, weight in ours[0].named_parameters())


@pytest.mark.parametrize("unit", [1, 2, 4])
def test_rows_of_groups_and_of_their_scales(unit: int) -> None:
    """Two groups of 4 + 8 rows; a scale for each, or for some."""
    rows = torch.arange(24).view(24, 1)[::unit]
    first, second = _regrouped(rows, 2, (4, 8))
    assert first.flatten().tolist() == [*range(0, 4, unit), *range(12, 16, unit)]
    assert second.flatten().tolist() == [*range(4, 12, unit), *range(16, 24, unit)]


def test_rows_that_are_no_groups() -> None:
    for count in (23, 3):
        first, second = _regrouped(torch.zeros(count, 2), 2, (4, 8))
        assert (len(first), len(second)) == (count, 0)


LARGE = {
    **quantised_checkpoints.SHAPE,
    "head_dim": 128,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 64,
    "linear_num_value_heads": 4,
}


def write_e4m3(make: Callable[..., Any], folder: Path, form: str, **changes: Any) -> Any:
    """Projections to single numbers are left as they are, by their stored name. Returns transformers' model."""
    reference = quantised_checkpoints.write(make(**{**LARGE, **changes}), folder, form)
    file = folder / "config.json"
    given = json.loads(file.read_text())
    ignored = [f"model.layers.{layer}.linear_attn.in_proj_{part}" for layer in (0, 2) for part in ("ba", "b", "a")]
    key = "ignore" if form.startswith("compressed") else "modules_to_not_convert"
    given["quantization_config"] = {**given["quantization_config"], key: ["lm_head", *ignored]}
    file.write_text(json.dumps(given))
    return reference


@pytest.mark.parametrize("form", ["fp8 blocks", "compressed channels", "fp8 tensors"])
@pytest.mark.parametrize("make", [checkpoints.qwen3_next, checkpoints.qwen3_5])
def test_weights_in_e4m3(make: Callable[..., Any], form: str, tmp_path: Path) -> None:
    """Scales go where their rows go."""
    reference = write_e4m3(make, tmp_path, form)
    (prompt,) = prompts(20)
    params = SamplingParams(temperature=0, max_new_tokens=1, prompt_logprobs=0)
    with torch.inference_mode():
        logprobs = reference(torch.tensor([prompt])).logits[0].log_softmax(-1)
    with Runtime(tmp_path, device="cpu", max_total_tokens=300) as runtime:
        (output,) = runtime.generate([prompt], params)
    found = [one.logprob for one in output.prompt_logprobs[-len(prompt) + 1 :]]
    assert found == pytest.approx([float(logprobs[at, token]) for at, token in enumerate(prompt[1:])], abs=1e-3)


@pytest.mark.parametrize("make", [checkpoints.qwen3_next, checkpoints.qwen3_5])
def test_numbers_of_heads_are_not_rounded(make: Callable[..., Any], tmp_path: Path) -> None:
    """Decays and shares, which published checkpoints in e4m3 leave as they are."""
    checkpoints.write(make(), tmp_path)
    plain, rounded = (load_model(tmp_path, quantization=asked)[0] for asked in (None, "fp8"))
    for kept, own in zip(plain.blocks, rounded.blocks, strict=True):
        if isinstance(kept.attention, GatedDeltaNet):
            assert torch.equal(own.attention.ba.weight.values, kept.attention.ba.weight.values)
            assert not torch.equal(own.attention.qkvz.weight.values, kept.attention.qkvz.weight.values)


def test_words_along_outputs_are_refused(tmp_path: Path) -> None:
    file = checkpoints.write(checkpoints.qwen3_5(), tmp_path) / "config.json"
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128}
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": awq}))
    with pytest.raises(ModelError, match="packs numbers of 4 bits along outputs"):
        load_model(tmp_path)


def test_layouts(folder: Path) -> None:
    model, config = load_model(folder, device=CPU, dtype="bfloat16")
    sizes = state_parts(2, (32, 32, 32), 4, (4, 16, 8), torch.bfloat16)
    assert model.kv_layout(torch.float8_e4m3fn) == Layout((kv_part(1, 2, 16, torch.float8_e4m3fn),), sizes)
    assert Layout((), sizes).bytes_per_sequence == 2 * (96 * 3 * 2 + 4 * 16 * 8 * 4)
    assert config.keeps_states
    assert [config.place_of(layer, range(3)) for layer in range(3)] == [0, 0, 1]
    assert model.num_unlike_blocks == 2


def test_layouts_without_matrices(tmp_path: Path) -> None:
    """As the first configs name layers and sizes."""
    file = checkpoints.write(checkpoints.lfm2(), tmp_path) / "config.json"
    given = json.loads(file.read_text())
    for name in ("layer_types", "intermediate_size", "tie_word_embeddings"):
        del given[name]
    first = {"full_attn_idxs": [1], "block_ff_dim": 48, "tie_embedding": True}
    file.write_text(json.dumps(given | first))
    model, config = load_model(tmp_path, device=CPU, dtype="bfloat16")
    layout, sizes = model.kv_layout(torch.bfloat16), state_parts(2, (32,), 4, (0, 0, 0), torch.bfloat16)
    assert layout == Layout((kv_part(1, 2, 8, torch.bfloat16),), sizes)
    assert layout.bytes_per_sequence == 2 * 32 * 3 * 2
    assert (config.intermediate_size, config.tie_word_embeddings) == (60, True)


def test_random_weights(folder: Path) -> None:
    with Runtime(folder, device="cpu", load_format="dummy", max_total_tokens=300) as runtime:
        assert [len(tokens) for tokens in answers(runtime, prompts(20, 5))] == [12, 12]


def test_other_weights(folder: Path, tmp_path: Path) -> None:
    other = checkpoints.qwen3_5(seed=1)
    checkpoints.write(other, tmp_path)
    asked = prompts(20, 5)
    with small_runtime(folder) as runtime:
        identity, told = runtime.identity(), answers(runtime, asked)
        runtime.update_weights(tmp_path)
        assert runtime.identity() != identity
        assert answers(runtime, asked) == [expected(other, prompt) for prompt in asked] != told


# --- memory ---

LAYOUT = Layout((kv_part(1, 2, 16, torch.float32),), state_parts(2, (32, 32, 32), 4, (4, 16, 8), torch.float32))
SIZE = LAYOUT.bytes_per_sequence


@pytest.mark.parametrize(("free", "count"), [(1000, 1 + 23 + 64), (52, 1 + 23 + 7), (24, 1 + 23 + 0)])
def test_states_of_rows_and_some_that_are_kept(monkeypatch: pytest.MonkeyPatch, free: int, count: int) -> None:
    monkeypatch.setattr(memory_budget, "free_bytes", lambda device: 2 * free * SIZE)
    assert pool_states(CPU, LAYOUT, PassLimits(20, 64), 0.5) == count
    assert pool_states(CPU, Layout((kv_part(1, 2, 16, torch.float32),)), PassLimits(20, 64), 0.5) == 0


def test_states_of_a_stage_whose_layers_keep_none(folder: Path) -> None:
    """As many as there may be in other stages, of no bytes."""
    model, config = load_model(folder, device=CPU, stage=Stage(1, 3))
    layout = model.kv_layout(torch.float32)
    none = config.state_parts(0, torch.float32)
    assert layout == Layout((kv_part(1, 2, 16, torch.float32),), none)
    assert layout.bytes_per_sequence == 0
    assert pool_states(CPU, layout, PassLimits(100, 64), 0.5) == 1 + 113 + 100
    first = load_model(folder, device=CPU, stage=Stage(0, 3))[0].kv_layout(torch.float32)
    assert (first.tokens[0].num_layers, first.bytes_per_token) == (0, 0)
    assert first.sequences == config.state_parts(1, torch.float32)


def test_states_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_budget, "free_bytes", lambda device: 46 * SIZE)
    message = f"max_running_requests is 20, whose sequences have 24 states of {SIZE:,} bytes each, but"
    with pytest.raises(ParameterError, match=message):
        pool_states(CPU, LAYOUT, PassLimits(20, 64), 0.5)


def test_slots_beside_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_budget, "free_bytes", lambda device: 10_000)
    assert pool_slots(CPU, 10, 0.5, None, 1000, beside=500) == 400
    with pytest.raises(ParameterError, match="states of sequences 4,490"):
        pool_slots(CPU, 10, 0.5, None, 1000, beside=4490)
    with pytest.raises(ParameterError, match="max_total_tokens"):
        pool_slots(CPU, 10, 0.5, 951, 0, beside=500)
    assert pool_slots(CPU, 10, 0.5, 949, 0, beside=500) == 950


@pytest.mark.parametrize(("gigabytes", "count"), [(60, 504), (2, 15), (0.1, 1), (4000, 2048)])
def test_fewer_requests_at_once_where_each_has_a_state(gigabytes: float, count: int) -> None:
    """Of 50 MB each, and KV of 32 MB; three quarters of what is free are for them."""
    free, state, slot = int(gigabytes * 1e9), 50_000_000, 32_000
    found = requests_with_states(2048, free, state, slot)
    assert found == count
    assert requests_with_states(2048, free, 0, slot) == 2048
    assert (PassLimits(found, 1).own_states + 1) * state + 1024 * found * slot <= free * 3 / 4 or found == 1


def test_a_runtime_has_them(folder: Path) -> None:
    with Runtime(folder, device="cpu", max_total_tokens=300, max_running_requests=6) as runtime:
        states = runtime.parts.model.kv_pool.states
        assert states.allocator.capacity == runtime.parts.limits.num_states == 6 + 2 + 64


def test_the_costs_that_plans_are_made_of(reference: tuple[Any, Path]) -> None:
    model, config = load_model(reference[1], device=CPU)
    shape, layout = shape_of(config), model.kv_layout(torch.float32)
    assert (shape.kv_bytes, shape.state_bytes) == (layout.bytes_per_token, layout.bytes_per_sequence)
    held = sum(weight.numel() * weight.itemsize for weight in model.parameters())
    embeddings = 0 if config.tie_word_embeddings else model.embedding.weight.nbytes
    assert shape.weight_bytes == pytest.approx(held - embeddings, rel=0.15)  # one has a dense layer
    recurrent = next(block.attention for block in model.blocks if not isinstance(block.attention, Attention))
    weights = [part for part in recurrent.modules() if isinstance(part, Weight)]
    assert sum(weight.shape.numel() for weight in weights) == config.recurrent_weights


# --- what is refused ---


def test_states_are_refused_before_weights_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would fit, were it not for the weights."""
    model, _ = load_model(folder, device=CPU)
    limits = PassLimits(20, 64)
    states = (1 + limits.own_states) * model.kv_layout(torch.float32).bytes_per_sequence
    weights = sum(weight.nbytes for weight in model.parameters())
    monkeypatch.setattr(memory_budget, "free_bytes", lambda device: 4 * states + weights - 4)
    monkeypatch.setattr(Checkpoint, "fill", lambda *_: pytest.fail("weights are read"))
    with pytest.raises(ParameterError, match="max_running_requests is 20, whose sequences have 24 states of"):
        Runtime(folder, device="cpu", max_total_tokens=300, max_running_requests=20)
    for options in ({"max_running_requests": 19}, {}):
        with pytest.raises(pytest.fail.Exception, match="weights are read"):
            Runtime(folder, device="cpu", max_total_tokens=300, **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_num_value_heads": 3}, "linear_num_value_heads 3 is not a multiple of linear_num_key_heads 2"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1; it must be a whole number from 2 to 256"),
        ({"linear_key_head_dim": 2**20}, "linear_key_head_dim is 1,048,576"),
        ({"hidden_act": "gelu"}, "gated delta nets with hidden_act 'gelu' are not supported; 'silu' is"),
    ],
)
def test_configs_that_make_no_sense(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    file = checkpoints.write(checkpoints.qwen3_5(), tmp_path) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(ModelError, match=message):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (checkpoints.lfm2, {"conv_L_cache": 1}, "conv_L_cache is 1; it must be a whole number from 2 to 256"),
        (checkpoints.lfm2, {"block_ffn_dim_multiplier": 1e9}, "intermediate_size is 32,000,000,000; it must be"),
        (checkpoints.lfm2, {"block_multiple_of": 0}, "config.json cannot be used"),
        (checkpoints.lfm2, {"layer_types": ["linear_attention"] * 3}, "sliding_attention and conv are"),
        (checkpoints.lfm2, {"layer_types": ["conv"] * 3}, "none of the 3 layers has attention"),
        (checkpoints.lfm2_moe, {"use_expert_bias": False}, "use_expert_bias is False, which is not supported"),
    ],
)
def test_configs_of_short_convolutions_that_make_no_sense(
    tmp_path: Path, make: Callable[[], Any], changes: dict[str, Any], message: str
) -> None:
    file = checkpoints.write(make(), tmp_path) / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(ModelError, match=message):
        load_model(tmp_path)


def test_linear_attention_of_other_models_is_refused(tmp_path: Path) -> None:
    file = checkpoints.write(checkpoints.qwen3(), tmp_path) / "config.json"
    given = {**json.loads(file.read_text()), "layer_types": ["linear_attention", "full_attention"]}
    file.write_text(json.dumps(given))
    with pytest.raises(ModelError, match=r"layers of kind linear_attention are not supported; full_attention and"):
        load_model(tmp_path)


# --- states that are kept ---


def tree(*, depth: int, seed: int = 0) -> list[list[int]]:
    """Prompts that part at odd places: below each, two to three others."""
    drawn = np.random.default_rng(seed)

    def below(prefix: list[int], levels: int) -> list[list[int]]:
        own = prefix + drawn.integers(3, checkpoints.VOCAB_SIZE, int(drawn.integers(5, 30))).tolist()
        if not levels:
            return [own]
        return [prompt for _ in range(int(drawn.integers(2, 4))) for prompt in below(own, levels - 1)]

    return below([], depth)


def shared_lens(asked: list[list[int]]) -> int:
    """Tokens that prompts have in common with those before them, in lexicographic order: no engine finds more."""
    ordered = sorted(asked)
    return sum(
        next((k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
        for one, other in itertools.pairwise(ordered)
    )


@each_kind
@pytest.mark.each_once
@pytest.mark.parametrize("options", [{}, {"chunked_prefill_size": 24}, {"max_running_requests": 3}], ids=str)
def test_prefixes_of_a_tree(reference: tuple[Any, Path], options: dict[str, Any]) -> None:
    """Each is computed once, cold: states are kept where prompts part. Then all but the last tokens are there."""
    model, folder = reference
    asked = tree(depth=3)
    with small_runtime(folder, max_total_tokens=2000, **options) as runtime:
        found = runtime.generate(asked, GREEDY)
        assert [list(output.token_ids) for output in found] == [expected(model, prompt) for prompt in asked]
        assert sum(output.usage.cached_tokens for output in found) == shared_lens(asked)
        again = runtime.generate(asked[::-1], GREEDY)
        assert [list(output.token_ids) for output in again] == [expected(model, prompt) for prompt in asked[::-1]]
        assert sum(output.usage.cached_tokens for output in again) >= shared_lens(asked)


def test_a_prompt_again(folder: Path) -> None:
    """Its first run leaves a state at the end of its answer, the second before the last token of the prompt."""
    (prompt,) = prompts(50)
    with small_runtime(folder) as runtime:
        cached = [runtime.generate(prompt, GREEDY).usage.cached_tokens for _ in range(3)]
        first = runtime.generate(prompt, GREEDY)
        longer = runtime.generate([*prompt, *first.token_ids, 5], GREEDY)
    assert cached == [0, 0, 49]
    assert longer.usage.cached_tokens == 50 + GREEDY.max_new_tokens - 1


def test_several_answers_compute_their_prompt_once(folder: Path) -> None:
    (prompt,) = prompts(50)
    with small_runtime(folder) as runtime:
        output = runtime.generate(prompt, SamplingParams(n=6, temperature=1.0, max_new_tokens=4))
        assert output.usage.recomputed_tokens == 0
        assert runtime.parts.engine.activity.extended_tokens == 50 + 5  # and the first token of each but one


# --- states that leave the device ---


@each_kind
@pytest.mark.each_once
@pytest.mark.parametrize("options", [{}, {"chunked_prefill_size": 24, "max_running_requests": 3}], ids=str)
def test_a_tree_in_two_tiers(reference: tuple[Any, Path], options: dict[str, Any]) -> None:
    """A pool that holds a sixth of it: what a second round finds has been on the host."""
    model, folder = reference
    asked = tree(depth=3)
    answered = [expected(model, prompt) for prompt in asked]
    with small_runtime(folder, max_total_tokens=220, host_memory_gb=0.01, **options) as runtime:
        assert answers(runtime, asked) == answered
        found = runtime.generate(asked[::-1], GREEDY)
        assert [list(output.token_ids) for output in found] == answered[::-1]
        assert sum(output.usage.cached_tokens for output in found) >= shared_lens(asked)
        assert runtime.cache_stats().state_loaded >= 5


@each_kind
def test_a_kept_cache(reference: tuple[Any, Path], tmp_path: Path) -> None:
    """A second run begins with the states of the first one."""
    model, folder = reference
    asked, path = tree(depth=3), tmp_path / "cache"
    with small_runtime(folder, max_total_tokens=2000) as first:
        first.generate(asked, GREEDY)
        warm = first.generate(asked, GREEDY)
        saved = first.save_cache(path)
    with small_runtime(folder, max_total_tokens=2000) as second:
        assert second.load_cache(path) == saved
        again = second.generate(asked, GREEDY)
        assert [list(output.token_ids) for output in again] == [expected(model, prompt) for prompt in asked]
        cached, before = ([output.usage.cached_tokens for output in outputs] for outputs in (again, warm))
        assert all(own >= other for own, other in zip(cached, before, strict=True))
