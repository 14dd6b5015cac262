"""KV in e4m3: where scales come from, and what it costs in accuracy. With -s the figures are printed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from memory_pool.layout import Layout
from memory_pool.token_to_kv_pool import TokenToKVPool, kv_part
from radixrt import CacheFileError, ParameterError, RequestOutput, Runtime, SamplingParams
from radixrt.builtin import MODEL_PATH
from radixrt.builtin.task import EVAL_SEED, Question, ask_alone, ask_few_shot, make_document
from radixrt.execution import kv_scales
from radixrt.execution.device import check_kernels
from radixrt.execution.kv_scales import calibrated_scales
from radixrt.models.decoder import Decoder
from radixrt.models.loader import load_model
from tests.support import checkpoints
from tests.support.input_metadata import input_metadata
from triton_ops.e4m3 import E4M3
from triton_ops.implementation import GPU, compiling_for

pytestmark = pytest.mark.usefixtures("device")

GREEDY = SamplingParams(temperature=0, max_new_tokens=8)
NUM_TOKENS = 60
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]

FAMILIES = {
    "llama": checkpoints.llama,
    "mistral": checkpoints.mistral,
    "qwen2": checkpoints.qwen2,
    "qwen3": checkpoints.qwen3,
    "gemma2": checkpoints.gemma2,
    "gemma3": checkpoints.gemma3,
    "phi3": checkpoints.phi3,
    "olmo2": checkpoints.olmo2,
    "smollm3": checkpoints.smollm3,
    "mixtral": checkpoints.mixtral,
}


# --- accuracy ---


def logits(model: Decoder, device: torch.device, *, fp8: bool) -> Tensor:
    """Of NUM_TOKENS tokens: a prompt in two chunks, then decodes. Float32 `[NUM_TOKENS, vocab_size]`."""
    config = model.config
    pool = TokenToKVPool(NUM_TOKENS + 1, model.kv_layout(E4M3 if fp8 else model.placement.dtype), device=device)
    pool.fill(torch.nan)
    if fp8:
        pool.set_scales(calibrated_scales(model, device))
    ids = np.random.default_rng(1).integers(3, config.vocab_size, NUM_TOKENS)
    slots = np.random.default_rng(2).permutation(NUM_TOKENS) + 1
    rows = torch.tensor(slots[None], dtype=torch.int32, device=device)
    parts = []
    with torch.inference_mode():
        for start, end in ((0, 20), (20, 50), *((n, n + 1) for n in range(50, NUM_TOKENS))):
            metadata = input_metadata(
                [0], [end], [start], slots[start:end], rows, num_extends=int(end - start > 1), kv_pool=pool
            )
            hidden = model(torch.tensor(ids[start:end], device=device), metadata)
            parts.append(model.compute_logits(hidden, torch.arange(end - start, device=device)))
    return torch.cat(parts).float()


def logit_errors(model: Decoder, device: torch.device) -> tuple[float, float]:
    """What fp8 changes of the logits: the norm of the difference over that of the logits' spread about their mean,
    and the mean Kullback-Leibler divergence of the next token's distribution.
    """
    plain, fp8 = (logits(model, device, fp8=fp8) for fp8 in (False, True))
    spread = plain - plain.mean(-1, keepdim=True)
    divergence = (plain.softmax(-1) * (plain.log_softmax(-1) - fp8.log_softmax(-1))).sum(-1)
    return float((fp8 - plain).norm() / spread.norm()), float(divergence.mean())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_change_little(family: str, dtype: torch.dtype, tmp_path: Path, device: torch.device) -> None:
    with torch.device("cpu"):
        checkpoints.write(FAMILIES[family](), tmp_path)
    model, _ = load_model(tmp_path, device=device, dtype=dtype)
    error, divergence = logit_errors(model, device)
    print(f"{family}, {dtype}: fp8 changes the logits by {error:.2%}, divergence {divergence:.2e}")
    assert 0 < error < 0.35  # weights are large in these models: scores of tens multiply what rounding changes
    assert divergence < 0.2


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    """100 questions about held-out documents of 128 to 512 tokens, alone and few-shot."""
    rng = random.Random(EVAL_SEED)
    out: list[Question] = []
    for max_tokens, count in ((128, 20), (256, 40), (512, 40)):
        document = make_document(rng, max_tokens=max_tokens)
        out += ask_alone(rng, document, count // 2)
        out += ask_few_shot(rng, make_document(rng, max_tokens=max_tokens), count // 2, 6)
    return out


def answers(questions: list[Question], **options: Any) -> list[RequestOutput]:
    options = {"device": torch.get_default_device(), "max_total_tokens": 20_000, "kv_dtype": "fp8"} | options
    with Runtime(**options) as runtime:
        runtime.parts.model.kv_pool.fill(torch.nan)
        return runtime.generate([q.prompt for q in questions], GREEDY)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_built_in_model_answers_as_without(
    dtype: torch.dtype, questions: list[Question], device: torch.device
) -> None:
    outputs = {kv: answers(questions, kv_dtype=kv, dtype=dtype) for kv in ("auto", "fp8")}
    right = {
        kv: sum(o.text.strip() == q.answer for o, q in zip(outputs[kv], questions, strict=True)) for kv in outputs
    }
    differing = sum(x.text != y.text for x, y in zip(*outputs.values(), strict=True))
    error, divergence = logit_errors(load_model(MODEL_PATH, device=device, dtype=dtype)[0], device)
    print(
        f"built-in model, {dtype}: of {len(questions)} answers {right['auto']} are right, with fp8 "
        f"{right['fp8']}, {differing} differ; the logits change by {error:.2%}, divergence {divergence:.2e}"
    )
    assert right["fp8"] >= right["auto"] - len(questions) // 50
    assert differing <= len(questions) // 50


# --- what new tokens attend to ---


def test_cold_warm_and_chunked_answers_agree(questions: list[Question]) -> None:
    """New tokens attend to what is stored: a prefix means the same whether it was found or computed."""
    questions = questions[::3]
    cold = answers(questions, force_miss=True)
    warm = answers(questions)
    chunked = answers(questions[:10], chunked_prefill_size=48)
    assert sum(o.usage.cached_tokens for o in warm) > 0.8 * sum(o.usage.prompt_tokens for o in warm)
    assert [o.token_ids for o in warm] == [o.token_ids for o in cold]
    assert [o.token_ids for o in chunked] == [o.token_ids for o in cold[:10]]


def test_prefixes_come_back_from_the_host(questions: list[Question]) -> None:
    cold = answers(questions[:40], force_miss=True)
    options: dict[str, Any] = {"max_total_tokens": 700, "max_running_requests": 3, "host_memory_gb": 0.02}
    with Runtime(device=torch.get_default_device(), kv_dtype="fp8", **options) as runtime:
        outputs = runtime.generate([q.prompt for q in questions[:40]], GREEDY)
        again = runtime.generate([q.prompt for q in questions[:40]], GREEDY)
        assert runtime.cache_stats().loaded_tokens > 0
    assert [o.token_ids for o in outputs] == [o.token_ids for o in cold] == [o.token_ids for o in again]


def test_log_probabilities_do_not_depend_on_what_is_cached(device: torch.device) -> None:
    """More telling than answers: if new tokens attended to their own KV unrounded, these would differ by 1e-2."""
    ids = np.random.default_rng(5).integers(3, 900, 120).tolist()
    params = SamplingParams(temperature=0, max_new_tokens=4, logprobs=5)
    with Runtime(device=device, max_total_tokens=2000, kv_dtype="fp8", dtype="float32") as runtime:
        cold, warm = (runtime.generate(ids, params) for _ in range(2))
    assert (cold.usage.cached_tokens, warm.usage.cached_tokens) == (0, 119)
    first = [output.outputs[0].logprobs for output in (cold, warm)]
    assert first[0] is not None
    assert first[1] is not None
    for x, y in zip(*first, strict=True):
        assert x.token_id == y.token_id
        assert x.logprob == pytest.approx(y.logprob, abs=1e-4)


# --- scales ---


@pytest.fixture
def model(tmp_path: Path, device: torch.device) -> Decoder:
    with torch.device("cpu"):
        checkpoints.write(checkpoints.qwen3(), tmp_path)
    return load_model(tmp_path, device=device)[0]


def test_scales_are_powers_of_two_with_room_above_what_was_tried(model: Decoder, device: torch.device) -> None:
    scales = calibrated_scales(model, device)
    assert scales.shape == (2, 2, 2)
    assert (scales.log2() == scales.log2().round()).all()
    assert torch.equal(scales, calibrated_scales(model, device))
    greatest = torch.zeros(2, 2, 2, device=device)

    class Watched(TokenToKVPool):
        def __del__(self) -> None:
            for layer in range(2):
                for which, buffer in enumerate(self.memory["kv"][layer]):
                    greatest[layer, which] = buffer[1:].float().abs().amax((0, 2))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_scales, "TokenToKVPool", Watched)
        calibrated_scales(model, device)
    room = scales * 448 / greatest
    assert (room >= 4).all()
    assert (room < 8).all()


def test_heads_of_zeros_and_of_nonsense_have_a_scale_of_one(model: Decoder, device: torch.device) -> None:
    places = dict(model.checkpoint_tensors())
    with torch.no_grad():
        places["model.layers.0.self_attn.v_proj.weight"].zero_()
        places["model.layers.1.self_attn.v_proj.weight"].fill_(torch.inf)
    scales = calibrated_scales(model, device)
    assert (scales[0, 1] == 1).all()
    assert (scales[1, 1] == 1).all()
    assert scales.isfinite().all()


def test_keys_and_values_have_scales_of_their_own(tmp_path: Path, device: torch.device) -> None:
    """Values a million times smaller, an output projection as much greater, by a power of two: nothing changes."""
    with torch.device("cpu"):
        given = checkpoints.llama()
        checkpoints.write(given, tmp_path / "given")
        with torch.no_grad():
            for layer in given.model.layers:
                layer.self_attn.v_proj.weight.mul_(2.0**-20)
                layer.self_attn.o_proj.weight.mul_(2.0**20)
        checkpoints.write(given, tmp_path / "apart")
    expected, apart = (
        logits(load_model(tmp_path / name, device=device, dtype="float32")[0], device, fp8=True)
        for name in ("given", "apart")
    )
    torch.testing.assert_close(apart, expected, atol=1e-3, rtol=1e-3)


def test_pools_refuse_scales_that_mean_nothing() -> None:
    options: dict[str, Any] = {"device": torch.get_default_device()}
    plain = TokenToKVPool(5, Layout((kv_part(3, 2, 4, torch.float16),)), **options)
    table = torch.zeros(1, 1, dtype=torch.int32)
    view = plain.view(0, table)
    assert plain.scales is view.k_scale is view.v_scale is None
    with pytest.raises(ValueError, match="not of e4m3"):
        plain.set_scales(torch.ones(3, 2, 2))
    layout = Layout((kv_part(3, 2, 4, E4M3),))
    pool = TokenToKVPool(5, layout, **options)
    assert layout.bytes_per_token == 2 * 3 * 2 * 4
    for scales in (torch.ones(3, 2, 4), torch.zeros(3, 2, 2), torch.full((3, 2, 2), torch.nan)):
        with pytest.raises(ValueError, match="scales must be positive"):
            pool.set_scales(scales)
    pool.set_scales(torch.arange(1.0, 13.0).view(3, 2, 2))
    k_scale, v_scale = pool.view(1, table).k_scale, pool.view(2, table).v_scale
    assert k_scale is not None
    assert v_scale is not None
    assert (k_scale.tolist(), v_scale.tolist()) == ([5, 6], [11, 12])


def test_other_weights_have_other_scales_and_find_nothing_cached(tmp_path: Path, device: torch.device) -> None:
    with torch.device("cpu"):
        checkpoints.write(checkpoints.llama(), tmp_path / "one")
        large = checkpoints.llama(seed=1)
        with torch.no_grad():
            for layer in large.model.layers:
                layer.self_attn.v_proj.weight.mul_(64)
        checkpoints.write(large, tmp_path / "other")
    prompt, params = list(range(5, 45)), SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
    options: dict[str, Any] = {"device": device, "max_total_tokens": 300, "kv_dtype": "fp8"}
    with Runtime(tmp_path / "other", **options) as runtime:
        expected = runtime.generate(prompt, params)
        scales = runtime.parts.model.kv_pool.scales
    with Runtime(tmp_path / "one", **options) as runtime:
        assert not torch.equal(runtime.parts.model.kv_pool.scales, scales)
        runtime.generate(prompt, params)
        runtime.update_weights(tmp_path / "other")
        assert torch.equal(runtime.parts.model.kv_pool.scales, scales)
        output = runtime.generate(prompt, params)
    assert output.usage.cached_tokens == 0
    assert output.token_ids == expected.token_ids


def test_a_kept_cache_is_read_with_its_own_scales_only(tmp_path: Path, device: torch.device) -> None:
    prompt, params = "Mira likes Oslo. Tarek counts 374.\nQ: Tarek counts?\nA:", SamplingParams(temperature=0)
    options: dict[str, Any] = {"device": device, "max_total_tokens": 300, "kv_dtype": "fp8"}
    with Runtime(**options) as runtime:
        cold = runtime.generate(prompt, params)
        runtime.save_cache(tmp_path / "kept")
    with Runtime(**options) as runtime:
        runtime.load_cache(tmp_path / "kept")
        warm = runtime.generate(prompt, params)
    assert warm.usage.cached_tokens > 0
    assert warm.token_ids == cold.token_ids
    with Runtime(**options) as runtime:
        runtime.parts.model.kv_pool.set_scales(runtime.parts.model.kv_pool.scales * 2)
        with pytest.raises(CacheFileError, match="scales of KV"):
            runtime.load_cache(tmp_path / "kept")


# --- what is refused ---


def test_kv_dtypes_that_cannot_be(device: torch.device) -> None:
    with pytest.raises(ParameterError, match="kv_dtype is 'int4'; it must be one of: auto, fp8"):
        Runtime(device=device, kv_dtype="int4")
    with compiling_for(GPU(86, 84)):
        with pytest.raises(ParameterError, match=r"compute capability 8\.6; kernels for fp8 need 8\.9 or higher"):
            check_kernels("triton", "fp8", device)
        check_kernels("torch", "fp8", device)
        check_kernels("triton", "auto", device)
    with compiling_for(GPU(89, 128)):
        check_kernels("triton", "fp8", device)
