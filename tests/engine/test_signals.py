"""SIGINT and SIGTERM: what they do inside of what must not be cut in two."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from radixrt.engine.signals import (
    FirstSignal,
    Interrupt,
    Interrupted,
    deferred,
    first_interrupt,
    handled_by,
    signal_of,
    termination_raises,
)

INT, TERM = signal.SIGINT, signal.SIGTERM


def handlers() -> tuple[Any, Any]:
    return signal.getsignal(INT), signal.getsignal(TERM)


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    """Each test leaves the handlers as they were, whatever it raises."""
    before = handlers()
    assert before == (signal.default_int_handler, signal.SIG_DFL)
    yield
    after = handlers()
    for number, handler in zip((INT, TERM), before, strict=True):
        signal.signal(number, handler)
    assert after == before


@pytest.mark.parametrize("first", [INT, TERM])
@pytest.mark.parametrize("second", [INT, TERM])
def test_the_first_is_noted_and_the_second_raises(
    first: int, second: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [5.0]
    monkeypatch.setattr("radixrt.engine.signals.time.monotonic", lambda: now[0])
    with first_interrupt("stopping") as interrupted:
        assert (interrupted.is_set(), interrupted.number, interrupted.age) == (False, None, 0.0)
        interrupted.notice = "really stopping"
        signal.raise_signal(first)
        now[0] = 7.5
        assert (interrupted.is_set(), interrupted.number, interrupted.age) == (True, first, 2.5)
        with pytest.raises(KeyboardInterrupt) as error:
            signal.raise_signal(second)
    assert signal_of(error.value) == second
    assert isinstance(error.value, Interrupted) == (second == TERM)
    assert capfd.readouterr().err == "\nreally stopping; Ctrl-C again stops at once\n"


def test_an_interrupt_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time changes nothing of how long ago it was, unless it is to be at once."""
    now = [5.0]
    monkeypatch.setattr("radixrt.engine.signals.time.monotonic", lambda: now[0])
    interrupt = Interrupt()
    assert (interrupt.is_set(), interrupt.age) == (False, 0.0)
    interrupt.set()
    now[0] = 6.0
    assert (interrupt.is_set(), interrupt.number, interrupt.age) == (True, INT, 1.0)
    interrupt.set(TERM)
    assert (interrupt.number, interrupt.age) == (TERM, 1.0)
    interrupt.set(at_once=True)
    assert interrupt.age == float("inf")


def test_a_handler_of_the_application_stays() -> None:
    calls: list[int] = []
    signal.signal(TERM, lambda number, frame: calls.append(number))
    own = signal.getsignal(TERM)
    try:
        with first_interrupt("") as interrupted:
            assert signal.getsignal(TERM) is own
            signal.raise_signal(TERM)
            assert not interrupted.is_set()
            signal.raise_signal(INT)  # the other one is ours all the same
            assert interrupted.number == INT
            with deferred():
                signal.raise_signal(TERM)
                assert calls == [TERM]
            assert calls == [TERM, TERM]
        with termination_raises():
            assert signal.getsignal(TERM) is own
        assert signal.getsignal(TERM) is own
    finally:
        signal.signal(TERM, signal.SIG_DFL)


def test_what_is_ignored_stays_ignored() -> None:
    signal.signal(TERM, signal.SIG_IGN)
    signal.signal(INT, signal.SIG_IGN)
    try:
        with termination_raises(), first_interrupt("") as interrupted, deferred():
            assert handlers() == (signal.SIG_IGN, signal.SIG_IGN)
            signal.raise_signal(TERM)
            signal.raise_signal(INT)
            assert not interrupted.is_set()
        assert handlers() == (signal.SIG_IGN, signal.SIG_IGN)
    finally:
        signal.signal(TERM, signal.SIG_DFL)
        signal.signal(INT, signal.default_int_handler)


def test_an_interrupt_that_the_application_handles_is_its_own_at_the_second() -> None:
    calls: list[int] = []
    signal.signal(INT, lambda number, frame: calls.append(number))
    try:
        with first_interrupt("") as interrupted:
            signal.raise_signal(INT)
            assert (interrupted.number, calls) == (INT, [])
            signal.raise_signal(INT)
            assert calls == [INT]
    finally:
        signal.signal(INT, signal.default_int_handler)


@pytest.mark.parametrize("number", [INT, TERM])
def test_held_up_to_the_end(number: int) -> None:
    done = []

    def work() -> None:
        with deferred(), deferred():
            signal.raise_signal(number)
            signal.raise_signal(number)
            done.append(True)

    with termination_raises(), pytest.raises(KeyboardInterrupt) as error:
        work()
    assert signal_of(error.value) == number
    assert done


@pytest.mark.parametrize("number", [INT, TERM])
def test_the_third_one_is_not_held_up(number: int) -> None:
    def work() -> None:
        with deferred():
            signal.raise_signal(INT)
            signal.raise_signal(TERM)
            signal.raise_signal(number)
            pytest.fail("it was held up")

    with termination_raises(), pytest.raises(KeyboardInterrupt) as error:
        work()
    assert signal_of(error.value) == number


def test_held_up_and_then_noted() -> None:
    with first_interrupt("") as interrupted:
        with deferred():
            signal.raise_signal(TERM)
            assert not interrupted.is_set()
        assert interrupted.number == TERM
        with pytest.raises(Interrupted), deferred():
            signal.raise_signal(TERM)


def test_an_exception_inside_is_what_comes_out() -> None:
    def work() -> None:
        with deferred():
            signal.raise_signal(INT)
            raise ValueError("mine")

    with first_interrupt("") as interrupted:
        with pytest.raises(ValueError, match="mine"):
            work()
        assert not interrupted.is_set()


def test_a_handler_for_all_but_what_is_ignored() -> None:
    numbers: list[int] = []
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        for expected in ([INT, TERM], [INT, TERM, signal.SIGHUP]):
            numbers.clear()
            with handled_by(lambda number, frame: numbers.append(number)):
                for number in (INT, TERM, signal.SIGHUP):
                    signal.raise_signal(number)
            assert numbers == expected
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_sigterm_without_a_handler_is_not_held_up() -> None:
    with deferred():
        assert signal.getsignal(TERM) is signal.SIG_DFL


def test_handlers_are_whole_whatever_a_signal_raises_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that comes while handlers are put in place, or back."""
    set_handler = signal.signal
    for at in range(1, 9):
        calls = 0

        def interrupted(number: int, handler: Any, at: int = at) -> Any:
            nonlocal calls
            calls += 1
            before = set_handler(number, handler)
            if calls == at:
                raise KeyboardInterrupt
            return before

        with termination_raises(), monkeypatch.context() as patch:
            inside = handlers()
            patch.setattr(signal, "signal", interrupted)
            try:
                with deferred():
                    pass
                with first_interrupt(""):
                    pass
            except KeyboardInterrupt:
                pass
            assert (calls >= at) == (at <= 8)
            assert handlers() == inside, at


def test_outside_the_main_thread() -> None:
    before, seen = handlers(), []

    def work() -> None:
        with termination_raises(), first_interrupt("") as interrupted, deferred():
            seen.append((handlers(), type(interrupted)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(before, FirstSignal)]


def test_the_second_signal_is_the_second_whoever_puts_the_handler_back() -> None:
    """As what holds signals up does if the first one comes while it looks who handles them."""
    with first_interrupt("stopping") as first:
        handler = signal.getsignal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert first.is_set()
        signal.signal(signal.SIGINT, handler)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
