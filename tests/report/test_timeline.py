"""The timeline of a run: bounded, whatever comes."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from radixrt.report.timeline import MAX_SAMPLES, Sample, Timeline, columns


def sample(seconds: float, finished: int = 0) -> Sample:
    return Sample(seconds, finished, 0, 0, 0, 0, 0, 0, 0, 0, 0)


@given(
    gaps=st.lists(st.floats(0, 100), max_size=200),
    most=st.integers(1, 10).map(lambda half: 2 * half),
    interval=st.floats(0.01, 50),
)
def test_a_timeline_is_thinned_and_stays_in_order(gaps: list[float], most: int, interval: float) -> None:
    timeline = Timeline(most, interval)
    offered: list[Sample] = []
    seconds = 0.0
    for number, gap in enumerate(gaps):
        seconds += gap
        if timeline.is_due(seconds):
            offered.append(sample(seconds, number))
            timeline.add(offered[-1])
            assert timeline.samples[-1] is offered[-1]
        assert len(timeline.samples) <= most
    assert timeline.samples[:1] == tuple(offered[:1])
    places = [offered.index(one) for one in timeline.samples]
    assert places == sorted(set(places))
    times = [one.seconds for one in timeline.samples]
    assert all(later >= earlier + interval for earlier, later in pairwise(times))
    assert len(timeline.samples) >= min(len(offered), most // 2)


@given(ticks=st.integers(1, 3000), most=st.integers(2, 20).map(lambda half: 2 * half))
def test_samples_of_a_steady_run_are_evenly_spaced(ticks: int, most: int) -> None:
    timeline = Timeline(most, 1.0)
    for tick in range(ticks):
        if timeline.is_due(tick):
            timeline.add(sample(tick))
    step = 1
    while len(range(0, ticks, step)) > most:
        step *= 2
    assert [one.seconds for one in timeline.samples] == list(range(0, ticks, step))


def test_a_night_is_few_samples() -> None:
    timeline = Timeline()
    for tick in range(400_000):
        if timeline.is_due(tick / 20):
            timeline.add(sample(tick / 20))
    assert MAX_SAMPLES / 2 <= len(timeline.samples) <= MAX_SAMPLES


def test_columns() -> None:
    found = columns([Sample(*range(11)), Sample(*range(11, 22))])
    assert list(found.values()) == [[number, number + 11] for number in range(11)]
    assert found["seconds"] == [0, 11]
    assert set(map(len, columns([]).values())) == {0}
    with_states = columns([Sample(*range(14)), Sample(*range(14, 28))])
    assert [*with_states.values()] == [[number, number + 14] for number in range(14)]
    assert [*with_states][:11] == [*found]
