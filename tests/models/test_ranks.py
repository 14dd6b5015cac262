"""Models that ranks hold together, beside those that one holds: each rank is a thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from layers.checkpoint_slot import Filled, Packed
from layers.formats.int4 import Int4Packing
from layers.linear import Linear, SummedLinear
from layers.products import same_bits
from layers.ranks import ALONE, Ranks
from radixrt.errors import ModelError
from radixrt.execution.products import compare_all
from radixrt.limits import PassLimits
from radixrt.models.decoder import Decoder
from radixrt.models.families import FAMILIES
from radixrt.models.loader import load_model, reload_weights
from radixrt.models.rank_part import rank_part
from tests.models import test_hybrid
from tests.models.test_int4_checkpoints import numbers_of
from tests.models.test_parity import MODELS, Session, prompt
from tests.support import checkpoints, int4_checkpoints, quantised_checkpoints
from tests.support.checkpoints import linear_weights
from tests.support.interpreter import require_interpreter
from tests.support.ranks import on_ranks
from triton_ops.linear.e4m3_linear import dequantised_weight

DIVIDED = 104  # tokens, which 2 and 4 divide; the usual number is a prime


def logits(model: Decoder) -> Tensor:
    """Of all tokens of two requests: cold, then a chunk and a decode."""
    session = Session(model, model.config)
    session.kv = session.kv.to(model.placement.dtype)
    a, b = prompt(23, 1), prompt(9, 2)
    found = session.run((1, a[:17], 0), (0, b[:8], 0))
    found += session.run((1, a, 17), (0, b, 8), num_extends=1)
    return torch.cat(found)


def loaded_logits(folder: Path, ranks: Ranks = ALONE, **options: Any) -> Tensor:
    return logits(load_model(folder, ranks=ranks, **options)[0])


def assert_same_logits(folder: Path, size: int, **options: Any) -> None:
    """On all ranks the same bits, and about those of one."""
    expected = loaded_logits(folder, **options)
    first, *others = on_ranks(size, partial(loaded_logits, folder, **options))
    assert all(same_bits(other, first) for other in others)
    torch.testing.assert_close(first, expected, atol=1e-4, rtol=1e-5)
    assert torch.equal(first.argmax(-1), expected.argmax(-1))


# --- families ---

# By their numbers of ranks. Heads of KV are 2: four ranks hold each twice.
ON_TWO = (
    "llama with biases",
    "llama, heads wider than hidden",
    "qwen3, tied, with biases",
    "mistral",
    "phi3",
    "olmo2",
    "granite",
    "glm4",
    "glm4-moe",
    "seed-oss",
    "gemma2",
    "mixtral",
    "qwen3-moe",
    "gpt-oss",
    "gpt-oss without groups and windows",
    "gpt-oss in MXFP4",
    "ministral3, the text of a model with images",
    "gemma3, the text of a model with images",
    "mistral, the text of a model with images",
    "qwen2.5-vl, text",
    "qwen3-vl, text",
    "qwen3-vl-moe, text",
    "qwen3-next",
    "qwen3-next, as many heads of keys as of values",
    "qwen3.5, tied, with biases",
    "qwen3.5-moe",
    "lfm2 with biases, its size as it is",
    "lfm2-moe",
    "granite4 hybrid",
    "granite4 hybrid, with rope, biases and one group",
    "granite4 hybrid, moe",
    "nemotron-h",
    "nemotron-h, moe",
    "nemotron-h, with biases and one group",
    "qwen3.5, the text of a model with images",
    "qwen3.5-moe, the text of a model with images",
)
ON_FOUR = (
    "llama",
    "llama3 rope, tied",
    "llama with biases",
    "llama, heads wider than hidden",
    "llama without groups",
    "qwen2",
    "qwen3",
    "ministral3",
    "phi3, partial rotary",
    "olmo2",
    "olmo3",
    "granite",
    "granite4",
    "granite4 without positions",
    "glm4",
    "glm4-moe",
    "glm4-moe, groups",
    "exaone4",
    "ernie4.5",
    "ernie4.5 with biases",
    "hunyuan",
    "hunyuan, yarn rope, with biases",
    "smollm3",
    "gemma2",
    "gemma3",
    "mixtral",
    "qwen3-moe, renormalised",
    "qwen3-next",
    "qwen3.5",
    "granite4 hybrid",
    "granite4 hybrid, moe",
    "nemotron-h, moe",
)
# Of models that have fewer where two ranks divide them.
HEADS_OF_FOUR: dict[str, dict[str, int]] = {
    "qwen3-next": {"linear_num_key_heads": 4, "linear_num_value_heads": 8},
    "qwen3.5": {"linear_num_key_heads": 4},
}


@pytest.mark.parametrize("name", ON_TWO)
def test_two_ranks(name: str, tmp_path: Path) -> None:
    """Each holds all of the vocabulary, which does not divide."""
    assert_same_logits(checkpoints.write(MODELS[name](), tmp_path), 2)


@pytest.mark.parametrize("name", ON_FOUR)
def test_four_ranks(name: str, tmp_path: Path) -> None:
    """Each holds a quarter of the vocabulary."""
    make: Any = MODELS[name]
    model = make(vocab_size=DIVIDED, **HEADS_OF_FOUR.get(name, {}))
    assert_same_logits(checkpoints.write(model, tmp_path), 4)


def test_no_family_is_left_out() -> None:
    makers: list[Any] = [MODELS[name] for name in (*ON_TWO, *ON_FOUR)]
    assert {type(make()).__name__ for make in makers} >= {*FAMILIES} - {"Ministral3ForCausalLM"}


def test_bfloat16(tmp_path: Path) -> None:
    """Bits are the same on all ranks, and about as far from float32 as those of one."""
    folder = checkpoints.write(checkpoints.llama(), tmp_path)
    exact, alone = loaded_logits(folder), loaded_logits(folder, dtype="bfloat16")
    first, *others = on_ranks(4, partial(loaded_logits, folder, dtype="bfloat16"))
    assert all(same_bits(other, first) for other in others)
    assert (first - exact).abs().mean() < 1.5 * (alone - exact).abs().mean()


# --- parts of a model ---


def test_what_a_rank_holds(tmp_path: Path) -> None:
    """A quarter of what is divided; of two heads of KV one, as its neighbour does."""
    folder = checkpoints.write(checkpoints.qwen3_moe(vocab_size=DIVIDED), tmp_path)
    whole, config = load_model(folder)
    parts = [load_model(folder, ranks=Ranks(rank, 4)) for rank in range(4)]
    assert all(found == config for _, found in parts)
    shape = parts[0][0].config
    assert (shape.num_heads, shape.num_kv_heads, shape.intermediate_size) == (1, 1, 12)
    assert (shape.hidden_size, shape.vocab_size, shape.head_dim) == (32, DIVIDED, 16)
    everything = whole.state_dict()
    for rank, (part, _) in enumerate(parts):
        own = part.state_dict()
        assert own.keys() == everything.keys()
        rows = slice(rank * 26, rank * 26 + 26)
        assert torch.equal(own["embedding.weight"], everything["embedding.weight"][rows])
        q, k, v = everything["blocks.1.attention.qkv.weight.values"].split((64, 32, 32))
        stacked = [q[16 * rank :][:16], *(heads[16 * (rank // 2) :][:16] for heads in (k, v))]
        assert torch.equal(own["blocks.1.attention.qkv.weight.values"], torch.cat(stacked))
        output = everything["blocks.1.attention.output.weight.values"]
        assert torch.equal(own["blocks.1.attention.output.weight.values"], output[:, 16 * rank :][:, :16])
        gate, up = everything["blocks.1.feed_forward.gate_up"].chunk(2, 1)
        experts = torch.cat([each[:, 5 * rank :][:, :5] for each in (gate, up)], 1)
        assert torch.equal(own["blocks.1.feed_forward.gate_up"], experts)
        for replicated in ("norm.weight", "blocks.1.feed_forward.router.weight.values"):
            assert torch.equal(own[replicated], everything[replicated])


def test_what_a_rank_holds_of_a_delta_net(tmp_path: Path) -> None:
    """Half of the heads of queries, keys and values, each by itself; half of a shared expert, its whole gate."""
    folder = checkpoints.write(checkpoints.qwen3_next(), tmp_path)
    whole, config = load_model(folder)
    everything, net, mixture = whole.state_dict(), "blocks.0.attention.", "blocks.0.feed_forward."
    for rank in range(2):
        part, _ = load_model(folder, ranks=Ranks(rank, 2))
        own, sizes = part.state_dict(), part.config.delta_sizes
        assert (sizes.num_key_heads, sizes.num_value_heads, sizes.key_dim, sizes.value_dim) == (1, 2, 16, 8)
        assert own.keys() == everything.keys()
        expected = {
            name: torch.cat([each.chunk(2)[rank] for each in everything[net + name].split(parts)])
            for name, parts in (
                ("qkvz.weight.values", (32, 32, 32, 32)),
                ("conv", (32, 32, 32)),
                ("ba.weight.values", (4, 4)),
                ("a_log", (4,)),
                ("dt_bias", (4,)),
            )
        }
        expected["output.weight.values"] = everything[net + "output.weight.values"].chunk(2, 1)[rank]
        expected["norm.weight"] = everything[net + "norm.weight"]
        assert {net + name for name in expected} == {name for name in own if name.startswith(net)}
        for name, right in expected.items():
            assert torch.equal(own[net + name], right), name
        down, gate = mixture + "shared.down.weight.values", mixture + "shared_gate.weight.values"
        assert torch.equal(own[down], everything[down].chunk(2, 1)[rank])
        assert torch.equal(own[gate], everything[gate])
        own, whole = (each.kv_layout(torch.float32).bytes_per_sequence for each in (part, config))
        assert own * 2 == whole


def test_what_a_rank_holds_of_mamba2(tmp_path: Path) -> None:
    """A quarter of gates, heads and steps; of two groups one, as its neighbour does."""
    folder = checkpoints.write(checkpoints.granite4_hybrid_moe(mamba_proj_bias=True), tmp_path)
    whole, _ = load_model(folder)
    everything, mixer, mixture = whole.state_dict(), "blocks.0.attention.", "blocks.0.feed_forward."
    for rank in range(4):
        part, _ = load_model(folder, ranks=Ranks(rank, 4))
        own, sizes = part.state_dict(), part.config.mamba_sizes
        assert (sizes.num_heads, sizes.head_dim, sizes.num_groups, sizes.state_size) == (2, 8, 1, 16)
        assert own.keys() == everything.keys()

        def of_rank(name: str, parts: tuple[int, ...], rank: int = rank) -> Tensor:
            pieces = everything[mixer + name].split(parts)
            return torch.cat(
                [each.chunk(2)[rank // 2] if len(each) == 32 else each.chunk(4)[rank] for each in pieces]
            )

        channels = (64, 32, 32)
        expected = {
            **{
                f"input.{name}": of_rank(f"input.{name}", (64, *channels, 8)) for name in ("weight.values", "bias")
            },
            **{name: of_rank(name, channels) for name in ("conv", "conv_bias")},
            **{name: of_rank(name, (8,)) for name in ("a_log", "d", "dt_bias")},
            "norm.weight": of_rank("norm.weight", (64,)),
            "output.weight.values": everything[mixer + "output.weight.values"].chunk(4, 1)[rank],
            "output.bias": everything[mixer + "output.bias"],
        }
        assert {mixer + name for name in expected} == {name for name in own if name.startswith(mixer)}
        for name, right in expected.items():
            assert torch.equal(own[mixer + name], right), name
        down = mixture + "shared.down.weight.values"
        assert torch.equal(own[down], everything[down].chunk(4, 1)[rank])


def test_a_view_of_the_file_is_taken_or_packed_parts_joined() -> None:
    """Rank 1 of 4: the second quarter of six rows to four, or of their columns."""
    stored, ranks = torch.arange(96).view(8, 12), Ranks(1, 4)

    def place(*shape: int) -> Filled:
        return Filled(torch.Size(shape), torch.float32, list)

    whole = place(8, 12)
    assert rank_part("x", stored, whole, place(8, 12), ranks) is stored
    for own, expected in ((place(2, 12), stored[2:4]), (place(4, 12), stored[:4]), (place(8, 3), stored[:, 3:6])):
        found = rank_part("x", stored, whole, own, ranks)
        assert torch.equal(found, expected)
        assert found.untyped_storage().data_ptr() == stored.untyped_storage().data_ptr()
    # Four heads and two of keys, in units of which a word or a block is.
    packed, own = Packed(place(8, 12), (64, 16, 16)), Packed(place(8, 4), (16, 8, 8))
    found = rank_part("x", stored, packed, own, Ranks(2, 4))
    assert torch.equal(found, stored[:, [4, 5, 9, 11]])
    for other in (place(8, 5), place(3, 12), place(4, 6), place(8, 4)):
        with pytest.raises(ModelError, match=r"tensor x of shape \[8, 12\] cannot be cut into parts of \[. *"):
            rank_part("x", stored, whole, other, ranks)
    own = Packed(place(8, 3), (16, 8, 8))
    with pytest.raises(ModelError, match=r"tensor x of shape \[8, 12\] cannot be cut into parts of \[8, 3\] for"):
        rank_part("x", stored, packed, own, ranks)


@pytest.mark.parametrize(
    "make", [checkpoints.llama, checkpoints.phi3, checkpoints.gpt_oss_in_mxfp4, checkpoints.qwen3_5]
)
def test_random_weights_are_those_of_one_rank(make: Callable[..., Any], tmp_path: Path) -> None:
    folder = checkpoints.write(make(vocab_size=DIVIDED), tmp_path)
    assert_same_logits(folder, 2, load_format="dummy")


def test_other_weights_in_place(tmp_path: Path) -> None:
    folders = [checkpoints.write(checkpoints.phi3(seed), tmp_path / str(seed)) for seed in (0, 1)]

    def work(ranks: Ranks) -> tuple[Tensor, Tensor]:
        model, config = load_model(folders[0], ranks=ranks)
        before = logits(model)
        reload_weights(model, config, folders[1], before_change=lambda: None)
        return before, logits(model)

    expected = [loaded_logits(folder) for folder in folders]
    for found in on_ranks(2, work):
        torch.testing.assert_close(found, tuple(expected), atol=1e-4, rtol=1e-5)


# --- quantised checkpoints ---

# Two ranks divide it between blocks and groups.
SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "head_dim": 128,
    "intermediate_size": 512,
    "initializer_range": 0.05,
    "num_attention_heads": 2,
}


def write_e4m3(form: str, make: Callable[..., Any] = checkpoints.llama, **changes: Any) -> Callable[[Path], Any]:
    return lambda folder: quantised_checkpoints.write(make(**{**SHAPE, **changes}), folder, form)


def write_int4(
    words: Int4Packing, make: Callable[..., Any] = checkpoints.llama, **changes: Any
) -> Callable[[Path], Any]:
    return lambda folder: int4_checkpoints.write(make(**{**SHAPE, **changes}), folder, words)


def write_hybrid(form: str, make: Callable[..., Any], **changes: Any) -> Callable[[Path], Any]:
    return lambda folder: test_hybrid.write_e4m3(make, folder, form, **{**SHAPE, **changes})


EXPERTS, SHARED = {"moe_intermediate_size": 256}, {"shared_expert_intermediate_size": 256}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 128, "shared_intermediate_size": 256}
SMALL_STATES = {**MAMBA2, "mamba_d_state": 16}  # groups are no layer's inputs
STEPS_OF_8 = {**MAMBA2, "mamba_n_heads": 16, "mamba_d_head": 32}
PACKED = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 512}
QUANTISED: dict[str, Callable[[Path], Any]] = {
    **{form: write_e4m3(form, attention_bias=True) for form in quantised_checkpoints.FORMATS},
    "fp8 blocks, packed": write_e4m3("fp8 blocks", checkpoints.phi3, **PACKED),
    "compressed channels, packed": write_e4m3("compressed channels", checkpoints.phi3, **PACKED),
    "fp8 blocks, experts": write_e4m3("fp8 blocks", checkpoints.qwen3_moe, **EXPERTS),
    "compressed channels, experts": write_e4m3("compressed channels", checkpoints.mixtral),
    "fp8 tensors, experts": write_e4m3("fp8 tensors", checkpoints.mixtral),
    "rows in another order": write_e4m3("compressed channels", checkpoints.glm4),
    **{words.value: write_int4(words, attention_bias=True) for words in Int4Packing},
    "awq, packed": write_int4(Int4Packing.AWQ, checkpoints.phi3, **PACKED),
    "gptq, packed": write_int4(Int4Packing.GPTQ, checkpoints.phi3, **PACKED),
    "pack-quantized, packed": write_int4(Int4Packing.COMPRESSED, checkpoints.phi3, **PACKED),
    "awq, experts": write_int4(Int4Packing.AWQ, checkpoints.qwen3_moe, **EXPERTS),
    "pack-quantized, experts": write_int4(Int4Packing.COMPRESSED, checkpoints.qwen3_moe, **EXPERTS),
    "compressed channels, Mamba-2": write_e4m3("compressed channels", checkpoints.granite4_hybrid, **MAMBA2),
    "pack-quantized, Mamba-2": write_int4(Int4Packing.COMPRESSED, checkpoints.granite4_hybrid, **SMALL_STATES),
    "gptq, Mamba-2": write_int4(Int4Packing.GPTQ, checkpoints.granite4_hybrid, **STEPS_OF_8),
    "fp8 blocks, delta nets": write_hybrid("fp8 blocks", checkpoints.qwen3_next, **EXPERTS, **SHARED),
    "compressed channels, delta nets": write_hybrid("compressed channels", checkpoints.qwen3_5),
}


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_checkpoints(name: str, tmp_path: Path) -> None:
    QUANTISED[name](tmp_path)
    assert_same_logits(tmp_path, 2)


@pytest.mark.parametrize("form", ["fp8 blocks", Int4Packing.AWQ, Int4Packing.COMPRESSED])
def test_heads_of_keys_that_four_ranks_hold_twice(form: str | Int4Packing, tmp_path: Path) -> None:
    changes = {"num_attention_heads": 4, "num_key_value_heads": 2}
    (write_int4 if isinstance(form, Int4Packing) else write_e4m3)(form, **changes)(tmp_path)  # type: ignore[operator]
    assert_same_logits(tmp_path, 4)


@pytest.mark.long_unless(kept=lambda given: given["name"] in list(QUANTISED)[::3])
@pytest.mark.parametrize("name", QUANTISED)
def test_parts_that_are_held_as_they_are_stored(name: str, tmp_path: Path) -> None:
    """Codes, scales and zeros of each rank mean what it has where they are dequantised."""
    require_interpreter()
    QUANTISED[name](tmp_path)
    for rank in range(2):
        load = partial(load_model, tmp_path, ranks=Ranks(rank, 2), dtype="float16")
        held, _ = load(impl="triton")
        plain, _ = load(impl="torch")
        for ours, theirs in zip(linear_weights(held), linear_weights(plain), strict=True):
            if ours.scale is not None and ours.zeros is None:
                values = dequantised_weight(ours.values, ours.scale).half()
            else:
                values = numbers_of(ours)
            assert torch.equal(values, theirs.values)
        assert any(weight.scale is not None for weight in linear_weights(held))


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *product(("olmo2", "glm4-moe", "gpt-oss in MXFP4"), (2, 4)),
        ("qwen3.5-moe", 2),
        ("lfm2 with biases, its size as it is", 2),
        ("granite4 hybrid, with rope, biases and one group", 2),
        ("nemotron-h, with biases and one group", 2),
    ],
)
def test_a_deterministic_model(name: str, size: int, tmp_path: Path) -> None:
    """The bits of a token's logits are those of another pass. Tables know which rank adds a bias."""
    make: Any = MODELS[name]
    inner = {"intermediate_size": 128} if name == "gpt-oss in MXFP4" else {}
    folder = checkpoints.write(make(num_attention_heads=4, vocab_size=DIVIDED, **inner), tmp_path)

    def work(ranks: Ranks) -> tuple[Tensor, Tensor]:
        model, _ = load_model(folder, ranks=ranks, deterministic=True)
        compare_all(model, PassLimits(4, 32), 32)
        for layer in model.modules():
            if isinstance(layer, Linear):
                has_bias = layer.bias is not None and (ranks.rank == 0 or not isinstance(layer, SummedLinear))
                assert layer.product is not None
                assert layer.product.table is not None
                assert layer.product.table.has_bias is has_bias
        session, ids = Session(model, model.config), prompt(40, 1)
        cold = session.run((0, ids, 0))[0]
        chunks = [session.run((1, ids[:end], start))[0] for start, end in ((0, 7), (7, 8), (8, 40))]
        return cold, torch.cat(chunks)

    first, *others = on_ranks(size, work)
    for cold, chunks in (first, *others):
        assert same_bits(cold, first[0])
        assert same_bits(chunks, cold)


# --- what is refused ---


def test_what_does_not_divide_is_named(tmp_path: Path) -> None:
    _, config = load_model(checkpoints.write(checkpoints.qwen3_moe(), tmp_path))
    for changes, size, message in (
        ({"num_heads": 14}, 4, "num_attention_heads 14 is not a multiple of tensor_parallel_size 4"),
        ({"num_heads": 12, "num_kv_heads": 6}, 4, "num_key_value_heads 6 is neither a multiple nor a divisor of "),
        ({"num_heads": 8, "num_kv_heads": 3}, 4, "num_key_value_heads 3 is neither a multiple nor a divisor of "),
        ({"intermediate_size": 50}, 4, "intermediate_size 50 is not a multiple of tensor_parallel_size 4"),
        ({"expert_size": 18}, 4, "moe_intermediate_size 18 is not a multiple of tensor_parallel_size 4"),
    ):
        with pytest.raises(ModelError, match=f"^{message}"):
            replace(config, **changes).for_ranks(size)
    _, hybrid = load_model(checkpoints.write(checkpoints.qwen3_5(), tmp_path / "hybrid"))
    for changes, message in (
        ({}, "linear_num_key_heads 2 is not a multiple of tensor_parallel_size 4"),
        ({"num_key_heads": 4, "num_value_heads": 6}, "linear_num_value_heads 6 is not a multiple of "),
    ):
        with pytest.raises(ModelError, match=f"^{message}"):
            replace(hybrid, **changes).for_ranks(4)
    for make, names in (
        (checkpoints.granite4_hybrid_moe, ("mamba_n_heads", "mamba_n_groups", "intermediate_size")),
        (checkpoints.nemotron_h_moe, ("mamba_num_heads", "n_groups", "shared_size")),
    ):
        _, mamba = load_model(checkpoints.write(make(), tmp_path / make.__name__))
        heads, groups, shared = names
        for changes, message in (
            ({"num_mamba_heads": 6}, f"{heads} 6 is not a multiple of tensor_parallel_size 4"),
            (
                {"num_mamba_heads": 12, "num_mamba_groups": 6},
                f"{groups} 6 is neither a multiple nor a divisor of ",
            ),
            (
                {"num_mamba_heads": 12, "num_mamba_groups": 3},
                f"{groups} 3 is neither a multiple nor a divisor of ",
            ),
            ({shared: 42}, f"{mamba.inner_sizes[shared]} 42 is not a multiple of "),
        ):
            with pytest.raises(ModelError, match=f"^{message}"):
                replace(mamba, **changes).for_ranks(4)
    assert config.for_ranks(1) == config


E4M3, INT4 = "weights in e4m3 are stored in units of", "weights in 4 bits are stored in units of"
REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "blocks of inner features": (
        write_e4m3("fp8 blocks", intermediate_size=384),
        f"intermediate_size gives a rank 192 of 384 features, but {E4M3} 128, which cannot be cut; "
        "tensor_parallel_size must be smaller",
    ),
    "blocks of heads": (
        write_e4m3("fp8 blocks", head_dim=64),
        f"num_attention_heads gives a rank 64 of 128 features, but {E4M3} 128,",
    ),
    "blocks of heads of keys": (
        write_e4m3("fp8 blocks", head_dim=64, num_attention_heads=4),
        f"num_key_value_heads gives a rank 64 of 128 features, but {E4M3} 128,",
    ),
    "blocks of experts": (
        write_e4m3("fp8 blocks", checkpoints.qwen3_moe, moe_intermediate_size=192),
        f"moe_intermediate_size gives a rank 96 of 192 features, but {E4M3} 128,",
    ),
    "groups": (
        write_int4(Int4Packing.COMPRESSED, intermediate_size=192),
        f"intermediate_size gives a rank 96 of 192 features, but {INT4} 128,",
    ),
    "words": (
        write_int4(Int4Packing.GPTQ, head_dim=4, num_attention_heads=64),
        f"num_key_value_heads gives a rank 4 of 8 features, but {INT4} 8,",
    ),
    "blocks of heads of a delta net's keys": (
        write_hybrid("fp8 blocks", checkpoints.qwen3_5, linear_key_head_dim=64),
        f"linear_num_key_heads gives a rank 64 of 128 features, but {E4M3} 128,",
    ),
    "blocks of heads of a delta net's values": (
        write_hybrid("fp8 blocks", checkpoints.qwen3_5, linear_value_head_dim=96),
        f"linear_num_value_heads gives a rank 192 of 384 features, but {E4M3} 128,",
    ),
    "blocks of groups of Mamba-2": (
        write_e4m3("fp8 blocks", checkpoints.granite4_hybrid, **{**MAMBA2, "mamba_d_state": 64}),
        f"mamba_n_groups gives a rank 64 of 128 features, but {E4M3} 128,",
    ),
    "blocks of heads of Mamba-2": (
        write_e4m3(
            "fp8 blocks",
            checkpoints.granite4_hybrid,
            **{**MAMBA2, "mamba_d_head": 48, "mamba_expand": 1, "hidden_size": 384},
        ),
        f"mamba_n_heads gives a rank 192 of 384 features, but {E4M3} 128,",
    ),
    "blocks of steps of Mamba-2": (
        write_e4m3("fp8 blocks", checkpoints.granite4_hybrid, **MAMBA2),
        f"mamba_n_heads gives a rank 4 of 8 features, but {E4M3} 128,",
    ),
    "words of steps of Mamba-2": (
        write_int4(Int4Packing.GPTQ, checkpoints.granite4_hybrid, **MAMBA2),
        f"mamba_n_heads gives a rank 4 of 8 features, but {INT4} 8,",
    ),
    "groups of MXFP4": (
        lambda folder: checkpoints.write(checkpoints.gpt_oss_in_mxfp4(intermediate_size=96), folder),
        "intermediate_size gives a rank 48 of 96 features, but MXFP4 is stored in units of 32,",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_units_are_not_cut(name: str, tmp_path: Path) -> None:
    write, message = REFUSED[name]
    write(tmp_path)
    with pytest.raises(ModelError, match=message):
        load_model(tmp_path, ranks=Ranks(0, 2))
    load_model(tmp_path)


def test_parts_of_words_that_need_none(tmp_path: Path) -> None:
    """compressed-tensors packs along inputs alone: heads of keys may be of four outputs."""
    write_int4(Int4Packing.COMPRESSED, head_dim=4, num_attention_heads=64)(tmp_path)
    assert_same_logits(tmp_path, 2)


def test_parts_of_groups_that_need_none(tmp_path: Path) -> None:
    """Heads of a delta net's keys are no layer's inputs: a rank may have 16 features of them."""
    sizes = {"linear_key_head_dim": 16, "linear_num_value_heads": 4, "linear_value_head_dim": 64}
    ignored = [f"model.layers.{layer}.linear_attn.in_proj_{part}" for layer in (0, 2) for part in "ba"]
    model = checkpoints.qwen3_5(**{**SHAPE, **sizes})
    int4_checkpoints.write(model, tmp_path, Int4Packing.COMPRESSED, ignore=["lm_head", *ignored])
    assert_same_logits(tmp_path, 2)
