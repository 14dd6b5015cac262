"""A server whose model says what a test has it say, for frameworks of agents as clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from radixrt.runtime import Runtime
from tests.support.scripted import Script, scripted_runtime


@pytest.fixture(scope="package")
def told() -> Script:
    """What the model of `runtime` says: for `script`."""
    return Script()


@pytest.fixture(scope="package")
def runtime(told: Script, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    """In place of the built-in model, also for `serving`."""
    pytest.importorskip("llguidance", reason="llguidance is not installed: pip install 'radixrt[grammar]'")
    with scripted_runtime(tmp_path_factory.mktemp("model") / "scripted", told) as found:
        yield found


@pytest.fixture
def script(told: Script) -> Iterator[Script]:
    """What the model is to say in a test, which must have been said when the test ends."""
    told.says()
    yield told
    assert not told.texts
