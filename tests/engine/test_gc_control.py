"""Tests of what the garbage collector leaves alone."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from radixrt.engine.gc_control import NEW_OBJECTS, old_objects_left_alone


class Cycle:
    def __init__(self) -> None:
        self.own = self


def garbage() -> weakref.ref[Cycle]:
    return weakref.ref(Cycle())


def test_only_new_garbage_is_collected_until_the_last_call_ends() -> None:
    gc.collect()
    gc.disable()  # but for ours
    try:
        old = garbage()
        with old_objects_left_alone():
            new = garbage()
            with old_objects_left_alone():
                gc.collect()
                assert new() is None
            gc.collect()
            assert old() is not None
        assert gc.get_freeze_count() == 0
        gc.collect()
        assert old() is None
    finally:
        gc.enable()


def test_what_somebody_else_has_frozen_stays_so() -> None:
    gc.collect()
    old = garbage()
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        for _ in range(2):
            # Some of them may die meanwhile, with a thread of a test before.
            with old_objects_left_alone(), old_objects_left_alone():
                assert count - 1000 < gc.get_freeze_count() <= count
            assert count - 1000 < gc.get_freeze_count() <= count
        gc.collect()
        assert old() is not None
    finally:
        gc.unfreeze()


def test_the_few_that_python_has_frozen_itself_are_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of Python 3.12, which has 375 when it starts."""
    frozen = 375
    monkeypatch.setattr(gc, "get_freeze_count", lambda: frozen)
    calls: list[str] = []
    monkeypatch.setattr(gc, "freeze", lambda: calls.append("freeze"))
    monkeypatch.setattr(gc, "unfreeze", lambda: calls.append("unfreeze"))
    with old_objects_left_alone():
        assert calls == ["freeze"]
    assert calls == ["freeze", "unfreeze"]
    frozen = 5000
    with old_objects_left_alone():
        pass
    assert calls == ["freeze", "unfreeze"]


def test_short_calls_do_not_put_off_full_collections_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixrt.engine.gc_control.CALLS_PER_COLLECTION", 5)
    gc.collect()
    old = [garbage() for _ in range(3)]
    for _ in range(5):
        with old_objects_left_alone():
            pass
    assert [reference() for reference in old] == [None] * 3


@pytest.mark.parametrize("threshold", [0, 700, 10**6])
def test_new_objects_are_looked_through_less_often_while_calls_are_in_progress(threshold: int) -> None:
    before = gc.get_threshold()
    gc.set_threshold(threshold, 7, 8)
    try:
        for _ in range(2):
            with old_objects_left_alone(), old_objects_left_alone():
                assert gc.get_threshold() == (max(NEW_OBJECTS, threshold) if threshold else 0, 7, 8)
            assert gc.get_threshold() == (threshold, 7, 8)
    finally:
        gc.set_threshold(*before)


def test_a_call_that_fails_or_is_left_early_ends_it() -> None:
    def calls() -> Iterator[int]:
        with old_objects_left_alone():
            yield 1

    call = calls()
    next(call)
    assert gc.get_freeze_count() > 0
    call.close()
    assert gc.get_freeze_count() == 0
    with pytest.raises(KeyError), old_objects_left_alone():
        raise KeyError
    assert gc.get_freeze_count() == 0
