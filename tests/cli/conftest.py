"""A Runtime of the built-in model in the place of those that commands make."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest

import radixrt
from radixrt.runtime import Runtime


@pytest.fixture(scope="module")
def builtin() -> Iterator[Runtime]:
    with Runtime(device="cpu", max_total_tokens=2048) as runtime:
        yield runtime


@pytest.fixture
def runtime(builtin: Runtime, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """What the command makes, its cache empty."""
    builtin.flush_cache()
    monkeypatch.setitem(vars(radixrt), "Runtime", lambda **options: nullcontext(builtin))
    return builtin
