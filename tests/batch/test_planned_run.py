"""A batch runs as it was planned: the order, what the cache lets go of, and the hits that were predicted."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import radixrt
from radixrt.batch.job import Batch, run_batch
from radixrt.batch.options import BatchConfig
from radixrt.builtin import MODEL_PATH
from radixrt.errors import ParameterError
from radixrt.frontend.request_builder import builder_without_weights
from radixrt.limits import RunLimits
from radixrt.planning.batch_plan import BatchPlan
from radixrt.report.batch_report import print_report
from radixrt.schedule.request import Request
from tests.support import plans
from tests.support.fake_runtime import FakeRuntime
from tests.support.runtimes import scheduled_runtime

Prompts = list[tuple[list[int], int]]  # with the tokens of each answer

CHUNKS = (16, 64, 256)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def a_tree(size: int = 5, seed: int = 0) -> Prompts:
    """Prompts at the leaves of trees of two levels, shuffled; none has more than 24 * size tokens."""
    rng = np.random.default_rng(seed)

    def tokens(low: int, high: int) -> list[int]:
        return rng.integers(3, 200, rng.integers(low, high)).tolist()

    prompts = []
    for _ in range(4):
        first = tokens(4 * size, 12 * size)
        for _ in range(rng.integers(1, 5)):
            second = first + tokens(size, 8 * size)
            prompts += [
                (second + tokens(1, 4 * size), int(rng.integers(1, 9))) for _ in range(rng.integers(1, 12))
            ]
    return [prompts[i] for i in rng.permutation(len(prompts))]


def write(path: Path, prompts: Prompts) -> None:
    lines = (
        {"token_ids": prompt, "max_new_tokens": new, "ignore_eos": True, "temperature": 0}
        for prompt, new in prompts
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def planned(prompts: Prompts) -> BatchPlan:
    return plans.planned([prompt for prompt, _ in prompts], np.array([new for _, new in prompts], dtype=np.int64))


class Watched(FakeRuntime):
    def __init__(self, pool_tokens: int) -> None:
        super().__init__()
        self.limits = RunLimits(pool_tokens)
        self.submitted: list[Request] = []

    def submit(self, *requests: Request, in_order: bool = False) -> None:
        assert in_order
        self.submitted += requests
        super().submit(*requests)


def test_it_submits_what_was_planned(files: tuple[Path, Path]) -> None:
    prompts = a_tree(2)
    plan = planned(prompts)
    write(files[0], prompts)
    runtime = Watched(plan.pool_for_all - 1)
    run_batch(runtime, *files)
    assert [request.index for request in runtime.submitted] == plan.run.order.tolist()
    assert [request.reusable_len for request in runtime.submitted] == plan.keep.tolist()
    assert plan.run.order.tolist() != planned([(prompt, 1) for prompt, _ in prompts]).run.order.tolist()


@pytest.mark.parametrize(("more", "options"), [(0, {}), (-1, {"keep_cache": True})])
def test_what_need_not_go_stays(files: tuple[Path, Path], more: int, options: dict[str, Any]) -> None:
    prompts = a_tree(2)
    plan = planned(prompts)
    write(files[0], prompts)
    runtime = Watched(plan.pool_for_all + more)
    run_batch(runtime, *files, **options)
    assert [request.index for request in runtime.submitted] == plan.run.order.tolist()
    assert {request.reusable_len for request in runtime.submitted} == {None}


def test_the_order_of_the_file(files: tuple[Path, Path]) -> None:
    prompts = a_tree(2)
    write(files[0], prompts)
    runtime = Watched(10)
    with pytest.raises(ParameterError, match="order is 'random'; it must be 'planned' or 'file'"):
        run_batch(runtime, *files, order="random")
    run_batch(runtime, *files, order="file")
    assert [request.index for request in runtime.submitted] == list(range(len(prompts)))
    assert {request.reusable_len for request in runtime.submitted} == {None}


def test_a_prompt_that_the_pool_does_not_hold(files: tuple[Path, Path]) -> None:
    """It is refused when it is its turn; nothing is predicted then."""
    prompts = a_tree(2)
    write(files[0], prompts)
    report = run_batch(Watched(10), *files)
    assert report.written == len(prompts)
    assert report.predicted_hit_rate is None


LATER = [pytest.param(chunk, marks=pytest.mark.long) for chunk in CHUNKS[:-1]]


@pytest.fixture(scope="module", params=[*LATER, CHUNKS[-1]])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One file in both orders by a Runtime whose pool holds twice the longest request, and the plan."""
    prompts = a_tree(seed=1)
    plan = planned(prompts)
    folder = tmp_path_factory.mktemp("planned")
    write(folder / "in.jsonl", prompts)
    found: dict[str, Any] = {"plan": plan}
    limits = RunLimits(2 * plan.longest_request, chunked_prefill_size=request.param)
    found["expected"] = plan.expect(limits)
    for order in ("planned", "file"):
        with radixrt.Runtime(
            device="cpu", max_total_tokens=limits.pool_tokens, chunked_prefill_size=request.param
        ) as runtime:
            output = folder / f"{order}.jsonl"
            found[order] = runtime.run_batch(folder / "in.jsonl", output, order=order)
            found[f"{order} texts"] = [json.loads(line)["text"] for line in output.open()]
            found[f"{order} left"] = runtime.cache_stats().evictable
    return found


def test_planned_order_has_the_best_hits(runs: dict[str, Any]) -> None:
    best = runs["plan"].statistics.best_hit_rate
    assert runs["planned"].best_hit_rate == runs["file"].best_hit_rate == best
    assert runs["planned"].hit_rate >= 0.99 * best
    assert runs["file"].hit_rate < 0.9 * best
    assert runs["planned texts"] == runs["file texts"]


def test_hits_are_as_predicted(runs: dict[str, Any]) -> None:
    """The modelled and the rehearsed prediction."""
    for predicted in (runs["planned"].predicted_hit_rate, runs["expected"].planned.hit_rate):
        assert abs(runs["planned"].hit_rate - predicted) <= 0.01
    assert runs["expected"].planned.is_rehearsed
    assert abs(runs["file"].hit_rate - runs["expected"].file_order.hit_rate) <= 0.01


def test_little_is_left_that_nobody_wants(runs: dict[str, Any]) -> None:
    """Those that have overtaken others leave all that they have."""
    assert runs["planned left"] < 0.5 * runs["file left"]


def test_without_a_cache_nothing_is_predicted(files: tuple[Path, Path]) -> None:
    write(files[0], a_tree()[:3])
    with radixrt.Runtime(device="cpu", max_total_tokens=1000, enable_prefix_cache=False) as runtime:
        report = runtime.run_batch(*files)
    assert report.predicted_hit_rate is None
    assert report.hit_rate == 0


@pytest.mark.parametrize("in_order", [True, False])
def test_requests_in_order_are_not_sorted(in_order: bool) -> None:
    """Neither when they are submitted nor when they are admitted, though the longest match would come first."""
    prompts = [[9, 9, 9, 1], [5, 5, 1], [9, 9, 9, 2], [5, 5, 2], [7], [9, 9, 9, 1, 4]]
    params = radixrt.SamplingParams(max_new_tokens=2, temperature=0, ignore_eos=True)
    with radixrt.Runtime(device="cpu", max_total_tokens=200, max_running_requests=1) as runtime:
        runtime.submit(
            *(runtime.prepare(prompt, params, index=i) for i, prompt in enumerate(prompts)), in_order=in_order
        )
        ended = []
        while runtime.has_work:
            ended += [output.index for output in runtime.step()]
    assert (ended == list(range(len(prompts)))) == in_order


def test_a_warm_cache_is_part_of_the_plan(files: tuple[Path, Path]) -> None:
    """The best possible and the predicted rate count what it has; a full one or a second tier is not predicted."""
    write(files[0], a_tree(1)[:4])
    with radixrt.Runtime(device="cpu", max_total_tokens=2000) as runtime:
        cold = runtime.run_batch(*files, keep_cache=True)
        warm = runtime.run_batch(*files, overwrite=True)
    assert cold.best_hit_rate < warm.best_hit_rate == warm.predicted_hit_rate == warm.hit_rate
    with radixrt.Runtime(device="cpu", max_total_tokens=60) as runtime:
        runtime.run_batch(*files, overwrite=True, keep_cache=True)
        report = runtime.run_batch(*files, overwrite=True)
    assert report.predicted_hit_rate is None
    assert report.hit_rate <= report.best_hit_rate
    with radixrt.Runtime(device="cpu", max_total_tokens=2000, host_memory_gb=0.01) as runtime:
        assert runtime.run_batch(*files, overwrite=True).predicted_hit_rate is None


@pytest.mark.parametrize("order", ["planned", "file"])
def test_scored_prompts_are_part_of_the_plan(files: tuple[Path, Path], order: Any) -> None:
    line = {"token_ids": list(range(5, 25)), "max_new_tokens": 2, "ignore_eos": True, "temperature": 0}
    lines = [{**line, "prompt_logprobs": 0} if i % 2 else line for i in range(10)]
    files[0].write_text("".join(json.dumps(line) + "\n" for line in lines))
    with radixrt.Runtime(device="cpu", max_total_tokens=2000) as runtime:
        report = runtime.run_batch(*files, order=order)
    assert report.best_hit_rate == 5 * 19 / 200
    assert report.hit_rate <= report.best_hit_rate
    assert report.predicted_hit_rate == (report.hit_rate if order == "planned" else None)


def test_many_answers_are_predicted(files: tuple[Path, Path]) -> None:
    """One answer after the other fits, all of them together do not."""
    lines = [
        {"token_ids": [*range(5, 45), 50 + i], "max_new_tokens": 5, "n": 6, "ignore_eos": True} for i in range(4)
    ]
    files[0].write_text("".join(json.dumps(line) + "\n" for line in lines))
    with radixrt.Runtime(device="cpu", max_total_tokens=60) as runtime:
        report = runtime.run_batch(*files)
    assert report.errors == 0
    assert report.predicted_hit_rate == report.hit_rate == report.best_hit_rate == 3 * 40 / 164


def test_one_prompt_that_is_too_long_is_left_out_of_the_plan(files: tuple[Path, Path]) -> None:
    short = [([5, 6, 7, 8, n], 2) for n in range(10, 20)]
    write(files[0], [*short[:4], ([9] * 150, 2), *short[4:]])
    builder = builder_without_weights(MODEL_PATH)  # which does not know of the pool, as in the command
    with Batch(*files, BatchConfig()) as batch:
        scanned = batch.scan(builder.tokenizer, lambda ids, params, line: builder.build(ids, params, index=line))
        assert not scanned.lines.problems
        with radixrt.Runtime(device="cpu", max_total_tokens=100) as runtime:
            report = scanned.run(runtime)
    records = [json.loads(line) for line in files[1].open()]
    assert [record["index"] for record in records if record["error"]] == [4]
    assert report.best_hit_rate == planned(short).statistics.best_hit_rate
    assert report.predicted_hit_rate is not None
    assert abs(report.hit_rate - report.predicted_hit_rate) <= 0.01


def test_what_retractions_cost_is_told(files: tuple[Path, Path]) -> None:
    """Answers that an end token may cut short are promised less memory than they take here."""
    prompts = [[5 + i] * 20 for i in range(8)]
    lines = ({"token_ids": prompt, "max_new_tokens": 40, "temperature": 1, "seed": 1} for prompt in prompts)
    files[0].write_text("".join(json.dumps(line) + "\n" for line in lines))
    with radixrt.Runtime(device="cpu", max_total_tokens=110) as runtime:
        report = runtime.run_batch(*files, report=files[1].with_name("report.json"))
        recomputed = runtime.cache_stats().recomputed_tokens
    assert report.run.recomputed_tokens == recomputed > 0
    assert json.loads(files[1].with_name("report.json").read_text())["run"]["recomputed_tokens"] == recomputed
    console = Console(file=io.StringIO(), width=200)
    print_report(report, console)
    assert f"computed again    {recomputed:,} tokens (" in console.file.getvalue()


def test_what_lacked_a_state_is_told(files: tuple[Path, Path]) -> None:
    """In the order of the file there are too few for all beginnings, which come in turn."""
    prompts = [[*range(100 * (index % 10), 100 * (index % 10) + 60), 2000 + index] for index in range(30)]
    lines = ({"token_ids": prompt, "max_new_tokens": 2} for prompt in prompts)
    files[0].write_text("".join(json.dumps(line) + "\n" for line in lines))
    reports = [files[1].with_name(name) for name in ("report.json", "report.html")]
    sizes = {"pool_tokens": 5000, "context_length": 100, "max_running_requests": 2}
    with scheduled_runtime(**sizes, num_states=9) as runtime:
        report = runtime.run_batch(*files, report=reports, order="file")
        stats = runtime.cache_stats()
        again = runtime.run_batch(files[0], files[1].with_name("again.jsonl"), order="file")
        assert again.run.stateless_tokens == runtime.cache_stats().stateless_tokens - stats.stateless_tokens
    run, page = json.loads(reports[0].read_text()), reports[1].read_text()
    assert report.run.stateless_tokens == run["run"]["stateless_tokens"] == stats.stateless_tokens > 0
    assert report.run.stateless_tokens + report.run.cached_tokens == 20 * 60, "what a model without states finds"
    assert (run["timeline"]["state_capacity"][-1], run["timeline"]["states_kept"][-1]) == (9, stats.state_kept)
    console = Console(file=io.StringIO(), width=200)
    print_report(report, console)
    assert f"lacked a state    {stats.stateless_tokens:,} tokens (" in console.file.getvalue()
    assert f"{stats.stateless_tokens:,} lacked a state" in page
    assert "<figcaption>States</figcaption>" in page

    with scheduled_runtime(**sizes) as runtime:
        report = runtime.run_batch(files[0], files[1].with_name("b.jsonl"), report=reports, order="file")
    assert report.run.stateless_tokens is None
    assert "state_capacity" not in json.loads(reports[0].read_text())["timeline"]
    assert "lacked a state" not in reports[1].read_text()
    assert "<figcaption>States</figcaption>" not in reports[1].read_text()
