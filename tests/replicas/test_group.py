"""Groups whose replicas crash, hang, are slow and say things twice: each prompt is answered once, as by one."""

from __future__ import annotations

import gc
import itertools
import json
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from radixrt.errors import DeviceLostError, ParameterError, PassError, PromptError, RadixrtError
from radixrt.output import CompletionOutput, FinishReason, RequestOutput, Usage
from radixrt.replicas.group import ReplicaGroup
from radixrt.replicas.messages import ended_message, state_as_json
from radixrt.replicas.replica import MAX_RESTARTS, Replica
from radixrt.request_list import demands_of, request_list
from radixrt.runtime import Runtime
from radixrt.sampling_params import SamplingParams
from radixrt.schedule.activity import Activity
from radixrt.schedule.booking import Booking
from radixrt.schedule.request import Request
from radixrt.workers.channel import Message
from tests.support.local_replicas import Killed, LocalLink, LocalLinks
from tests.support.runtimes import SIZES, scheduled_runtime, simulated_runtime

HANG = 50.0
PARAMS = SamplingParams(max_new_tokens=6, temperature=1.0, n=1)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def group_of(links: LocalLinks, num_replicas: int, clock: Clock | None = None) -> ReplicaGroup:
    return ReplicaGroup(num_replicas=num_replicas, links=links, hang_seconds=HANG, clock=clock or Clock())


def tree(count: int) -> list[list[int]]:
    """Prompts with shared beginnings, of the simulation's tokens."""
    return [[1, 2, 3, n % 3] + [n % 5] * (n % 4) + [n % 7 % 5, n // 7 % 5] for n in range(count)]


def told(outputs: Sequence[RequestOutput]) -> list[Any]:
    """What of outputs does not depend on the time, or on what was cached."""
    return [
        (each.index, each.text, each.token_ids, each.finish_reason, each.usage.prompt_tokens) for each in outputs
    ]


def alone(prompts: Sequence[list[int]], params: Any = PARAMS) -> list[Any]:
    with simulated_runtime() as runtime:
        return told(runtime.generate(prompts, params))


def answers(outputs: Sequence[RequestOutput]) -> list[Any]:
    """All answers of outputs."""
    found = [[(a.index, a.token_ids, a.text, a.finish_reason) for a in each.outputs] for each in outputs]
    return [
        (each.index, own, each.usage.prompt_tokens, each.usage.completion_tokens)
        for each, own in zip(outputs, found, strict=True)
    ]


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 7])
def test_answers_are_those_of_one_runtime(num_replicas: int) -> None:
    prompts = tree(40)
    links = LocalLinks(simulated_runtime)
    with group_of(links, num_replicas) as group:
        found = group.generate(prompts, PARAMS)
        assert told(found) == alone(prompts)
        figures = group.replica_figures
        assert sum(each.requests for each in figures) == 40
        assert min(each.requests for each in figures) > 0
        assert group.cache_stats().prompt_tokens == sum(map(len, prompts))
        assert group.activity().passes == sum(lane.activity.passes for lane in group.lanes) > 0
        assert not group.has_work
    assert all(link.is_dead for link in links.links.values())


def test_a_prompt_and_parameters_each() -> None:
    with group_of(LocalLinks(simulated_runtime), 2) as group:
        one = group.generate([1, 2, 3], PARAMS)
        assert isinstance(one, RequestOutput)
        each = [SamplingParams(max_new_tokens=n, temperature=1.0, n=1 + n % 2) for n in range(1, 9)]
        prompts = tree(8)
        found = group.generate(prompts, each)
        assert [len(output.outputs) for output in found] == [params.n for params in each]
        assert told(found) == alone(prompts, each)
        with pytest.raises(PromptError, match="prompt 1 "):
            group.generate([[1], []], PARAMS)
        assert group.generate([[1], []], PARAMS, on_error="return")[1].error is not None


def test_calls_draw_anew_as_those_of_one_runtime_do() -> None:
    prompts = tree(6)
    with group_of(LocalLinks(simulated_runtime), 2) as group, simulated_runtime() as runtime:
        for _ in range(2):
            assert told(group.generate(prompts, PARAMS)) == told(runtime.generate(prompts, PARAMS))


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 7])
@pytest.mark.parametrize("counts", [[40], [70, 1, 33, 2], [1, 2, 3, 100]])
def test_answers_of_one_prompt_on_several_replicas(num_replicas: int, counts: list[int]) -> None:
    """They are those of one Runtime, in their order, and each replica has some."""
    prompts = tree(len(counts))
    params = [SamplingParams(max_new_tokens=6, temperature=1.0, n=count) for count in counts]
    with simulated_runtime() as runtime:
        expected = answers(runtime.generate(prompts, params))
    with group_of(LocalLinks(simulated_runtime), num_replicas) as group:
        found = group.generate(prompts, params)
        assert answers(found) == expected
        assert len({each.id for each in found}) == len(counts)
        assert {type(each.id) for each in found} == {int}, "those of whole requests"
        assert min(each.completion_tokens for each in group.replica_figures) > 0
        assert all(
            each.usage.cached_tokens + each.usage.computed_tokens == len(p)
            for each, p in zip(found, prompts, strict=True)
        )
        assert not group.has_work


ACTIONS = ("advance", "advance all", "slow", "double", "crash", "crash and lose", "hang", "time")


@settings(max_examples=60)
@given(
    num_replicas=st.integers(1, 4),
    num_prompts=st.integers(1, 40),
    most_answers=st.sampled_from([1, 1, 30]),
    actions=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 3), st.integers(1, 4)), max_size=60),
)
def test_faults(
    num_replicas: int, num_prompts: int, most_answers: int, actions: list[tuple[str, int, int]]
) -> None:
    """Each prompt has one output, that of one Runtime; or all replicas were lost too often, and that is said."""
    clock, waiting = Clock(), list(reversed(actions))

    def on_wait(links: LocalLinks) -> None:
        clock.now += 1.0
        if not waiting:
            for link in links.links.values():
                link.is_slow = False
            links.advance()
            return
        action, which, times = waiting.pop()
        link = links.links[which % num_replicas]
        if action == "advance":
            link.advance(times)
        elif action == "advance all":
            links.advance()
        elif action == "slow":
            link.is_slow = not link.is_slow
        elif action == "double":
            link.double()
        elif action == "time":
            clock.now += times * HANG / 3
        elif action == "hang":
            link.hangs = True
        else:
            link.crash(loses_messages=action == "crash and lose")

    prompts = tree(num_prompts)
    params = [replace(PARAMS, n=most_answers if n % 20 == 3 else 1) for n in range(num_prompts)]
    links = LocalLinks(simulated_runtime)
    with group_of(links, num_replicas, clock) as group:
        links.on_wait = on_wait
        found: list[RequestOutput] = []
        try:
            found.extend(group.generate_iter(prompts, params, on_error="return"))
        except DeviceLostError:
            assert links.started >= num_replicas * (1 + MAX_RESTARTS)
            assert len({output.index for output in found}) == len(found) < num_prompts
            return
        restarts = sum(each.restarts for each in group.replica_figures)
        assert links.started <= num_replicas + restarts
        found.sort(key=lambda output: output.index)
        with simulated_runtime() as runtime:
            pairs = list(zip(answers(found), answers(runtime.generate(prompts, params)), strict=True))
        wrong = [output for output, (own, expected) in zip(found, pairs, strict=True) if own != expected]
        assert not wrong or restarts >= 4, "fewer losses than a request has before it is the cause"
        assert all("ends each process" in (output.error or "") for output in wrong)
        assert not group.has_work


def test_a_replica_that_hangs_is_lost_and_one_that_waits_is_not() -> None:
    clock = Clock()
    links = LocalLinks(simulated_runtime)
    with group_of(links, 2, clock) as group:
        clock.now += 10 * HANG  # nobody has requests
        group.step()
        first = dict(links.links)
        assert told(group.generate(tree(9), PARAMS)) == alone(tree(9))
        assert links.links == first
        first[0].hangs = True

        def on_wait(links: LocalLinks) -> None:
            clock.now += 1.0
            links.advance()

        links.on_wait = on_wait
        found = group.generate(tree(9), PARAMS)
        assert len(found) == 9
        assert group.replica_figures[0].restarts == 1
        assert group.replica_figures[1].restarts == 0
        assert first[0].is_dead


def test_counts_outlive_a_replica() -> None:
    prompts = tree(30)
    links = LocalLinks(simulated_runtime)
    with group_of(links, 2) as group:
        group.generate(prompts, PARAMS)
        passes = group.activity().passes
        links.links[1].crash()
        group.step()
        assert group.replica_figures[1].restarts == 1
        assert group.activity().passes == passes
        assert group.cache_stats().prompt_tokens == sum(map(len, prompts))
        assert group.cache_stats().capacity == 2 * group.limits.pool_tokens
        group.generate(prompts, PARAMS)
        assert group.cache_stats().prompt_tokens == 2 * sum(map(len, prompts)) + 1, "that of the trial"
        assert sum(each.requests for each in group.replica_figures) == 30, "those of the latest list"
        assert group.replica_figures[1].restarts == 0


def test_states_of_replicas_are_counted() -> None:
    """Those that a replica has, and counts of all that it was; plans have those of each."""

    def hybrid() -> Runtime:
        return scheduled_runtime(pool_tokens=600, context_length=100, max_running_requests=4, num_states=30)

    links = LocalLinks(hybrid)
    prompts = [[*range(50), 100 + index] for index in range(30)]
    with group_of(links, 2) as group:
        assert group.limits.num_states == 30
        for prompt in prompts:
            group.generate([prompt], PARAMS)
        before = group.cache_stats()
        assert before.state_capacity == 60
        assert before.state_free + before.state_kept + before.state_pending == 60
        assert before.stateless_tokens > 0
        links.links[0].crash()
        group.step()
        after = group.cache_stats()
        assert (after.state_capacity, after.stateless_tokens) == (60, before.stateless_tokens)


def test_one_that_never_starts_is_left_out() -> None:
    class Dying(LocalLinks):
        def start(self, number: int) -> LocalLink:
            link = super().start(number)
            if number == 0:
                link.crash(loses_messages=True)
            return link

    links = Dying(simulated_runtime)
    with group_of(links, 2) as group:
        assert [lane.is_gone for lane in group.lanes] == [True, False]
        assert links.started == 2 + MAX_RESTARTS
        assert told(group.generate(tree(9), PARAMS)) == alone(tree(9))


def test_identity_is_asked_of_one_that_answers() -> None:
    """Of one that hangs or is lost meanwhile, it is asked of another."""
    clock = Clock()

    def on_wait(links: LocalLinks) -> None:
        clock.now += HANG / 3
        links.advance()

    links = LocalLinks(simulated_runtime)
    with group_of(links, 2, clock) as group, simulated_runtime() as runtime:
        links.on_wait = on_wait
        links.links[0].hangs = True
        assert group.identity() == runtime.identity()
        assert group.replica_figures[0].restarts == 1


def test_what_came_before_the_last_loss_is_not_lost() -> None:
    """The last replica says something and dies for good: its answers come before the error."""
    links = LocalLinks(simulated_runtime)

    def on_wait(links: LocalLinks) -> None:
        for _ in range(20):
            links.advance()
        links.links[0].crash()

    found: list[RequestOutput] = []
    with group_of(links, 1) as group:
        links.on_wait = on_wait
        outputs = group.generate_iter(tree(400), PARAMS)
        with pytest.raises(DeviceLostError):
            found.extend(outputs)  # keeps what came before the error
        assert len(found) == sum(each.requests for each in group.replica_figures) > 0
        assert sum(lane.activity.passes for lane in group.lanes) == group.activity().passes
        passes = group.activity().passes
        assert passes < 20 * (1 + MAX_RESTARTS) + 5, "of the last process once"
        assert group.cache_stats().capacity == 0


def test_a_replica_that_comes_back_with_a_smaller_pool_is_not_used() -> None:
    """Its refusals would be errors of lines that others can run."""
    sizes = [SIZES, SIZES, replace(SIZES, num_slots=20)]
    links = LocalLinks(lambda: simulated_runtime(sizes.pop(0) if len(sizes) > 1 else sizes[0]))

    def on_wait(links: LocalLinks) -> None:
        links.advance()
        if links.started == 2:
            links.links[0].crash(loses_messages=True)

    with group_of(links, 2) as group:
        links.on_wait = on_wait
        found = group.generate([[1, 2, 3] * 8 + prompt[:2] for prompt in tree(30)], PARAMS)
        assert not [output.error for output in found if output.error is not None]
        assert group.lanes[0].is_gone


def test_a_process_that_cannot_be_started_again(caplog: pytest.LogCaptureFixture) -> None:
    class Full(LocalLinks):
        def start(self, number: int) -> LocalLink:
            if self.started >= 2:
                raise BlockingIOError(11, "too many processes")
            return super().start(number)

    links = Full(simulated_runtime)

    def on_wait(links: LocalLinks) -> None:
        links.advance()
        links.links[0].crash()

    with group_of(links, 2) as group:
        links.on_wait = on_wait
        assert told(group.generate(tree(20), PARAMS)) == alone(tree(20))
        assert "cannot be started again" in caplog.text


def test_a_closed_group_says_so() -> None:
    group = group_of(LocalLinks(simulated_runtime), 1)
    group.close()
    with pytest.raises(RadixrtError, match="closed"):
        group.generate(tree(3), PARAMS)


def test_all_are_lost() -> None:
    links = LocalLinks(simulated_runtime)

    def on_wait(links: LocalLinks) -> None:
        for link in links.links.values():
            link.crash()

    with group_of(links, 2) as group:
        links.on_wait = on_wait
        with pytest.raises(DeviceLostError, match="no replica is left"):
            group.generate(tree(9), PARAMS)
        with pytest.raises(DeviceLostError, match="no replica is left"):
            group.generate(tree(9), PARAMS)


def test_one_call_at_a_time_and_one_left_early() -> None:
    with group_of(LocalLinks(simulated_runtime), 2) as group:
        calls = group.generate_iter(tree(30), PARAMS)
        next(calls)
        with pytest.raises(RadixrtError, match="one call at a time"):
            group.generate(tree(3), PARAMS)
        assert gc.get_freeze_count() > 0, "a full collection would be a pause of all"
        calls.close()  # type: ignore[attr-defined]
        assert gc.get_freeze_count() == 0
        while group.has_work:
            group.step()
        assert sum(each.requests for each in group.replica_figures) < 20, "the others were aborted"
        with simulated_runtime() as runtime:
            runtime.generate([[1]], PARAMS)
            runtime.generate([[1]], PARAMS)
            expected = told(runtime.generate(tree(12), PARAMS))
        found = told(group.generate(tree(12), PARAMS))
        assert [each[0] for each in found] == list(range(12))
        assert len(found) == len(expected)
        assert not group.has_work


@pytest.mark.parametrize("place", ["send", "receive"])
@pytest.mark.parametrize("nth", [0, 1])
def test_a_call_after_ctrl_c_in_the_middle_of_a_message(
    place: str, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = itertools.count(nth, -1)

    def send(link: LocalLink, message: Message) -> None:
        if next(left) == 0:
            signal.raise_signal(signal.SIGINT)
        original(link, message)

    def receive(link: LocalLink) -> list[Message]:
        messages: list[Message] = original(link)
        if any(message.body.get("ended") for message in messages) and next(left) == 0:
            signal.raise_signal(signal.SIGINT)
        return messages

    with group_of(LocalLinks(simulated_runtime), 2) as group:
        original: Any = getattr(LocalLink, place)
        monkeypatch.setattr(LocalLink, place, send if place == "send" else receive)
        with pytest.raises(KeyboardInterrupt):
            group.generate(tree(30), PARAMS)
        assert [each.index for each in group.generate(tree(12), PARAMS)] == list(range(12))
        assert not group.has_work


def test_a_call_is_open_from_its_first_output_on() -> None:
    """Two at once would take each other's answers."""
    with group_of(LocalLinks(simulated_runtime), 2) as group:
        calls = group.generate_iter([[], *tree(5)], PARAMS, on_error="return")
        assert next(calls).index == 0
        with pytest.raises(RadixrtError, match="one call at a time"):
            group.generate(tree(3), PARAMS)
        assert len(list(calls)) == 5
        assert len(group.generate(tree(3), PARAMS)) == 3


def test_a_call_is_open_before_its_requests_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[str] = []
    with group_of(LocalLinks(simulated_runtime), 2) as group:

        def make(*arguments: Any, **options: Any) -> Any:
            """As another thread may call just then."""
            with pytest.raises(RadixrtError) as error:
                group.generate(tree(3), PARAMS)
            refused.append(str(error.value))
            return request_list(*arguments, **options)

        monkeypatch.setattr("radixrt.replicas.group.request_list", make)
        assert len(group.generate(tree(5), PARAMS)) == 5
    assert [text[:34] for text in refused] == ["a group answers one call at a time"]


def test_scored_prompts_are_planned_as_they_are_scheduled() -> None:
    """Tokens that are scored are never taken from the cache."""
    params = [SamplingParams(prompt_logprobs=0, prompt_logprobs_start=start) for start in (0, 1, 5)]
    with simulated_runtime() as runtime:
        requests = [runtime.prepare([1, 2, 3, 4, 1, 2, 3], each) for each in (*params, PARAMS)]
        limits = [answer.match_limit for answer in runtime.parts.scheduler.submit_all(requests)]
    assert limits == [request.params.match_limit(request.prompt_len) for request in requests]
    assert demands_of(requests).match_limits.tolist() == [max(0, limit) for limit in limits]


def test_replicas_are_read_between_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that cannot send what has ended runs no passes, while others are handed all of theirs."""
    done: list[str] = []
    submit, receive = Replica.submit, Replica.receive

    def submitted(self: Replica, *requests: Request) -> None:
        done.append("submit")
        submit(self, *requests)
        links.advance()  # some have answers before others have their prompts

    def received(self: Replica) -> list[RequestOutput]:
        done.append("receive")
        return receive(self)

    links = LocalLinks(lambda: scheduled_runtime(pool_tokens=10_000, context_length=100))
    with group_of(links, 3) as group:
        monkeypatch.setattr(Replica, "submit", submitted)
        monkeypatch.setattr(Replica, "receive", received)
        assert len(group.generate(tree(600), SamplingParams(max_new_tokens=2))) == 600
    turns = [index for index, what in enumerate(done) if what == "submit"]
    assert len(turns) > 6
    assert all(done[at + 1 : at + 4] == ["receive"] * 3 for at in turns)


def test_an_error_of_the_first_start_is_raised() -> None:
    def refused() -> Runtime:
        raise ParameterError("memory_fraction is 2")

    class Refusing(LocalLinks):
        def start(self, number: int) -> LocalLink:
            from radixrt.workers.channel import Message, error_as_json

            link = super().start(number)
            link.said.clear()
            try:
                refused()
            except ParameterError as error:
                link.said.append(Message({"refused": error_as_json(error)}))
            return link

    links = Refusing(simulated_runtime)
    with pytest.raises(ParameterError, match="memory_fraction is 2"):
        group_of(links, 2)
    assert all(link.is_dead for link in links.links.values())


def test_numbers_that_are_none_are_refused_here() -> None:
    """As they would end a replica."""
    with group_of(LocalLinks(simulated_runtime), 1) as group:
        for option in ("keep", "index"):
            with pytest.raises(ParameterError, match=f"{option} is 1.5"):
                group.prepare([1, 2], PARAMS, **{option: 1.5})  # type: ignore[arg-type]


# -- batches ---------------------------------------------------------------------------------------------------


def records(path: Path) -> list[Any]:
    """Without what depends on the time, or on what was cached."""
    found = []
    for line in path.read_text().splitlines():
        record = json.loads(line)
        del record["timings"]
        if record["usage"]:
            record["usage"] = record["usage"]["prompt_tokens"]
        found.append(record)
    return found


@pytest.fixture
def batch(tmp_path: Path) -> tuple[Path, list[Any]]:
    """A file of good and bad lines, and the records of one Runtime."""
    lines: list[dict[str, Any]] = [{"token_ids": prompt, "max_tokens": 4} for prompt in tree(60)]
    lines[7]["temperature"] = -1
    lines[23] = {"token_ids": [1] * 100}  # too long
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with simulated_runtime() as runtime:
        runtime.run_batch(source, tmp_path / "one.jsonl")
    return source, records(tmp_path / "one.jsonl")


@pytest.mark.parametrize("order", ["planned", "file"])
def test_a_batch(batch: tuple[Path, list[Any]], order: Any, tmp_path: Path) -> None:
    source, expected = batch
    with ReplicaGroup(num_replicas=3, links=LocalLinks(simulated_runtime)) as group:
        report = group.run_batch(source, tmp_path / "out.jsonl", order=order)
    assert records(tmp_path / "out.jsonl") == expected
    assert report.is_complete
    assert [each["requests"] > 0 for each in report.run.replicas] == [True] * 3
    assert sum(each["requests"] for each in report.run.replicas) == report.run.answered == 58
    assert 0.0 < report.run.balance <= 1.0
    if order == "planned":
        assert report.run.repeated_tokens > 0
        assert report.run.predicted_hit_rate == pytest.approx(report.run.hit_rate, abs=0.1)


def test_a_batch_after_a_call_that_was_left_early(batch: tuple[Path, list[Any]], tmp_path: Path) -> None:
    path, expected = batch
    with group_of(LocalLinks(simulated_runtime), 2) as group:
        calls = group.generate_iter(tree(30), PARAMS)
        next(calls)
        with pytest.raises(RadixrtError, match="one call at a time"):
            group.run_batch(path, tmp_path / "out.jsonl")
        calls.close()  # type: ignore[attr-defined]
        assert group.has_work, "nobody has looked at what became of them"
        assert group.run_batch(path, tmp_path / "out.jsonl").requests == len(expected)


@settings(max_examples=15, deadline=None)
@given(
    crashes=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6)), max_size=6),
    loses=st.booleans(),
)
def test_a_batch_survives_crashes(crashes: list[tuple[int, int]], loses: bool, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("batch")
    source = folder / "in.jsonl"
    lines = [{"token_ids": p, "max_tokens": 4, "n": 20 if i == 7 else 1} for i, p in enumerate(tree(40))]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with simulated_runtime() as runtime:
        runtime.run_batch(source, folder / "one.jsonl")
    waiting = list(reversed(crashes))

    def on_wait(links: LocalLinks) -> None:
        links.advance()
        if waiting:
            which, passes = waiting.pop()
            links.links[which].advance(passes)
            links.links[which].crash(loses_messages=loses)

    links = LocalLinks(simulated_runtime)
    with group_of(links, 3) as group:
        links.on_wait = on_wait
        group.run_batch(source, folder / "out.jsonl")
    assert records(folder / "out.jsonl") == records(folder / "one.jsonl")


def test_a_hung_replica_does_not_keep_a_batch_that_is_stopped(
    batch: tuple[Path, list[Any]], tmp_path: Path
) -> None:
    """Too many errors, or a signal: it is given some seconds, not those after which it would count as hanging."""
    clock = Clock()
    source, _ = batch

    def on_wait(links: LocalLinks) -> None:
        clock.now += 1.0
        links.advance()
        links.links[0].hangs = True

    links = LocalLinks(simulated_runtime)
    with ReplicaGroup(num_replicas=2, links=links, hang_seconds=1000.0, clock=clock) as group:
        step = group.step
        links.on_wait = on_wait

        def stepped() -> list[RequestOutput]:
            if clock.now > 5.0 and group.step is stepped:
                group.step = step  # type: ignore[method-assign]
                raise KeyboardInterrupt
            return step()

        group.step = stepped  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            group.run_batch(source, tmp_path / "out.jsonl")
        assert clock.now < 30.0
        assert group.lanes[0].is_gone
        assert not group.has_work


@settings(max_examples=6, deadline=None)
@given(
    num_replicas=st.integers(1, 4),
    killing=st.sets(st.integers(0, 59), max_size=6),
    failing=st.sets(st.integers(0, 59), max_size=2),
    loses=st.booleans(),
)
@example(num_replicas=3, killing={7}, failing=set(), loses=False)
@example(num_replicas=2, killing={40}, failing={7}, loses=True)
def test_lines_that_kill_their_process(
    num_replicas: int, killing: set[int], failing: set[int], loses: bool, tmp_path_factory: Any
) -> None:
    """Each gets an error record, those of other lines are as without them, and no replica stays away."""
    folder = tmp_path_factory.mktemp("batch")
    source = folder / "in.jsonl"
    lines = [{"token_ids": p, "max_tokens": 4, "n": 80 if i == 7 else 1} for i, p in enumerate(tree(60))]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with simulated_runtime() as runtime:
        runtime.run_batch(source, folder / "one.jsonl")

    def made() -> Runtime:
        runtime = simulated_runtime()
        runtime.hooks.launch_fault = kill
        runtime.hooks.run_fault = lambda booking: RuntimeError("bad") if has(booking, failing) else None
        return runtime

    def has(booking: Booking, lines: set[int]) -> bool:
        return any(answer.request.index in lines for answer in booking.answers)

    def kill(booking: Booking) -> None:
        if has(booking, killing):
            raise Killed

    class Losing(LocalLinks):
        def start(self, number: int) -> LocalLink:
            link = super().start(number)
            link.loses_messages = loses
            return link

    with group_of(Losing(made), num_replicas) as group:
        report = group.run_batch(source, folder / "out.jsonl")
        assert not any(lane.is_gone for lane in group.lanes)
    assert report.is_complete
    assert report.errors == len(killing | failing)
    pairs = list(zip(records(folder / "out.jsonl"), records(folder / "one.jsonl"), strict=True))
    assert [own for own, _ in pairs if own["index"] not in killing | failing] == [
        expected for _, expected in pairs if expected["index"] not in killing | failing
    ]
    for line in killing:
        error = pairs[line][0]["error"]
        assert error["type"] == "failed"
        assert "ends each process that runs it" in error["message"]
    prompts = tree(60)
    with group_of(LocalLinks(made), num_replicas) as group:
        found = group.generate(prompts, PARAMS, on_error="return")
        assert {output.index for output in found if output.cause is not None} >= killing
        if killing and not failing:
            with pytest.raises(PassError, match="ends each process that runs it"):
                group.generate(prompts, PARAMS)


@pytest.mark.parametrize("kills", [True, False])
def test_a_part_that_is_not_the_first_says_why_it_has_failed(kills: bool, tmp_path: Path) -> None:
    def fail(booking: Booking) -> Exception | None:
        if all(answer.sample_index < 40 for answer in booking.answers):
            return None
        if kills:
            raise Killed
        return RuntimeError("out of something")

    def made() -> Runtime:
        runtime = simulated_runtime()
        runtime.hooks.launch_fault = fail
        return runtime

    why = "ends each process that runs it" if kills else "out of something"
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"token_ids": [1, 2, 3], "max_tokens": 4, "n": 60}) + "\n")
    with group_of(LocalLinks(made), 2) as group:
        assert group.run_batch(source, output).errors == 1
        assert why in records(output)[0]["error"]["message"]
        with pytest.raises(PassError, match=why):
            group.generate([[1, 2, 3]], replace(PARAMS, n=60))


@pytest.mark.parametrize(("num_replicas", "count"), [(1, 4), (2, 4), (1, 20), (3, 20)])
def test_only_lines_that_kill_are_left(num_replicas: int, count: int, tmp_path: Path) -> None:
    """Nothing else shows that replicas are sound: so many are lost in vain that the batch ends. It goes on."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"token_ids": p, "max_tokens": 4}) + "\n" for p in tree(count)))

    def kill(booking: Booking) -> None:
        if any(answer.request.index >= 0 for answer in booking.answers):  # all but the trial
            raise Killed

    def made() -> Runtime:
        runtime = simulated_runtime()
        runtime.hooks.launch_fault = kill
        return runtime

    runs = 0
    while not output.exists():
        runs += 1
        assert runs <= 6
        with group_of(LocalLinks(made), num_replicas) as group, suppress(DeviceLostError):
            assert group.run_batch(source, output).errors == count
    assert (runs > 1) == (count > 4)
    assert [record["index"] for record in records(output)] == list(range(count))
    assert all("ends each process" in record["error"]["message"] for record in records(output))


def test_a_device_that_cannot_compute_costs_no_line(tmp_path: Path) -> None:
    """Its processes start and die with whatever they run, also with the trial: no line is to blame."""
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"token_ids": p, "max_tokens": 4}) + "\n" for p in tree(40)))

    class OneIsBroken(LocalLinks):
        def start(self, number: int) -> LocalLink:
            link = super().start(number)
            if number == 0:
                link.server._runtime.hooks.launch_fault = broken  # type: ignore[attr-defined]
            return link

    def broken(booking: Booking) -> None:
        raise Killed

    for num_replicas in (1, 2):
        links = OneIsBroken(simulated_runtime)
        with group_of(links, num_replicas) as group:
            if num_replicas == 1:
                with pytest.raises(DeviceLostError):
                    group.run_batch(source, tmp_path / "out.jsonl")
            else:
                report = group.run_batch(source, tmp_path / "out.jsonl")
                assert (report.errors, report.requests) == (0, 40)
            assert group.lanes[0].is_gone


@pytest.mark.parametrize("moment", [3, 5, 6, 7, 8, 9, 12])
def test_a_replica_is_lost_while_lines_of_a_failed_pass_run_again(
    batch: tuple[Path, list[Any]], moment: int, tmp_path: Path
) -> None:
    """Line 5 fails whatever it runs with, so that lines run again in groups; one of these, or others, are lost."""
    source, expected = batch
    waits = [0]

    def failing() -> Runtime:
        runtime = simulated_runtime()
        is_bad = lambda booking: any(answer.request.index == 5 for answer in booking.answers)  # noqa: E731
        runtime.hooks.run_fault = lambda booking: RuntimeError("line 5") if is_bad(booking) else None
        return runtime

    def on_wait(links: LocalLinks) -> None:
        links.advance()
        waits[0] += 1
        if waits[0] % moment == 0 and waits[0] <= 2 * moment:
            links.links[0].crash(loses_messages=True)

    links = LocalLinks(failing)
    with group_of(links, 2) as group:
        links.on_wait = on_wait
        report = group.run_batch(source, tmp_path / "out.jsonl")
    assert report.run.replicas[0]["restarts"] == 2
    found = records(tmp_path / "out.jsonl")
    assert "line 5" in found[5]["error"]["message"]
    assert found[:5] + found[6:] == expected[:5] + expected[6:]


def test_a_batch_goes_on_with_another_number(batch: tuple[Path, list[Any]], tmp_path: Path) -> None:
    """All replicas are lost in the middle; what was answered is kept."""
    source, expected = batch
    output, passes = tmp_path / "out.jsonl", [0]

    def on_wait(links: LocalLinks) -> None:
        links.advance()
        passes[0] += 1
        if passes[0] > 12:
            for link in links.links.values():
                link.crash()

    links = LocalLinks(simulated_runtime)
    with group_of(links, 3) as group:
        links.on_wait = on_wait
        with pytest.raises(DeviceLostError, match=r"(?s)no replica is left.*records are kept"):
            group.run_batch(source, output)
    assert not output.exists()
    with group_of(LocalLinks(simulated_runtime), 2) as group:
        report = group.run_batch(source, output)
    assert records(output) == expected
    assert 0 < report.kept < 60


class SaidLink(LocalLink):
    """Says what a test puts into `said`."""

    def __init__(self) -> None:
        super().__init__(simulated_runtime())

    def says(self, decoded: int, *ended: RequestOutput) -> None:
        state = state_as_json(Activity(decoded_tokens=decoded), simulated_runtime().cache_stats(), 1)
        self.said.append(ended_message(ended, {"begun": [], **state}))


def test_progress_is_of_what_has_not_ended() -> None:
    """By tokens; of this process, and not of what it had ended before."""
    links, source = LocalLinks(simulated_runtime), simulated_runtime()
    links.start = lambda number: links.links.setdefault(number, SaidLink())  # type: ignore[method-assign]
    replica = Replica(0, links, HANG, Clock())
    requests = [source.prepare([1, 2], replace(PARAMS, n=n)) for n in (1, 2, 3)]
    link = links.links[0]
    assert isinstance(link, SaidLink)
    seen = []

    def says(decoded: int, *ended: RequestOutput) -> None:
        link.says(decoded, *ended)
        replica.receive()
        seen.append(replica.progress)

    link.says(100)  # before this list
    replica.receive()
    replica.begin_list()
    replica.submit(*requests[:2])  # 6 and 12 tokens, at most
    says(109)
    answer = CompletionOutput(0, "", (1, 2, 3, 4), FinishReason.STOP)
    usage = Usage(prompt_tokens=2, cached_tokens=0, computed_tokens=2, completion_tokens=4)
    says(109, replace(RequestOutput.refused(0, "", requests[0].id), outputs=(answer,), usage=usage))
    replica.submit(requests[2])
    says(111)
    assert seen == [9 / 18, 5 / 12, 7 / 30]
    link.crash()
    del links.links[0]
    assert len(replica.receive()) == 2
    replica.submit(*requests[1:2])
    assert replica.progress == 0.0
    again = links.links[0]
    assert isinstance(again, SaidLink)
    again.says(3)
    replica.receive()
    assert replica.progress == 3 / 12
