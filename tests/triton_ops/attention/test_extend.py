"""Extend attention, in torch and by the kernels, against dense attention in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.attention_cases import packed_qkv
from tests.support.attention_checks import (
    BOTH,
    EACH,
    FEW_SHAPES,
    FEW_TREES,
    OPTIONS,
    SCALE,
    SHAPES,
    TREES,
    assert_matches,
    check_extend,
    check_shared_extend,
    extend,
    hide_new_tokens,
    interpreted_only,
    make_case,
    numbers,
    options_of,
    plain_or,
    random_tree,
    share,
)
from triton_ops.attention.arguments import Scoring
from triton_ops.attention.dense import dense_attention

pytestmark = pytest.mark.usefixtures("impl", "pool")


@interpreted_only(
    lambda given: (
        (given["head_dim"], given["group"]) in (FEW_SHAPES[2:] if given["pool"] == "plain" else ((80, 7),))
    )
)
@pytest.mark.parametrize(("head_dim", "group"), SHAPES)
def test_extend_matches_dense_attention(head_dim: int, group: int) -> None:
    case = make_case([9, 12, 1, 30, 21], head_dim=head_dim)
    check_extend(case, [0, 11, 0, 17, 1], group)


@plain_or(prefix=(1,))
@pytest.mark.parametrize(("length", "prefix"), [(130, 0), (130, 1), (130, 64), (130, 129), (1, 0), (2, 1)])
def test_extend_of_one_request(length: int, prefix: int) -> None:
    check_extend(make_case([length]), [prefix], 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_extend_in_half_precision(dtype: torch.dtype) -> None:
    check_extend(make_case([9, 40], dtype=dtype), [4, 0], 2, packed=True)


@pytest.mark.parametrize(("scattered", "interleaved"), [(False, False), (True, True)])
def test_extend_reads_a_packed_projection(scattered: bool, interleaved: bool) -> None:
    check_extend(make_case([9, 40], scattered=scattered, interleaved=interleaved), [4, 0], 2, packed=True)


def test_extend_with_padded_requests() -> None:
    """Requests of no new token, with and without a prefix."""
    case = make_case([0, 6, 5, 0])
    prefix_lens = [0, 2, 5, 0]
    keys, values = case.keys[1].clone(), case.values[1].clone()
    hide_new_tokens(case, prefix_lens)
    q, k, v = packed_qkv(4, 4, 2, 16)
    k, v = numbers(k, case.k_scale, k.dtype), numbers(v, case.v_scale, v.dtype)
    keys[2:] = k if case.k_scale is None else k * case.k_scale[:, None]
    values[2:] = v if case.v_scale is None else v * case.v_scale[:, None]
    assert_matches(extend(case, prefix_lens, q, k, v), dense_attention(q, keys, values, Scoring(SCALE))[0])


def test_extend_of_an_empty_batch() -> None:
    assert extend(make_case([]), [], *packed_qkv(0, 4, 2, 16)).shape == (0, 4, 16)


def test_extend_requests_do_not_disturb_one_another() -> None:
    case = make_case([9, 8, 7])
    q, k, v = packed_qkv(3, 4, 2, 16)
    clean = extend(case, [8, 7, 6], q, k, v)
    case.k_buffer[case.req_to_token[case.rows[1], 3].long()] = torch.nan
    out = extend(case, [8, 7, 6], q, k, v)
    assert out[1].isnan().any()
    assert torch.equal(out[[0, 2]], clean[[0, 2]])


@interpreted_only(lambda given: given["name"] in (FEW_TREES[1:] if given["pool"] == "plain" else FEW_TREES[:1]))
@pytest.mark.parametrize("name", TREES)
def test_extend_of_trees(name: str) -> None:
    """Leaves in no order; prefixes that end at their borders, and extends of one token."""
    edges, leaves = TREES[name]
    leaves = leaves[::2] + leaves[1::2]
    check_shared_extend(share(edges, leaves), edges, leaves, 2, seed=0)


@interpreted_only(lambda given: given["seed"] in ((1, 3) if given["pool"] == "plain" else (10,)))
@pytest.mark.parametrize("seed", range(12))
def test_extend_of_random_trees(seed: int) -> None:
    rng = np.random.default_rng(seed)
    edges, leaves = random_tree(rng, longest=40)
    dtype = (torch.float32, torch.float16)[rng.integers(2)]
    num_kv_heads, group = int(rng.integers(1, 3)), int(rng.choice([1, 3, 4, 8]))
    case = share(edges, leaves, dtype=dtype, num_kv_heads=num_kv_heads, head_dim=int(rng.choice([16, 24, 32])))
    names, heads = ("softcap 0.5", "sinks", "ALiBi"), group * num_kv_heads
    options = options_of(names[seed % 4], heads) if seed % 4 < 3 and heads <= 8 else {}
    check_shared_extend(case, edges, leaves, group, seed, **options)


# The last two: a token has more heads than a tile of the kernels has rows.
@interpreted_only(
    lambda given: (
        (given["head_dim"], given["group"])
        in (((80, 7), (128, 4)) if given["pool"] == "plain" else ((80, 7),))
    )
)
@pytest.mark.parametrize(("head_dim", "group"), [*SHAPES, (16, 40), (80, 24)])
def test_extend_of_trees_of_any_shape(head_dim: int, group: int) -> None:
    edges, leaves = [(-1, 20), (0, 17), (0, 3), (1, 2), (1, 9)], [2, 3, 4, 3]
    dtype = (torch.float32, torch.float16)[head_dim // 16 % 2]
    check_shared_extend(share(edges, leaves, head_dim=head_dim, dtype=dtype), edges, leaves, group, seed=2)


@plain_or(name=("softcap 0.5",))
@pytest.mark.parametrize("name", ["softcap 0.5", "sinks", "ALiBi"])
def test_extend_of_trees_with_options(name: str) -> None:
    edges, leaves = [(-1, 20), (0, 17), (0, 3), (1, 2), (1, 9)], [2, 3, 4, 3]
    check_shared_extend(share(edges, leaves), edges, leaves, 2, seed=3, **options_of(name, 4))


@interpreted_only(lambda given: given["name"] in (EACH if given["pool"] == "plain" else ("everything",)))
@pytest.mark.parametrize("name", OPTIONS)
def test_extend_with_options(name: str) -> None:
    check_extend(make_case([9, 12, 1, 30, 21, 90], head_dim=32), [0, 11, 0, 17, 1, 80], 4, **options_of(name, 8))
    check_extend(make_case([130]), [40], 2, packed=True, **options_of(name, 4))
    check_extend(make_case([130, 1, 7, 8, 64, 65]), [0] * 6, 1, **options_of(name, 2))


@plain_or(name=BOTH)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIONS)
def test_extend_with_options_in_half_precision(name: str, dtype: torch.dtype) -> None:
    """Several whole tiles of prefix and of new tokens; a few tokens on a prefix, which take short tiles."""
    check_extend(make_case([9, 320], dtype=dtype), [4, 210], 2, **options_of(name, 4))
    check_extend(make_case([230], dtype=dtype), [220], 2, **options_of(name, 4))


@interpreted_only(
    lambda given: given["name"] == "everything"
)
@pytest.mark.parametrize("name", OPTIONS)
def test_extend_of_a_few_tokens_on_a_long_prefix(name: str) -> None:
    """The kernel cuts the prefix among its programs."""
    check_extend(make_case([2100, 900], num_kv_heads=1, head_dim=32), [2090, 897], 8, **options_of(name, 8))
