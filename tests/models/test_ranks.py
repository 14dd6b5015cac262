"""Models that ranks hold together: the logits of one rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from layers.ranks import ALONE, Ranks
from radixrt.models.loader import load_model
from tests.models.test_parity import MODELS, Session, prompt
from tests.support import checkpoints
from tests.support.ranks import on_ranks


def logits(folder: Path, ranks: Ranks = ALONE, **options: Any) -> Tensor:
    """Of all tokens of two requests: cold, then a chunk and a decode."""
    model, _ = load_model(folder, ranks=ranks, **options)
    session = Session(model, model.config)
    a, b = prompt(23, 1), prompt(9, 2)
    found = session.run((1, a[:17], 0), (0, b[:8], 0))
    found += session.run((1, a, 17), (0, b, 8), num_extends=1)
    return torch.cat(found)


def assert_equal_on_ranks(folder: Path, size: int, **options: Any) -> None:
    expected = logits(folder, **options)
    first, *others = on_ranks(size, partial(logits, folder, **options))
    assert all(torch.equal(other, first) for other in others)
    torch.testing.assert_close(first, expected, atol=1e-4, rtol=1e-5)
    assert torch.equal(first.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["llama", "qwen3", "llama3 rope, tied"])
def test_families(name: str, size: int, tmp_path: Path) -> None:
    checkpoints.write(MODELS[name](), tmp_path)
    assert_equal_on_ranks(tmp_path, size)
