"""Pauses in long loops."""

from __future__ import annotations

import pytest

from radixrt.pauses import BETWEEN, with_pauses


def test_a_pause_after_every_few(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    pauses: list[int] = []
    monkeypatch.setattr("radixrt.pauses.time.sleep", lambda seconds: pauses.append(len(seen)))
    for number in with_pauses(range(2 * BETWEEN + 3)):
        seen.append(number)
    assert seen == list(range(2 * BETWEEN + 3))
    assert pauses == [BETWEEN, 2 * BETWEEN]
