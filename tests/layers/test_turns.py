"""Two halves of a pass in turn: in which order they compute and sum, and how they end."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

from layers.ranks import Ranks
from layers.turns import Turns
from tests.support.ranks import on_ranks

CPU = torch.device("cpu")


def half(turns: Turns, name: str, count: int, done: list[str], fails_at: int | None = None) -> Callable[[], str]:
    """Computes and sums `count` times, and notes what it does."""

    def compute() -> str:
        for nth in range(count):
            done.append(f"{name}{nth}")
            if nth == fails_at:
                raise ValueError(name)
            with turns.summing():
                done.append(f"sum {name}{nth}")
        done.append(f"{name} ends")
        return name

    return compute


def test_each_computes_up_to_its_next_sum() -> None:
    """The first one before the second one, until both have ended."""
    turns, done = Turns(CPU), list[str]()
    assert turns.computed(half(turns, "a", 3, done), half(turns, "b", 3, done)) == ("a", "b")
    each = [f"{kind}{name}{nth}" for nth in range(3) for name in "ab" for kind in ("", "sum ")]
    assert done == [*each, "a ends", "b ends"]
    assert not turns.are_taken


@pytest.mark.parametrize(("first", "second"), [(0, 2), (3, 0), (1, 4), (4, 2)])
def test_one_that_has_ended_leaves_all_turns_to_the_other(first: int, second: int) -> None:
    turns, done = Turns(CPU), list[str]()
    turns.computed(half(turns, "a", first, done), half(turns, "b", second, done))
    assert len(done) == 2 * (first + second) + 2


@pytest.mark.parametrize("fails_at", [0, 2])
@pytest.mark.parametrize("name", "ab")
def test_a_failure_of_one_ends_the_other(name: str, fails_at: int) -> None:
    """Which sums nothing more: other ranks would take that for the sum that has failed. Others begin anew."""
    turns, done = Turns(CPU), list[str]()
    a, b = (half(turns, each, 3, done, fails_at if each == name else None) for each in "ab")
    with pytest.raises(ValueError, match=name):
        turns.computed(a, b)
    assert done[-1] == f"{name}{fails_at}"
    assert not any(thread.name.startswith("radixrt-half") for thread in threading.enumerate())
    turns.computed(half(turns, "a", 1, done), half(turns, "b", 1, done))


def test_an_interrupt_of_the_half_that_waits_ends_the_other() -> None:
    """Ctrl-C comes to the thread that began both."""
    turns, done = Turns(CPU), list[str]()

    def second() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.2)  # until it has come
        half(turns, "b", 2, done)()

    with pytest.raises(KeyboardInterrupt):
        turns.computed(half(turns, "a", 2, done), second)
    assert done == ["a0", "sum a0", "b0", "sum b0"]


def test_an_interrupt_before_the_first_half_begins_ends_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would wait for its first turn for ever."""

    class Interrupted(ThreadPoolExecutor):
        def submit(self, *work: Any, **options: Any) -> NoReturn:
            super().submit(*work, **options)
            raise KeyboardInterrupt

    monkeypatch.setattr("layers.turns.ThreadPoolExecutor", Interrupted)
    turns, done = Turns(CPU), list[str]()
    with pytest.raises(KeyboardInterrupt):
        turns.computed(half(turns, "a", 2, done), half(turns, "b", 2, done))
    assert not done
    assert not turns.are_taken


def test_sums_are_those_of_the_group_and_of_the_same_halves_on_all_ranks() -> None:
    """Also where another kernel sums what is not of halves; without gradients, as in the thread that begins."""

    def work(ranks: Ranks) -> list[Tensor]:
        turns, own = Turns(CPU), ranks.rank + 1.0

        def compute(factor: float) -> Tensor:
            assert torch.is_inference_mode_enabled()
            ranks_in_turn = replace(ranks, turns=turns, peers=_Refusing())  # type: ignore[arg-type]
            found = [ranks_in_turn.summed(torch.full((3,), own * factor * nth)) for nth in range(1, 4)]
            added = ranks_in_turn.addend(torch.full((1, 3), own * factor))
            assert isinstance(added, Tensor)
            return torch.stack([*found, added[0]])

        return [*turns.computed(lambda: compute(1.0), lambda: compute(10.0))]

    for first, second in on_ranks(2, work):
        assert first[:, 0].tolist() == [3.0, 6.0, 9.0, 3.0]
        assert second[:, 0].tolist() == [30.0, 60.0, 90.0, 30.0]


class _Refusing:
    """A PeerSum that sums nothing."""

    def takes(self, part: Tensor) -> bool:
        raise AssertionError("of halves the group sums all")

    takes_rows = takes


# --- streams, as if there were a GPU ---


class Stream:
    """Notes what each operation comes after."""

    def __init__(self, device: object = None, priority: int = 0) -> None:
        del device, priority
        self.device, self.before = CPU, frozenset[str]()

    def launch(self, name: str, after: dict[str, frozenset[str]]) -> None:
        after[name] = self.before
        self.before |= {name}

    def wait_stream(self, other: Stream) -> None:
        self.before |= other.before

    def record_event(self) -> frozenset[str]:
        return self.before

    def wait_event(self, event: frozenset[str]) -> None:
        self.before |= event


class Cuda(threading.local):
    """The current stream, of each thread: the default one at first."""

    default = Stream()

    def __init__(self) -> None:
        self.current = self.default

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


@pytest.mark.parametrize("fails", [False, True])
def test_a_sum_is_made_beside_what_the_other_half_computes(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sum follows what it adds, and the sums before; what comes next in its half follows the sum."""
    cuda, after = Cuda(), dict[str, frozenset[str]]()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: cuda.current)
    monkeypatch.setattr(torch.cuda, "stream", cuda.stream)
    turns, own = Turns(torch.device("cuda")), Stream()

    def half(name: str, fails: bool = False) -> Callable[[], None]:
        def compute() -> None:
            for nth in range(4):
                cuda.current.launch(f"{name}{nth}", after)
                with turns.summing():
                    cuda.current.launch(f"sum {name}{nth}", after)
                if fails and nth == 2:
                    raise ValueError(name)

        return compute

    with cuda.stream(own), pytest.raises(ValueError, match="b") if fails else nullcontext():
        turns.computed(half("a"), half("b", fails))
    computed = [f"{name}{nth}" for nth in range(4) for name in "ab"][: 7 if fails else 8]
    sums = [f"sum {name}" for name in computed]
    assert own.before == {*sums, *computed}  # all that follows on this stream comes after all of it
    assert not cuda.default.before
    for nth, name in enumerate(computed):
        assert after[name] == {*computed[:nth], *sums[: max(0, nth - 1)]}  # not the other half's last sum
        assert after[f"sum {name}"] == {*computed[: nth + 1], *sums[:nth]}
