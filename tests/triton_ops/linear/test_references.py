"""split_k_linear's reference against float64, and how it is cut."""

from __future__ import annotations

import pytest
import torch

from tests.support.random_tensors import random
from triton_ops.implementation import GPU, next_power_of_2
from triton_ops.linear.split_k_linear import split_k_linear
from triton_ops.tuning import MAX_PARTS, SPLIT_K_COLUMNS, SplitKConfig, row_blocks, split_k_config

pytestmark = pytest.mark.usefixtures("device")

H200 = GPU(capability=90, num_sms=132)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("depth", "part_depth"), [(96, 32), (80, 32), (32, 64)])
@pytest.mark.parametrize("num_rows", [0, 1, 19])
def test_each_part_sums_over_its_elements(num_rows: int, depth: int, part_depth: int, dtype: torch.dtype) -> None:
    x, weight = random(num_rows, depth, dtype=dtype), random(64, depth, dtype=dtype, seed=1)
    parts = split_k_linear(x, weight, SplitKConfig(16, 16, 2, part_depth))
    assert (parts.dtype, parts.shape) == (torch.float32, (-(-depth // part_depth), num_rows, 64))
    for p, part in enumerate(parts):
        inner = slice(p * part_depth, (p + 1) * part_depth)
        expected = x[:, inner].double() @ weight[:, inner].double().T
        torch.testing.assert_close(part.double(), expected, atol=1e-4, rtol=1e-5)


def test_what_cannot_be_cut_is_refused() -> None:
    config = SplitKConfig(16, 32, 2, 64)
    x, weight = random(3, 96, dtype=torch.float16), random(64, 96, dtype=torch.float16)
    for wrong, message in (
        (
            (x.float(), weight, config),
            r"must be float16 or bfloat16 both, but are torch.float32 and torch.float16",
        ),
        ((x.bfloat16(), weight, config), r"but are torch.bfloat16 and torch.float16"),
        ((x[:, :64], weight, config), r"weight must be contiguous \[N, 64\], but is \[64, 96\]"),
        ((x[:, :64], weight[:, :64], config), r"with strides \[96, 1\]"),
        ((x, weight[:48], config), r"\[48, 96\] and a part 64 deep: there must be a multiple of 64 rows"),
        ((x, weight, SplitKConfig(16, 64, 2, 64)), r"both depths must be multiples of 64"),
        ((x, weight, SplitKConfig(16, 32, 2, 48)), r"a part 48 deep: .* multiples of 32"),
    ):
        with pytest.raises(ValueError, match=message):
            split_k_linear(*wrong)


# rows, columns, depth: tile, stages and parts that were the fastest measured; None: not faster, or not tried.
MEASURED = {
    (16, 1024, 2048): (16, 128, 5, 8),
    (32, 1024, 2048): (32, 64, 5, 8),
    (64, 1024, 3072): (64, 64, 5, 8),
    (128, 1024, 3072): (64, 64, 5, 4),
    (256, 1024, 2048): (128, 64, 4, 4),
    (16, 4096, 4096): (16, 128, 5, 2),
    (32, 4096, 4096): (32, 64, 5, 4),
    (128, 4096, 4096): (128, 64, 4, 4),
    (16, 4096, 14_336): (16, 128, 3, 4),
    (64, 4096, 14_336): (64, 128, 5, 2),
    (256, 4096, 4096): None,
    (16, 4096, 1024): None,
    (16, 6144, 4096): None,
    (257, 1024, 2048): None,
}


@pytest.mark.parametrize("shape", MEASURED)
def test_configurations_are_those_that_were_measured(shape: tuple[int, int, int]) -> None:
    config = split_k_config(H200, *shape, torch.bfloat16)
    found = config and (config.rows, config.depth, config.stages, -(-shape[2] // config.part_depth))
    assert found == MEASURED[shape]


def test_other_cards_and_dtypes_have_no_configuration() -> None:
    shape = (16, 1024, 2048)
    assert split_k_config(H200, *shape, torch.float16) is not None
    assert split_k_config(H200, *shape, torch.float32) is None
    for capability in (80, 89, 100):
        assert split_k_config(GPU(capability, 132), *shape, torch.bfloat16) is None


def test_every_configuration_can_be_used() -> None:
    """Whatever the shape: parts that are not empty, of whole steps, and neither one nor too many."""
    found = 0
    for num_rows in (1, 16, 17, 64, 65, 129, 256, 300):
        for num_columns in range(64, 4500, 32):
            for depth in (1024, 2048, 2080, 2112, 2176, 2560, 3584, 4864, 8960, 9728, 14_336, 18_944):
                config = split_k_config(H200, num_rows, num_columns, depth, torch.bfloat16)
                if config is None:
                    continue
                found += 1
                assert (
                    num_columns % SPLIT_K_COLUMNS == depth % config.depth == config.part_depth % config.depth == 0
                )
                parts = -(-depth // config.part_depth)
                assert 2 <= parts <= MAX_PARTS
                num_warps = row_blocks(num_columns, torch.bfloat16, parts)[2]
                assert num_warps == next_power_of_2(num_warps), "Triton knows no others"
                programs = num_columns // SPLIT_K_COLUMNS * -(-num_rows // config.rows) * parts
                assert 64 <= programs <= 2 * H200.num_sms
    assert found > 500
