"""Requests of a long list, made while others run: callers see the same as if all were there from the beginning."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from weakref import ref

import pytest

from radixrt import FinishReason, ParameterError, RunLimits, Runtime, request_list
from radixrt import SamplingParams as Params
from radixrt.arrays import Int32Array
from radixrt.engine.calls import OutputCall
from radixrt.engine.engine import Engine
from radixrt.frontend.arguments import Call
from radixrt.frontend.request_builder import RequestBuilder
from radixrt.planning.simulated import ConstantRunner, simulated_parts
from radixrt.schedule.passes import Pass
from radixrt.schedule.policy import SchedulePolicy
from radixrt.schedule.request import Request
from radixrt.schedule.scheduler import Scheduler

SHORT = Params(max_new_tokens=2, ignore_eos=True)
FEW = [[draw % 4, draw % 3] for draw in range(40)]


class NotedRunner(ConstantRunner):
    """Notes the last prompt token of each row of each pass, and calls a function before each."""

    def __init__(self, before: Callable[[int], object] = lambda nth: None) -> None:
        super().__init__()
        self.passes, self._before = list[list[int]](), before

    def launch(self, pass_: Pass) -> Pass:
        self._before(len(self.passes))
        self.passes.append([*pass_.prefix_lens.tolist(), -1, *pass_.input_ids.tolist()])
        return pass_


def many(runner: NotedRunner, policy: SchedulePolicy = SchedulePolicy.LPM) -> Runtime:
    """A Runtime of 50 requests at once, which looks at the first 100 of those that wait, at first at 40."""
    limits = RunLimits(4000, 50, 400)
    parts = simulated_parts(runner, limits, 40, vocab_size=256)
    config = replace(parts.scheduler.config, max_ranked=100, first_ranked=40, policy=policy)
    engine = Engine(Scheduler(parts.cache, config), runner)
    return Runtime.from_parts(replace(parts, engine=engine))


def prompts_of(count: int) -> list[list[int]]:
    """Prompts of all lengths up to 15 in no order, which share much or nothing, and are the same now and then."""
    draws = random.Random(count)
    heads = [[draws.randrange(4) for _ in range(draws.randrange(1, 8))] for _ in range(20)]
    return [
        [*draws.choice(heads), *(draws.randrange(3) for _ in range(draws.randrange(1, 8)))] for _ in range(count)
    ]


def is_empty(runtime: Runtime) -> bool:
    """Whether no request waits or holds anything."""
    stats, cache = runtime.cache_stats(), runtime.parts.cache
    is_held = stats.locked or stats.private or stats.pending or cache.leases
    return not (runtime.has_work or runtime.num_waiting or runtime.num_running or is_held)


@pytest.mark.parametrize("policy", SchedulePolicy)
def test_requests_that_are_made_late_run_as_if_all_had_been_there(
    monkeypatch: pytest.MonkeyPatch, policy: SchedulePolicy
) -> None:
    prompts, made = prompts_of(1000), list[int]()
    params = [Params(max_new_tokens=1 + index % 5) for index in range(len(prompts))]
    alike = RequestBuilder.alike
    monkeypatch.setattr(RequestBuilder, "alike", lambda *given: made.append(0) or alike(*given))
    runner = NotedRunner(lambda nth: made.append(0) if nth else at_first.append(len(made)))
    at_first: list[int] = []
    with many(runner, policy) as runtime:
        late = runtime.generate(prompts, params)
    assert at_first == [40]
    monkeypatch.setattr(request_list, "FEWEST", 10**9)
    other = NotedRunner()
    with many(other, policy) as runtime:
        at_once = runtime.generate(prompts, params)
    assert runner.passes == other.passes
    assert [output.usage for output in late] == [output.usage for output in at_once]


def test_calls_beside_a_list_whose_requests_are_made_late() -> None:
    """Later ones are as urgent as they say."""
    prompts = prompts_of(1000)
    with many(NotedRunner()) as runtime:
        outputs = runtime.generate_iter(prompts, SHORT, priority=2)
        found = [next(outputs)]
        assert runtime.num_waiting > 800
        runtime.generate([9], SHORT, priority=1)
        assert runtime.num_waiting > 700, "it did not wait for the list"
        found += outputs
        assert sorted(output.index for output in found) == list(range(1000))
        assert is_empty(runtime)


@pytest.mark.parametrize("policy", SchedulePolicy)
def test_late_requests_are_not_kept(policy: SchedulePolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not until the last of a list is made, once their outputs are taken."""
    prompts, alike = list[ref[Int32Array]](), RequestBuilder.alike

    def noted(*given: Any) -> Request:
        request = alike(*given)
        prompts.append(ref(request.prompt_ids))
        return request

    monkeypatch.setattr(RequestBuilder, "alike", noted)
    with many(NotedRunner(), policy) as runtime:
        for nth, _ in enumerate(runtime.generate_iter(prompts_of(1000), SHORT)):
            assert nth % 50 or sum(kept() is not None for kept in prompts) < 500, nth


def passes_beside_others() -> list[list[int]]:
    """Of two lists and of single requests, less urgent, as urgent and more urgent ones, that come one after the
    other.
    """
    runner = NotedRunner()
    with many(runner) as runtime:
        lists = []
        for seed, priority in enumerate((1, 1, 0)):
            lists.append(runtime.generate_iter(prompts_of(1200 + seed), SHORT, priority=priority))
            next(lists[-1])
            runtime.submit(*(runtime.prepare([3, *ids], SHORT, priority=nth % 3) for nth, ids in enumerate(FEW)))
            runtime.step()
        for each in lists:
            assert list(each)
        while runtime.has_work:
            runtime.step()
    return runner.passes


def test_late_requests_keep_their_place_before_those_of_later_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    late = passes_beside_others()
    monkeypatch.setattr(request_list, "FEWEST", 10**9)
    assert late == passes_beside_others()


def noted_requests(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets an element for each late request that is made."""
    made, alike = list[int](), RequestBuilder.alike
    monkeypatch.setattr(RequestBuilder, "alike", lambda *given: made.append(0) or alike(*given))
    return made


def test_others_that_come_or_end_have_no_request_made_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that lets them in would take as long as all the rest of a list."""
    made = noted_requests(monkeypatch)
    with many(NotedRunner()) as runtime:
        outputs = runtime.generate_iter(prompts_of(1000), SHORT)
        next(outputs)
        runtime.generate([9], SHORT, priority=-1)
        runtime.submit(other := runtime.prepare([9, 9], SHORT))
        runtime.abort(other.id)
        next(outputs)
        assert len(made) < 600
        assert len(list(outputs)) == 998
        assert is_empty(runtime)


def test_what_wants_nothing_to_run_waits_for_all_of_a_list() -> None:
    with many(NotedRunner()) as runtime:
        outputs = runtime.generate_iter(prompts_of(1000), SHORT)
        next(outputs)
        assert runtime.num_waiting > 800
        runtime.identity()
        assert not runtime.has_work
        assert len(list(outputs)) == 999


def test_a_list_goes_before_what_is_less_urgent() -> None:
    with many(NotedRunner()) as runtime:
        runtime.submit(*(runtime.prepare([1, 2, 3], SHORT, priority=5) for _ in range(600)))
        runtime.step()
        runtime.generate(prompts_of(500), SHORT)
        assert runtime.num_waiting > 450


def test_the_rest_of_a_list_that_is_left_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made = noted_requests(monkeypatch)
    with many(NotedRunner()) as runtime:
        others = runtime.generate_iter(prompts_of(1001), SHORT)
        next(others)
        count = len(made)
        for _ in runtime.generate_iter(prompts_of(1000), SHORT, priority=-1):
            break
        assert len(made) - count < 600
        assert len(list(others)) == 1000
        assert is_empty(runtime)


def test_who_leaves_a_list_does_not_wait_for_the_news_of_who_steps() -> None:
    """Nothing of it has begun, so that nothing ends."""
    runner = NotedRunner(lambda nth: time.sleep(0.05))
    with many(runner) as runtime, ThreadPoolExecutor(1) as thread:
        other = thread.submit(runtime.generate, [1, 2], Params(max_new_tokens=35, ignore_eos=True))
        while len(runner.passes) < 2:
            time.sleep(0.01)
        _, requests = runtime._late(prompts_of(1000), SHORT, Call(priority=9))
        with runtime._driver.opened(OutputCall("return")) as call:
            runtime._driver.submit(requests, call)
        assert not call.requests
        assert not other.done()
        other.result()


def test_a_list_that_is_left_early_is_gone() -> None:
    with many(NotedRunner()) as runtime:
        for _ in runtime.generate_iter(prompts_of(1000), SHORT):
            break
        assert is_empty(runtime)
        prompts = prompts_of(1000)
        last = max(range(1000), key=lambda index: prompts[index])
        outputs = runtime.generate_iter(prompts, SHORT, request_ids=[f"own {n}" for n in range(1000)])
        first = next(outputs)
        with pytest.raises(ParameterError, match=f"request id 'own {last}' is that of another request"):
            runtime.generate([1], SHORT, request_ids=f"own {last}")
        later = [f"own {n}" for n in range(500, 1000) if f"own {n}" != first.id]
        ended = [runtime.abort(own_id) for own_id in later]
        rest: dict[int | str, FinishReason] = {}
        waiting: list[int] = []
        for output in outputs:
            rest[output.id] = output.finish_reason
            waiting.append(runtime.num_waiting)
        assert min(waiting[:200]) < 500, "they end with the next step"
        assert [rest[own_id] is FinishReason.ABORT for own_id, is_new in zip(later, ended, strict=True) if is_new]
        assert len(rest) == 999
        assert list(rest.values()).count(FinishReason.ABORT) == sum(ended)
        assert is_empty(runtime)
