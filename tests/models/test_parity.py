"""Logits of our decoders against transformers: cold, cached, chunked, and mixed with decodes in one pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from memory_pool.state_pool import StatePool
from radixrt.errors import ParameterError
from radixrt.models.config import ModelConfig
from radixrt.models.decoder import Decoder
from radixrt.models.loader import load_model
from tests.support import checkpoints
from tests.support.input_metadata import input_metadata
from triton_ops.attention.plan import AttentionPlan
from triton_ops.implementation import runs_triton
from triton_ops.kv.view import KVView

MODELS: dict[str, Callable[[], Any]] = {
    "llama": checkpoints.llama,
    "llama3 rope, tied": partial(
        checkpoints.llama, rope_parameters=checkpoints.LLAMA3_ROPE, tie_word_embeddings=True
    ),
    "llama with biases": partial(checkpoints.llama, attention_bias=True, mlp_bias=True),
    "llama, heads wider than hidden": partial(checkpoints.llama, head_dim=16, num_key_value_heads=1),
    "llama without groups": partial(checkpoints.llama, num_key_value_heads=4),
    "qwen3": checkpoints.qwen3,
    "qwen3, tied, with biases": partial(checkpoints.qwen3, tie_word_embeddings=True, attention_bias=True),
    "qwen3 with a window in its second layer": partial(
        checkpoints.qwen3, use_sliding_window=True, sliding_window=checkpoints.WINDOW, max_window_layers=1
    ),
    "linear rope": partial(checkpoints.llama, rope_parameters=checkpoints.LINEAR_ROPE),
    "dynamic rope": partial(checkpoints.llama, rope_parameters=checkpoints.DYNAMIC_ROPE),
    "yarn rope": partial(checkpoints.qwen3, rope_parameters=checkpoints.YARN_ROPE),
    "yarn rope, mscale": partial(
        checkpoints.llama,
        rope_parameters={**checkpoints.YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False},
    ),
    "long rope, short": partial(
        checkpoints.phi3, rope_parameters=checkpoints.LONG_ROPE, original_max_position_embeddings=256
    ),
    "phi4-mini": partial(checkpoints.phi3, seed=1, **checkpoints.PHI4_MINI, original_max_position_embeddings=256),
    "qwen2": checkpoints.qwen2,
    "mistral": checkpoints.mistral,
    "mistral without a window": partial(checkpoints.mistral, sliding_window=None),
    "ministral3": checkpoints.ministral3,
    "ministral3, the text of a model with images": partial(
        checkpoints.ministral3_with_images, tie_word_embeddings=True
    ),
    "phi3": partial(checkpoints.phi3, sliding_window=checkpoints.WINDOW),
    "phi3, partial rotary": partial(
        checkpoints.phi3, rope_parameters={"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}
    ),
    "olmo2": checkpoints.olmo2,
    "olmo3": checkpoints.olmo3,
    "granite": checkpoints.granite,
    "granite4": partial(checkpoints.granite4, tie_word_embeddings=True),
    "granite4 without positions": partial(
        checkpoints.granite4, position_embedding_type="nope", attention_bias=True
    ),
    "granite4 hybrid": checkpoints.granite4_hybrid,
    "granite4 hybrid, with rope, biases and one group": partial(
        checkpoints.granite4_hybrid,
        position_embedding_type="rope",
        mamba_n_groups=1,
        mamba_proj_bias=True,
        mamba_conv_bias=False,
        tie_word_embeddings=True,
    ),
    "granite4 hybrid, moe": checkpoints.granite4_hybrid_moe,
    "nemotron-h": checkpoints.nemotron_h,
    "nemotron-h, moe": checkpoints.nemotron_h_moe,
    "nemotron-h, with biases and one group": partial(
        checkpoints.nemotron_h, use_bias=True, mlp_bias=True, use_conv_bias=False, n_groups=1
    ),
    "glm4": checkpoints.glm4,
    "glm4-moe": checkpoints.glm4_moe,
    "glm4-moe, groups": partial(
        checkpoints.glm4_moe,
        n_routed_experts=12,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=4,
        n_shared_experts=2,
        norm_topk_prob=False,
        use_qk_norm=False,
        attention_bias=False,
        num_hidden_layers=2,
    ),
    "exaone4": checkpoints.exaone4,
    "exaone4 without windows": partial(
        checkpoints.exaone4,
        sliding_window=None,
        layer_types=["full_attention"] * 2,
        rope_parameters=checkpoints.LLAMA3_ROPE,
        tie_word_embeddings=True,
    ),
    "ernie4.5": checkpoints.ernie4_5,
    "ernie4.5 with biases": partial(checkpoints.ernie4_5, use_bias=True, tie_word_embeddings=False),
    "hunyuan": partial(checkpoints.hunyuan, tie_word_embeddings=True),
    "hunyuan, yarn rope, with biases": partial(
        checkpoints.hunyuan, rope_parameters=checkpoints.YARN_ROPE, attention_bias=True
    ),
    "seed-oss": checkpoints.seed_oss,
    "seed-oss, a bias on the output alone": partial(
        checkpoints.seed_oss, attention_bias=False, attention_out_bias=True
    ),
    "seed-oss without biases": partial(checkpoints.seed_oss, attention_bias=False, mlp_bias=True),
    "swish": partial(checkpoints.llama, hidden_act="swish"),
    "gelu_new": partial(checkpoints.llama, hidden_act="gelu_new"),
    "gelu_fast": partial(checkpoints.gemma2, hidden_activation="gelu_fast"),
    "smollm3": checkpoints.smollm3,
    "gemma2": checkpoints.gemma2,
    "gemma3": checkpoints.gemma3,
    "mixtral": checkpoints.mixtral,
    "qwen3-moe": checkpoints.qwen3_moe,
    "qwen3-next": checkpoints.qwen3_next,
    "qwen3-next, as many heads of keys as of values": partial(
        checkpoints.qwen3_next, linear_num_value_heads=2, norm_topk_prob=False, mlp_only_layers=[]
    ),
    "qwen3.5": checkpoints.qwen3_5,
    "qwen3.5, tied, with biases": partial(checkpoints.qwen3_5, tie_word_embeddings=True, attention_bias=True),
    "qwen3.5-moe": checkpoints.qwen3_5_moe,
    "qwen3.5, the text of a model with images": partial(checkpoints.qwen3_5_with_images, tie_word_embeddings=True),
    "qwen3.5-moe, the text of a model with images": checkpoints.qwen3_5_moe_with_images,
    "lfm2": checkpoints.lfm2,
    "lfm2 with biases, its size as it is": partial(
        checkpoints.lfm2,
        conv_bias=True,
        conv_L_cache=3,
        block_auto_adjust_ff_dim=False,
        tie_word_embeddings=False,
    ),
    "lfm2-moe": checkpoints.lfm2_moe,
    "lfm2-moe with biases, not renormalised": partial(
        checkpoints.lfm2_moe, conv_bias=True, norm_topk_prob=False, num_dense_layers=0
    ),
    "gpt-oss": checkpoints.gpt_oss,
    "gpt-oss without groups and windows": partial(
        checkpoints.gpt_oss, num_key_value_heads=6, layer_types=["full_attention"] * 2
    ),
    "gpt-oss in MXFP4": checkpoints.gpt_oss_in_mxfp4,
    "gemma3, the text of a model with images": checkpoints.gemma3_with_images,
    "mistral, the text of a model with images": checkpoints.mistral_with_images,
    "qwen2.5-vl, text": checkpoints.qwen2_vl,
    "qwen3-vl, text": partial(checkpoints.qwen3_vl, tie_word_embeddings=True),
    "qwen3-vl-moe, text": checkpoints.qwen3_vl_moe,
    "qwen3-moe, renormalised": partial(checkpoints.qwen3_moe, norm_topk_prob=True, mlp_only_layers=[]),
}


# Where transformers computes frequencies during the pass, in float32 and on the device.
ROUGHLY = 2e-4


class Session:
    """A model, a pool whose unused slots hold NaN, and rows of scattered slots. Where the model keeps states, the
    one after each request's tokens is kept, for whoever goes on from there.
    """

    def __init__(self, model: Decoder, config: ModelConfig, *, max_requests: int = 4, max_len: int = 96) -> None:
        self.model = model
        slots = torch.randperm(max_requests * max_len, generator=torch.Generator().manual_seed(0)) + 1
        self.req_to_token = slots.view(max_requests, max_len).int()
        layout = model.kv_layout(torch.float32)
        shape = (2, layout.tokens[0].num_layers, slots.numel() + 1, config.num_kv_heads, config.head_dim)
        self.kv, self.states = torch.full(shape, torch.nan), None
        self._state_after: dict[tuple[int, ...], int] = {(): 0}
        if layout.sequences:
            self.states = StatePool(32, layout.sequences, device=torch.get_default_device())
            self.states.fill(torch.nan)

    def view(self, layer_id: int, req_to_token: Tensor) -> KVView:
        return KVView(*self.kv[:, layer_id], req_to_token)

    def run(
        self,
        *requests: tuple[int, list[int], int],
        num_extends: int | None = None,
        plan: AttentionPlan | None = None,
    ) -> list[Tensor]:
        """Logits of all new tokens of (row, tokens so far, how many of them have their KV in the pool)."""
        metadata = input_metadata(
            [row for row, _, _ in requests],
            [len(ids) for _, ids, _ in requests],
            [prefix for _, _, prefix in requests],
            torch.cat([self.req_to_token[row, prefix : len(ids)] for row, ids, prefix in requests]).cpu().numpy(),
            self.req_to_token,
            num_extends=num_extends,
            plan=plan,
            kv_pool=self,
            states=None if self.states is None else self._states_of(requests),
            state_pool=self.states,
        )
        new_ids = [token for _, ids, prefix in requests for token in ids[prefix:]]
        hidden = self.model(torch.tensor(new_ids, dtype=torch.int32), metadata)
        assert hidden.shape == (len(new_ids), self.model.config.hidden_size)
        every = torch.arange(len(new_ids), dtype=torch.int32)
        logits = self.model.compute_logits(hidden, every)
        indices = metadata.extend_start_loc + metadata.extend_seq_lens - 1
        last = self.model.compute_logits(hidden, indices)
        assert_close(last, logits[indices.long()])
        return list(logits.split([len(ids) - prefix for _, ids, prefix in requests]))

    def _states_of(self, requests: tuple[tuple[int, list[int], int], ...]) -> tuple[list[int], list[int]]:
        """The states that requests begin with, and others that they leave."""
        assert self.states is not None
        begun = [self._state_after[tuple(ids[:prefix])] for _, ids, prefix in requests]
        left = self.states.allocator.alloc(len(requests))
        assert left is not None
        for (_, ids, _), state in zip(requests, left.tolist(), strict=True):
            self._state_after[tuple(ids)] = state
        return begun, left.tolist()


@pytest.fixture(scope="module", params=MODELS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, device: torch.device
) -> tuple[Any, Decoder, ModelConfig]:
    with torch.device("cpu"):  # the same weights on every device
        reference = MODELS[request.param]()
    reference.to(device)
    folder = checkpoints.write(reference, tmp_path_factory.mktemp("model"))
    model, config = load_model(folder, device=torch.get_default_device())
    assert runs_triton(model.placement.impl, device) == (device.type == "cuda"), "kernels on a GPU"
    return reference, model, config


@pytest.fixture
def session(pair: tuple[Any, Decoder, ModelConfig]) -> Session:
    return Session(*pair[1:])


@pytest.fixture
def reference(pair: tuple[Any, Decoder, ModelConfig]) -> Callable[[list[int]], Tensor]:
    return partial(dense, pair[0])


def dense(reference: Any, ids: list[int]) -> Tensor:
    """The logits of all tokens, by transformers."""
    reference.to(torch.get_default_device())
    with torch.no_grad():
        out: Tensor = reference(torch.tensor([ids])).logits[0]
    return out


def prompt(length: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, checkpoints.VOCAB_SIZE, length)]


def assert_close(ours: Tensor, theirs: Tensor, *, atol: float = 2e-5) -> None:
    if ours.device.type != "cpu":  # a GPU adds up in another order: 2.2e-5 was seen with experts
        atol = max(atol, 5e-5)
    # Sums of float16 are rounded to 11 bits, which is not the same after another order.
    rtol = 1e-5 if ours.dtype == torch.float32 else 2e-3
    torch.testing.assert_close(ours, theirs, atol=atol, rtol=rtol)


def test_cold(session: Session, reference: Callable[[list[int]], Tensor]) -> None:
    a, b, c = prompt(60, 1), prompt(1, 2), prompt(17, 3)
    for ours, ids in zip(session.run((2, a, 0), (0, b, 0), (3, c, 0)), (a, b, c), strict=True):
        assert_close(ours, reference(ids))


def test_cached_prefix(session: Session, reference: Callable[[list[int]], Tensor]) -> None:
    """A second request reads the slots of the first one's prefix."""
    a = prompt(50, 1)
    b = a[:33] + prompt(20, 4)
    session.run((0, a[:33], 0))
    session.run((0, a, 33))
    session.req_to_token[1, :33] = session.req_to_token[0, :33]
    (ours,) = session.run((1, b, 33))
    assert_close(ours, reference(b)[33:])


def test_chunked(session: Session, reference: Callable[[list[int]], Tensor]) -> None:
    a = prompt(64, 5)
    ours = torch.cat([session.run((1, a[:end], start))[0] for start, end in ((0, 7), (7, 8), (8, 40), (40, 64))])
    assert_close(ours, reference(a))


def test_extends_and_decodes_of_one_pass(session: Session, reference: Callable[[list[int]], Tensor]) -> None:
    """A chunk, a cold prompt and two decodes together; greedy tokens feed the decodes for some steps."""
    a, b, c, d = prompt(40, 6), prompt(9, 7), prompt(30, 8), prompt(70, 9)
    session.run((0, a[:15], 0), (1, c, 0), (3, d, 0))
    c, d = [*c, int(reference(c)[-1].argmax())], [*d, int(reference(d)[-1].argmax())]
    logits = session.run((0, a, 15), (2, b, 0), (1, c, len(c) - 1), (3, d, len(d) - 1), num_extends=2)
    for ours, ids in zip(logits, (a, b, c, d), strict=True):
        assert_close(ours, reference(ids)[-len(ours) :])
    for _ in range(4):
        c, d = [*c, int(logits[-2].argmax())], [*d, int(logits[-1].argmax())]
        logits = session.run((1, c, len(c) - 1), (3, d, len(d) - 1), num_extends=0)
        for ours, ids in zip(logits, (c, d), strict=True):
            assert_close(ours, reference(ids)[-1:])


def test_decodes_of_a_shared_plan(session: Session, reference: Callable[[list[int]], Tensor]) -> None:
    """The prefix is one item for both rows."""
    prefix = prompt(40, 10)
    a, b = prefix + prompt(6, 11), prefix + prompt(3, 12)
    session.run((0, prefix, 0))
    session.run((0, a[:-1], 40))
    session.req_to_token[1, :40] = session.req_to_token[0, :40]
    session.run((1, b[:-1], 40))
    items = ([0, 0, 1], [0, 40, 40], [40, 6, 3], [0, 0, 1], [2, 1, 1])
    plan = AttentionPlan.of_items(*items, [46, 43]).to(torch.get_default_device())
    logits = session.run((0, a, 45), (1, b, 42), num_extends=0, plan=plan)
    for ours, ids in zip(logits, (a, b), strict=True):
        assert_close(ours, reference(ids)[-1:])


def test_a_wrong_context_changes_the_greedy_tokens(
    session: Session, reference: Callable[[list[int]], Tensor]
) -> None:
    """What makes the tests above worth something: one wrong slot, token, position or layer shows."""
    a = prompt(50, 1)
    right = reference(a).argmax(-1)

    def wrong_tokens(ours: Tensor) -> int:
        return int((ours.argmax(-1) != right[30 : 30 + len(ours)]).sum())

    session.run((0, a[:30], 0))
    assert wrong_tokens(session.run((0, a, 30))[0]) == 0
    swapped = session.req_to_token.clone()
    session.req_to_token[0, [22, 27]] = swapped[0, [27, 22]]
    # Two tokens: no window ends between the two slots.
    assert wrong_tokens(session.run((0, a[:32], 30))[0]) == 0, "attention has no order: positions are in the keys"
    session.req_to_token[0, 22] = session.req_to_token[0, 27]
    assert wrong_tokens(session.run((0, a, 30))[0]) > 0, "one wrong slot of thirty"
    session.req_to_token.copy_(swapped)
    session.kv[1, 0, session.req_to_token[0, 23:27].long()] = 0.0
    assert wrong_tokens(session.run((0, a, 30))[0]) > 0, "four V of one layer lost"
    session.run((0, a[:30], 0))
    assert wrong_tokens(session.run((0, a[:30] + a[31:], 30))[0]) > 0, "one token left out"


@pytest.mark.usefixtures("device")
def test_what_lies_before_a_window_is_not_read(tmp_path: Path) -> None:
    """Extended and decoded from position 30: the slots of what it does not see may hold NaN."""
    folder = checkpoints.write(checkpoints.mistral(), tmp_path)
    session, a = Session(*load_model(folder, device=torch.get_default_device())), prompt(40, 1)
    session.run((0, a, 0))
    first = 30 - checkpoints.WINDOW + 1
    for ids, num_extends in ((a, 1), (a[:31], 0)):
        (expected,) = session.run((0, ids, 30), num_extends=num_extends)
        kept = session.kv.clone()
        session.kv[:, :, session.req_to_token[0, :first].long()] = torch.nan
        assert torch.equal(session.run((0, ids, 30), num_extends=num_extends)[0], expected)
        session.kv[:, :, session.req_to_token[0, first].long()] = 1.0
        assert not torch.allclose(session.run((0, ids, 30), num_extends=num_extends)[0][0], expected[0])
        session.kv.copy_(kept)


@pytest.mark.usefixtures("device")
def test_dynamic_rope_in_a_longer_context(tmp_path: Path) -> None:
    """Beyond the original length: theta is that of transformers for a full context, at every length.

    So a sequence that fills the context equals transformers', and a shorter one equals a model with that theta.
    """
    reference = checkpoints.llama(max_position_embeddings=16, rope_parameters=checkpoints.DYNAMIC_ROPE)
    folder = checkpoints.write(reference, tmp_path)
    session = Session(*load_model(folder, device=torch.get_default_device(), context_length=60))
    a = prompt(60, 1)
    (ours,) = session.run((0, a, 0))
    assert_close(ours, dense(reference, a), atol=ROUGHLY)
    # A head has 8 elements: theta grows by (factor * 60 / 16 - (factor - 1)) ^ (8 / 6).
    theta = 10000.0 * (4.0 * 60 / 16 - 3.0) ** (8 / 6)
    fixed = checkpoints.llama(rope_parameters={"rope_type": "default", "rope_theta": theta})
    for name, parameter in reference.state_dict().items():
        assert torch.equal(fixed.state_dict()[name], parameter), "the same seed, the same weights"
    chunks = [session.run((1, a[:end], start))[0] for start, end in ((0, 7), (7, 40))]
    assert_close(torch.cat(chunks), dense(fixed, a[:40]))
    with pytest.raises(ParameterError, match="context_length is 65; it must be a whole number from 2 to 64"):
        load_model(folder, context_length=65)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": checkpoints.LONG_ROPE},
        checkpoints.PHI4_MINI,
    ],
    ids=["phi3", "phi4-mini"],
)
def test_long_rope_follows_the_context_length(changes: dict[str, Any], tmp_path: Path) -> None:
    """Beyond the original length all sequences have the long factors, up to it the short ones."""
    reference = checkpoints.phi3(**changes, original_max_position_embeddings=16)
    folder, a = checkpoints.write(reference, tmp_path), prompt(60, 1)
    longer = Session(*load_model(folder, device=torch.get_default_device()))
    chunks = [longer.run((1, a[:end], start))[0] for start, end in ((0, 7), (7, 60))]
    assert_close(torch.cat(chunks), dense(reference, a), atol=ROUGHLY)
    shorter = Session(*load_model(folder, device=torch.get_default_device(), context_length=16))
    assert_close(shorter.run((0, a[:16], 0))[0], dense(reference, a[:16]))
    assert not torch.allclose(longer.run((0, a[:16], 0))[0], dense(reference, a[:16]), atol=0.1)


@pytest.mark.parametrize(
    "family", ["llama", "gemma2", "olmo2", "mixtral", "qwen3.5", "qwen3-next", "lfm2", "granite4 hybrid"]
)
def test_bfloat16_keeps_close(family: str, tmp_path: Path, device: torch.device) -> None:
    """Our bfloat16 logits are no farther from float32's than twice transformers' own."""
    reference = MODELS[family]()
    folder = checkpoints.write(reference, tmp_path)
    model, config = load_model(folder, dtype="bfloat16", device=device)
    session, ids = Session(model, config), prompt(40, 1)
    session.kv = session.kv.bfloat16()
    (ours,) = session.run((0, ids, 0))
    assert ours.dtype == torch.bfloat16
    with torch.no_grad():
        exact = reference(torch.tensor([ids])).logits[0]
        theirs = reference.bfloat16()(torch.tensor([ids])).logits[0]
    assert (ours - exact).abs().mean() <= 2 * (theirs - exact).abs().mean()
