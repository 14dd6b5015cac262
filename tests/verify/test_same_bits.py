"""Deterministic Runtimes: the same bits in every situation, of families that differ in what their layers do."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from layers import gated_delta_net
from radixrt.config import RuntimeConfig
from radixrt.sampling_params import SamplingParams
from radixrt.verify import verify
from tests.support.checkpoints import (
    gemma2,
    gemma3,
    glm4_moe,
    gpt_oss_in_mxfp4,
    granite4_hybrid_moe,
    lfm2,
    lfm2_moe,
    llama,
    nemotron_h,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_moe,
    write,
)
from tests.support.interpreter import require_interpreter
from triton_ops.recurrent.gated_delta import gated_delta

FAMILIES = {
    "Llama": llama,
    "Qwen3": qwen3,
    "Gemma 2": gemma2,  # softcaps, and windows in every second layer
    "Gemma 3": gemma3,
    "Qwen3-MoE": qwen3_moe,
    "gpt-oss": gpt_oss_in_mxfp4,  # sinks
    "GLM-4.5": glm4_moe,  # a router of sigmoids
    "Qwen3.5": qwen3_5,  # gated delta nets, and heads whose outputs are gated
    "Qwen3.5-MoE": qwen3_5_moe,  # a gate of the shared expert
    "LFM2": lfm2,  # short convolutions
    "LFM2-MoE": lfm2_moe,
    "Granite 4": granite4_hybrid_moe,  # Mamba-2
    "Nemotron-H": nemotron_h,
}
# Every change of what is cached, of cuts and company; options that make another Runtime are in the long test.
USUAL = ("cut-0", "together", "jitter-0", "chunks-64", "small-pool-jitter")


def prompts(longest: int) -> list[list[int]]:
    """With shared beginnings of odd lengths: of all, of some, and of one another's whole text."""
    chance = random.Random(5)

    def text(length: int) -> list[int]:
        return [chance.randrange(3, 101) for _ in range(length)]

    head, part = text(longest), text(23)
    return [head + text(1), head + part + text(40), head + part + text(7), head, text(9), head[:17] + text(150)]


def params(count: int) -> list[SamplingParams]:
    """Greedy ones and others, with all kinds of log-probabilities."""
    kinds = (
        {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},
        {"temperature": 0.9, "top_p": 0.9, "logprobs": 1, "repetition_penalty": 1.3},
        {"temperature": 1.2, "top_k": 7, "logprobs": 2, "logprobs_mode": "processed_logprobs"},
    )
    return [SamplingParams(max_new_tokens=9, ignore_eos=True, **kinds[i % 3]) for i in range(count)]  # type: ignore[arg-type]


# Qwen3.5-MoE has experts as others have; tests/verify/test_matrix.py runs a dense model.
@pytest.mark.long_unless(kept=lambda given: given["family"] == "Qwen3.5-MoE" and given["dtype"] == "float32")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_bits_in_every_situation(family: str, dtype: str, tmp_path: Path) -> None:
    folder = write(FAMILIES[family](seed=2), tmp_path)
    config = RuntimeConfig(folder, dtype=dtype, device="cpu", deterministic=True)
    asked = prompts(141)[2:]
    result = verify(asked, params(len(asked)), config=config, only=USUAL, seeds=[0])
    assert result.same_bits, result.outcomes
    assert len(result.outcomes) == len(USUAL)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_bits_with_every_option(family: str, tmp_path: Path) -> None:
    folder = write(FAMILIES[family](seed=3), tmp_path)
    config = RuntimeConfig(folder, dtype="float32", device="cpu", deterministic=True)
    asked = prompts(141)
    result = verify(asked, params(len(asked)), config=config)
    assert result.same_bits, result.outcomes


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_bits_on_a_gpu(family: str, dtype: str, tmp_path: Path) -> None:
    """Kernels, captured and not, trees and flat plans; contexts of several superblocks, answers of 64 tokens."""
    folder = write(FAMILIES[family](seed=2, max_position_embeddings=8192), tmp_path)
    config = RuntimeConfig(folder, dtype=dtype, deterministic=True, max_total_tokens=100_000)
    asked = prompts(2500)
    result = verify(asked, [replace(each, max_new_tokens=64) for each in params(len(asked))], config=config)
    assert result.same_bits, result.outcomes


def in_chunks(*arguments: Any, deterministic: bool, **options: Any) -> Tensor:
    """Counted from where an extend begins."""
    return gated_delta(*arguments, **options)


@pytest.mark.parametrize("fault", ["products", "attention", "states"])
def test_a_part_that_is_not_deterministic_is_found(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are without the option."""
    folder = write((qwen3_5 if fault == "states" else llama)(seed=2), tmp_path)
    if fault == "states":
        monkeypatch.setattr("radixrt.execution.products._check_states", lambda decoder, layer: None)
        monkeypatch.setattr(gated_delta_net, "gated_delta", in_chunks)
    elif fault == "attention":
        import radixrt.models.decoder

        class Plain(radixrt.models.decoder.RadixAttention):
            def __init__(self, *arguments: Any, **keywords: Any) -> None:
                super().__init__(*arguments, **keywords | {"deterministic": False})

        monkeypatch.setattr(radixrt.models.decoder, "RadixAttention", Plain)
    else:
        monkeypatch.setattr("layers.products.ProductTable.rows_for", lambda self, num_rows: num_rows)
    asked = prompts(141)[:3]
    config = RuntimeConfig(folder, dtype="float32", device="cpu", deterministic=True)
    only = ("together", "chunks-64")
    result = verify(asked, params(len(asked)), config=config, only=only, seeds=[0])
    assert not result.same_bits


def test_kernels_in_the_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small, and with plans that have room for few items, as each pass takes it a second."""
    require_interpreter()
    monkeypatch.setattr("radixrt.execution.attention.planner.MAX_SUPERBLOCKS", 32)
    from tests.support.tensor_cores import tensor_cores  # imports Triton's interpreter

    folder = write(llama(seed=2, num_hidden_layers=1), tmp_path)
    config = RuntimeConfig(folder, dtype="float32", device="cpu", impl="triton", deterministic=True)
    chance = random.Random(1)
    head = [chance.randrange(3, 101) for _ in range(21)]
    asked = [head + [chance.randrange(3, 101) for _ in range(n)] for n in (1, 30)]
    with tensor_cores():
        one = SamplingParams(max_new_tokens=3, temperature=0.0, logprobs=1, ignore_eos=True)
        result = verify(asked, one, config=config, only=("together",), seeds=[0])
    assert result.same_bits, result.outcomes
