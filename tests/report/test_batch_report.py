"""The report of a batch: its figures, as JSON, as a page, and the files that get it."""

from __future__ import annotations

import io
import json
import logging
import re
import signal
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console

import radixrt
import radixrt.frontend.request_builder
import radixrt.replicas.group  # as long as it gets the real builder
import radixrt.verify.matrix
from layers.products import ProductTable
from radixrt.batch.job import BatchInterrupted, run_batch
from radixrt.batch.meter import Meter
from radixrt.cli import main
from radixrt.errors import BatchFileError, ParameterError
from radixrt.report.batch_report import BatchReport, Cost, RunFigures, print_report
from radixrt.report.files import ReportFiles
from radixrt.report.page import report_page
from radixrt.report.plots import MAX_BARS, rate_bars, timeline_plots
from radixrt.report.timeline import MAX_SAMPLES, Sample
from radixrt.schedule.activity import Activity
from tests.report.test_plan_view import Page, letters, plan_of
from tests.support.fake_runtime import CONTEXT_LENGTH, FakeRuntime
from tests.support.plans import planned

HOSTILE = "</script><img src=x onerror=alert(1)>\"'&"
RUN = RunFigures(
    started=1_790_000_000.0,
    answered=40,
    prompt_tokens=4000,
    cached_tokens=3000,
    completion_tokens=500,
    best_hit_rate=0.8,
    predicted_hit_rate=0.75,
    seconds=200.0,
    prefill_seconds=60.0,
    decode_seconds=110.0,
    scheduling_seconds=20.0,
    passes=123,
    most_running=17,
)
SAMPLES = tuple(
    Sample(
        seconds=float(i),
        finished=10 + i // 5,
        prompt_tokens=20 * i,
        cached_tokens=15 * i,
        computed_tokens=5 * i,
        sampled_tokens=3 * i,
        running=min(i, 17),
        waiting=200 - i,
        pool_tokens=4 * i,
        pool_evictable=3 * i,
        pool_capacity=1000,
    )
    for i in range(201)
)
REPORT = BatchReport(
    output_path=Path("out.jsonl"),
    requests=50,
    written=50,
    errors=1,
    prompt_tokens=5000,
    cached_tokens=3500,
    completion_tokens=600,
    kept=10,
    run=RUN,
    price_per_hour=3.6,
    timeline=SAMPLES,
)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "in.jsonl").write_bytes(b"".join(line(number) for number in range(8)))
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def line(number: int) -> bytes:
    return json.dumps({"token_ids": [7] * 6 + [number, number]}).encode() + b"\n"


def interrupt_at(runtime: FakeRuntime, step: int) -> None:
    steps = iter(range(1, 1000))
    runtime.on_step = lambda: signal.raise_signal(signal.SIGINT) if next(steps) == step else None


def page_of(report: BatchReport, *prompts: str, title: str = "in.jsonl") -> str:
    return report_page(report, title=title, plan=plan_of(*prompts), show=letters)


# -- figures -----------------------------------------------------------------------------------------------


def test_figures_that_follow_from_others() -> None:
    assert (RUN.hit_rate, RUN.idle_seconds, RUN.tokens_per_second) == (0.75, 30.0, 2.5)
    assert (REPORT.hit_rate, REPORT.best_hit_rate, REPORT.seconds, REPORT.tokens_per_second) == (
        0.7,
        0.8,
        200.0,
        2.5,
    )
    assert REPORT.cost == Cost(3.6, pytest.approx(0.2), pytest.approx(400.0), pytest.approx(0.2e6 / 4500))
    assert replace(REPORT, price_per_hour=None).cost is None
    assert replace(REPORT, run=RunFigures(seconds=100)).cost == Cost(3.6, pytest.approx(0.1), None, None)
    assert replace(RUN, prefill_seconds=200.0).idle_seconds == 0.0  # clocks differ
    nothing = BatchReport.of_nothing()
    assert (nothing.hit_rate, nothing.tokens_per_second, nothing.run.idle_seconds) == (0.0, 0.0, 0.0)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_meter_counts_from_where_it_begins() -> None:
    runtime, clock = FakeRuntime(), Clock()
    runtime.submit(runtime.prepare([1, 2]))
    runtime.step()
    before = replace(runtime.passed, prefill_seconds=5.0, decode_seconds=6.0, scheduling_seconds=7.0)
    runtime.passed = before
    requests = [runtime.prepare([n] * 8, index=n) for n in range(6)]
    meter = Meter(runtime, clock)
    meter.begin(finished=3)
    runtime.submit(*requests)
    for done in range(1, 7):
        clock.now += 2.0
        for output in runtime.step():
            meter.count(output)
        runtime.passed = replace(
            runtime.passed,
            prefill_seconds=5.0 + done,
            decode_seconds=6.0 + done / 2,
            scheduling_seconds=7.0 + done / 4,
        )
        meter.end_pass(finished=3 + done, ended=1)
    clock.now += 1.0
    meter.end(finished=9)
    run = meter.figures(best_hit_rate=0.6, predicted_hit_rate=0.5)
    assert replace(run, started=0.0) == RunFigures(
        answered=6,
        prompt_tokens=48,
        cached_tokens=24,
        completion_tokens=12,
        best_hit_rate=0.6,
        predicted_hit_rate=0.5,
        seconds=13.0,
        prefill_seconds=6.0,
        decode_seconds=3.0,
        scheduling_seconds=1.5,
        passes=6,
        most_running=1,
    )
    assert run.idle_seconds == 4.0
    times = [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 13.0]
    assert [sample.seconds for sample in meter.timeline] == times
    assert [sample.finished for sample in meter.timeline] == [3, 4, 5, 6, 7, 8, 9, 9]
    assert [sample.prompt_tokens for sample in meter.timeline] == [0, 8, 16, 24, 32, 40, 48, 48]
    assert [sample.cached_tokens for sample in meter.timeline] == [0, 4, 8, 12, 16, 20, 24, 24]
    assert [sample.computed_tokens for sample in meter.timeline] == [0, 4, 8, 12, 16, 20, 24, 24]
    assert [sample.sampled_tokens for sample in meter.timeline] == [0, 2, 4, 6, 8, 10, 12, 12]
    assert [sample.waiting for sample in meter.timeline] == [0, 4, 3, 2, 1, 0, 0, 0]
    assert [sample.running for sample in meter.timeline] == [0, 1, 1, 1, 1, 1, 0, 0]
    last = meter.timeline[-1]
    assert (last.pool_tokens, last.pool_evictable, last.pool_capacity) == (50, 50, 500)


def test_what_failed_was_answered_but_has_no_tokens(files: tuple[Path, Path]) -> None:
    runtime = FakeRuntime()
    runtime.failing = {1, 2}
    run = run_batch(runtime, *files).run
    assert (run.answered, run.prompt_tokens, run.cached_tokens, run.completion_tokens) == (8, 48, 24, 12)


def test_a_whole_run(files: tuple[Path, Path]) -> None:
    files[0].write_bytes(files[0].read_bytes() + b"{\n")
    report = run_batch(FakeRuntime(), *files, price_per_hour=2)
    assert (report.requests, report.written, report.kept, report.errors) == (9, 9, 0, 1)
    run = report.run
    assert (run.answered, run.passes, run.most_running) == (8, 8, 1)
    assert (run.prompt_tokens, run.cached_tokens, run.completion_tokens) == (64, 32, 16)
    assert run.best_hit_rate == 42 / 64
    assert run.started > 1_700_000_000
    assert report.cost is not None
    assert report.cost.run == pytest.approx(2 * run.seconds / 3600)
    first, last = report.timeline[0], report.timeline[-1]
    assert (first.seconds, first.finished, first.prompt_tokens) == (0.0, 1, 0)
    assert (last.finished, last.prompt_tokens, last.cached_tokens, last.sampled_tokens) == (9, 64, 32, 16)
    assert last.seconds == run.seconds
    assert len(report.timeline) <= MAX_SAMPLES


def test_a_resumed_run_is_told_apart_from_the_file(files: tuple[Path, Path]) -> None:
    runtime = FakeRuntime()
    interrupt_at(runtime, 3)
    with pytest.raises(BatchInterrupted) as caught:
        run_batch(runtime, *files)
    assert (caught.value.report.kept, caught.value.report.run.answered) == (0, 3)
    assert not caught.value.report.is_complete
    report = run_batch(FakeRuntime(), *files)
    assert (report.requests, report.written, report.kept, report.is_complete) == (8, 8, 3, True)
    assert (report.run.answered, report.run.prompt_tokens) == (5, 40)
    assert [report.timeline[0].finished, report.timeline[-1].finished] == [3, 8]


# -- the terminal ------------------------------------------------------------------------------------------


def printed(report: BatchReport, **more: str) -> str:
    console = Console(file=io.StringIO(), width=200, highlight=False)
    print_report(report, console, **more)
    return console.file.getvalue()


def test_the_terminal_shows_a_resumed_run() -> None:
    assert printed(REPORT, exact_answers="99%") == (
        "requests          50 (10 from earlier runs)\n"
        "errors            1\n"
        "prompt tokens     5,000\n"
        "cached tokens     3,500\n"
        "hit rate          70.00%\n"
        "generated tokens  600\n"
        "this run          40 requests, 4,000 prompt tokens, 500 generated tokens\n"
        "its hit rate      75.00% (best possible 80.00%, predicted 75.00%)\n"
        "time              200.0 s (123 passes of at most 17 requests, 2 generated tokens/s)\n"
        "time spent        prefill 60 s, decode 110 s, idle 30 s; 20 s of the host's in scheduling\n"
        "cost              0.20 at 3.60 an hour\n"
        "per 1M tokens     44.44\n"
        "per 1M generated  400.00\n"
        "exact answers     99%\n"
    )


def test_the_terminal_shows_a_run_of_one_request() -> None:
    replicas = (
        {
            "requests": 1,
            "cached_tokens": 0,
            "prompt_tokens": 5,
            "seconds": 0.02,
            "busy_seconds": 0.01,
            "device": "cpu",
            "restarts": 1,
        },
    )
    run = replace(RUN, most_running=1, seconds=0.023, repeated_tokens=1, replicas=replicas)
    shown = printed(replace(REPORT, run=run))
    assert "time              23 ms (123 passes of at most 1 request, " in shown
    assert "; 1 token planned to be computed twice\n" in shown
    assert (
        "replica 0         1 request in 0.0 s (10 ms in passes), hit rate 0.00%, cpu, started again 1 time\n"
        in shown
    )


def test_the_terminal_shows_a_run_in_one_piece() -> None:
    run = replace(RUN, predicted_hit_rate=None)
    shown = printed(replace(REPORT, kept=0, is_complete=False, written=20, run=run, price_per_hour=None))
    assert shown.startswith("requests          20 of 50\n")
    assert "hit rate          70.00% (best possible 80.00%)\n" in shown
    assert "this run" not in shown
    assert "cost" not in shown
    cheap = printed(replace(REPORT, price_per_hour=0.01))
    assert "cost              0.00056 at 0.01 an hour\n" in cheap
    assert "cost              0.00 at 0.00 an hour\n" in printed(replace(REPORT, price_per_hour=0.0))


# -- JSON --------------------------------------------------------------------------------------------------

KEYS = {
    *("output", "complete", "read", "requests", "written", "kept", "errors", "prompt_tokens", "cached_tokens"),
    *("completion_tokens", "hit_rate", "run", "cost", "timeline"),
}
RUN_KEYS = {field.name for field in fields(RunFigures)} | {
    "hit_rate",
    "idle_seconds",
    "tokens_per_second",
    "balance",
}


def test_json_has_all_figures() -> None:
    found = json.loads(json.dumps(REPORT.to_json(), allow_nan=False))
    assert found == REPORT.to_json()
    assert set(found) == KEYS
    assert set(found["run"]) == RUN_KEYS
    names = {field.name for field in fields(Sample)}
    assert set(found["timeline"]) == names - {"states", "states_kept", "state_capacity"}
    assert [found[key] for key in ("output", "complete", "kept", "hit_rate")] == ["out.jsonl", True, 10, 0.7]
    assert found["run"]["started"] == "2026-09-21T14:13:20+00:00"
    assert found["run"]["idle_seconds"] == 30.0
    assert found["run"]["predicted_hit_rate"] == 0.75
    assert found["cost"] == {
        "price_per_hour": 3.6,
        "run": pytest.approx(0.2),
        "per_million_generated": pytest.approx(400.0),
        "per_million_tokens": pytest.approx(44.444, abs=0.001),
    }
    assert found["timeline"]["running"] == [sample.running for sample in SAMPLES]
    assert replace(REPORT, output_path=None, price_per_hour=None).to_json()["output"] is None


def test_products_of_a_deterministic_run() -> None:
    """The table as it is, and a line."""
    tables = [
        ProductTable(64, 32, False, (1, 2, 32, 40), equal=(1, 2, 40)),
        ProductTable(32, 64, True, (1, 2, 32, 40), equal=(32, 40)),
        ProductTable(64, 64, False, (1, 2, 32, 40), equal=(1, 2, 32, 40)),
    ]
    run = replace(RUN, products=tuple(table.to_json() for table in tables))
    found = replace(REPORT, run=run).to_json()
    assert json.loads(json.dumps(found)) == found
    assert found["run"]["products"][1]["ordered"] == [1, 2]
    assert "torch's own are replaced at some of them in 2 of 3 shapes" in printed(replace(REPORT, run=run))
    kept = replace(RUN, products=(tables[2].to_json(),))
    assert "torch's own are kept in all of 1 shapes" in printed(replace(REPORT, run=kept))
    assert "torch's own" not in printed(REPORT)


def test_a_batch_says_how_its_products_were_computed(files: tuple[Path, Path]) -> None:
    runtime, table = FakeRuntime(), ProductTable(64, 32, False, (1, 2), equal=(1, 2))
    runtime.products = (table,)
    assert run_batch(runtime, *files).run.products == (table.to_json(),)


some_tokens, some_seconds = st.integers(0, 10**15), st.floats(0, 1e9)


@given(
    run=st.builds(
        RunFigures,
        started=st.floats(0, 1e10),
        prompt_tokens=some_tokens,
        cached_tokens=some_tokens,
        completion_tokens=some_tokens,
        seconds=some_seconds,
        prefill_seconds=some_seconds,
    ),
    price=st.none() | st.floats(0, 1e9),
)
def test_every_report_is_json(run: RunFigures, price: float | None) -> None:
    report = replace(BatchReport.of_nothing(), run=run, price_per_hour=price)
    assert json.loads(json.dumps(report.to_json(), allow_nan=False)) == report.to_json()
    assert printed(report)


# -- the page ----------------------------------------------------------------------------------------------


class ReportPage(Page):
    """Keeps attributes, too."""

    def __init__(self, text: str) -> None:
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        super().__init__(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        super().handle_starttag(tag, attrs)
        self.attributes.append((tag, dict(attrs)))

    def all(self, attribute: str) -> list[str]:
        return [found[attribute] or "" for _, found in self.attributes if attribute in found]


def test_the_page_stands_alone_and_says_all() -> None:
    text = page_of(REPORT, "same head, one", "same head, two", "other")
    page = ReportPage(text)
    for told in (
        "Report of in.jsonl",
        "complete: 50 of 50 records, 10 of them from earlier runs, 1 with an error; begun 2026-09-21 14:13 UTC",
        "75.00% (best possible 80.00%, predicted 75.00%)",
        "3 min 20 s",
        "0.20 at 3.60 an hour",
        "prefill 60 s (30%)",
        "decode 110 s (55%)",
        "idle 30 s (15%)",
        "scheduling 20 s (10%)",
        "all else 3 min 0 s (90%)",
        "same head, ",
        "prompts \u00d7 11 tokens, saves 11 (100.0%), 2 ways on",
    ):
        assert told in page.said, told
    assert page.tags.count("svg") == 6
    assert "script" not in page.tags
    assert not re.search(r"https?:|//|@import|url\((?!#)", text)
    assert "prefers-color-scheme: dark" in text
    assert not re.search("#[0-9a-f]{6}", text[text.index("<body>") :]), "a colour has no variable"
    labels = [found.get("aria-label") for _, found in page.attributes if found.get("role") == "img"]
    assert len(labels) == 8
    assert "The device: prefill 60 s (30%), decode 110 s (55%), idle 30 s (15%)" in labels
    assert "Generated tokens a second: 2 on average, 2 at most" in labels
    assert "Prompt tokens a second: 20 on average, of which 5 were computed" in labels
    assert "Running requests: 17 at most" in labels
    assert "Tokens in the KV pool: 800 of 1,000 held at most, 200 in use at most" in labels
    assert "Hit rate: 75.0% in the end, best possible 80.0%" in labels


def test_what_is_hostile_stays_text() -> None:
    text = page_of(REPORT, HOSTILE + "1", HOSTILE + "2", title=f"{HOSTILE}.jsonl")
    page = ReportPage(text)
    assert f"Report of {HOSTILE}.jsonl" in page.said
    assert page.said.count(HOSTILE) == 3  # title, headline and prefix
    assert not {"script", "img"} & set(page.tags)
    assert not page.all("onerror")


def test_tokens_that_were_thrown_away_are_no_generated_ones() -> None:
    """Of 600 sampled tokens 500 are in answers; which ones is known in the end alone."""
    plots = {plot.title: plot for plot in timeline_plots(REPORT)}
    assert plots["Generated tokens a second"].told == "2 on average, 2 at most"
    plots = {plot.title: plot for plot in timeline_plots(replace(REPORT, is_complete=False, written=20))}
    assert plots["Generated tokens a second"].told == "3 on average, 3 at most"


@pytest.mark.parametrize(("factor", "unit"), [(0.1, "seconds"), (1.0, "minutes"), (300.0, "hours")])
def test_plots_say_their_unit_of_time(factor: float, unit: str) -> None:
    samples = tuple(replace(sample, seconds=sample.seconds * factor) for sample in SAMPLES)
    plots = timeline_plots(replace(REPORT, timeline=samples))
    assert all(f">{unit}</text>" in plot.svg for plot in plots)
    assert all(len(plot.svg) < 60_000 for plot in plots)


def test_levels_are_drawn_as_steps_over_round_numbers() -> None:
    samples = [replace(SAMPLES[0], seconds=float(at), running=running) for at, running in enumerate((2, 4, 4))]
    plots = timeline_plots(replace(REPORT, timeline=tuple(samples)))
    (plot,) = (plot for plot in plots if plot.title == "Running requests")
    assert 'class="line strong" points="36.0,68.9 187.0,68.9 187.0,11.7 338.0,11.7"' in plot.svg
    assert re.findall(r">([\w.]+)</text>", plot.svg) == ["0", "2", "4", *["0", "0.5", "1", "1.5", "2", "seconds"]]


def test_a_rate_is_drawn_in_few_bars_and_keeps_its_sum() -> None:
    seconds = np.cumsum(np.random.default_rng(0).random(400))
    series = {"seconds": seconds - seconds[0], "finished": np.arange(400.0) ** 2}
    edges, rate = rate_bars(series, "finished")
    assert len(rate) == MAX_BARS
    assert (rate * np.diff(edges)).sum() == pytest.approx(399.0**2)


@settings(max_examples=3, deadline=None)
@example(columns=[(0.0, *[0] * 10)] * 2, complete=True)
@example(columns=[(0.0, *[0] * 10), (1e-9, *[0] * 10)], complete=True)
@given(
    columns=st.lists(st.tuples(st.floats(0, 1e7), *[st.integers(0, 10**9)] * 10), max_size=4),
    complete=st.booleans(),
)
def test_every_timeline_makes_a_page(columns: list[tuple[Any, ...]], complete: bool) -> None:
    ordered = zip(*(sorted(column) for column in zip(*columns, strict=True)), strict=True)
    timeline = tuple(Sample(*values) for values in ordered)
    report = replace(REPORT, timeline=timeline, written=50 if complete else 20)
    page = ReportPage(page_of(report, "a"))
    takes_time = len(timeline) > 1 and timeline[-1].seconds > 0
    assert page.tags.count("svg") == (6 if takes_time else 0)
    assert "The prompts share nothing." in page.said
    assert not re.search(r"\bnan\b|\binf\b", page.said)


# -- files -------------------------------------------------------------------------------------------------


def test_reports_are_written_and_replaced(files: tuple[Path, Path]) -> None:
    wanted = [files[0].with_name("report.json"), str(files[0].with_name("report.html"))]
    for path in wanted:
        Path(path).write_text("old")
    report = run_batch(FakeRuntime(), *files, report=wanted, price_per_hour=1.5)
    assert json.loads(Path(wanted[0]).read_text()) == json.loads(json.dumps(report.to_json()))
    page = ReportPage(Path(wanted[1]).read_text())
    assert f"Report of {files[0]}" in page.said
    assert "7 7 7 7 7 7" in page.said  # without a tokenizer, token ids
    assert sorted(path.name for path in files[0].parent.iterdir()) == [
        "in.jsonl",
        "out.jsonl",
        "report.html",
        "report.json",
    ]
    alone = files[0].with_name("alone.json")
    run_batch(FakeRuntime(), *files, overwrite=True, report=alone)
    assert json.loads(alone.read_text())["cost"] is None


class Letters:
    def decode(self, tokens: np.ndarray, *, skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return letters(tokens)


def test_prefixes_are_shown_by_the_tokenizer(tmp_path: Path) -> None:
    plan = planned([[], list(map(ord, HOSTILE + "\ud800a")), list(map(ord, HOSTILE + "\ud800b"))])
    files = ReportFiles(tmp_path / "r.html", "-")
    files.write(REPORT, plan, Letters())  # type: ignore[arg-type]
    page = ReportPage((tmp_path / "r.html").read_text())
    assert HOSTILE + "\\ud800" in page.said
    assert "Report of standard input" in page.said


def test_a_name_that_is_no_text_is_no_obstacle(tmp_path: Path) -> None:
    files = ReportFiles([tmp_path / "r.html", tmp_path / "r.json"], "in-\udcff.jsonl")
    files.write(replace(REPORT, output_path=Path("\udcff")), plan_of("ab"), None)
    assert "Report of in-\\udcff.jsonl" in ReportPage((tmp_path / "r.html").read_text("utf-8")).said
    assert json.loads((tmp_path / "r.json").read_text("utf-8"))["output"] == "\udcff"


def test_an_interrupted_batch_has_its_report(files: tuple[Path, Path]) -> None:
    wanted = [files[0].with_name("report.json"), files[0].with_name("report.html")]
    runtime = FakeRuntime()
    interrupt_at(runtime, 3)
    with pytest.raises(BatchInterrupted):
        run_batch(runtime, *files, report=wanted)
    found = json.loads(wanted[0].read_text())
    assert [found[key] for key in ("complete", "requests", "written")] == [False, 8, 3]
    assert found["run"]["answered"] == 3
    assert found["output"].endswith("out.jsonl.run")
    assert "incomplete: 3 of 8 records" in ReportPage(wanted[1].read_text()).said
    assert replace(REPORT, written=3, requests=8, is_read=False).records == "3 records of 8 lines read so far"
    run_batch(FakeRuntime(), *files, report=wanted)
    found = json.loads(wanted[0].read_text())
    assert [found[key] for key in ("complete", "written", "kept")] == [True, 8, 3]
    page = ReportPage(wanted[1].read_text())
    assert "8 prompts \u00d7 6 tokens, saves 42" in page.said  # of the whole file, though 5 ran


def test_standard_output_has_its_report_too(files: tuple[Path, Path], capfd: pytest.CaptureFixture[str]) -> None:
    wanted = files[0].with_name("report.json")
    run_batch(FakeRuntime(), files[0], "-", report=wanted)
    assert len(capfd.readouterr().out.splitlines()) == 8
    assert json.loads(wanted.read_text())["output"] is None
    runtime = FakeRuntime()
    interrupt_at(runtime, 2)
    with pytest.raises(BatchInterrupted):
        run_batch(runtime, files[0], "-", report=wanted)
    assert json.loads(wanted.read_text())["written"] == 2


REFUSED = [
    ("report", "is neither a page nor JSON; name it .html or .json"),
    ("report.txt", "is neither a page nor JSON"),
    ("report.html.gz", "is neither a page nor JSON"),
    ("-", "is neither a page nor JSON"),
    ("nowhere/report.html", "the folder .*nowhere of the report does not exist"),
    ("folder.json", "is in the way of the report and is not a plain file"),
    ("in.json", "the report in.json is the input; give it another name"),
    ("link.json", "the report link.json is a symbolic link; give the path that it leads to"),
    ("out.json", "the report out.json is the output"),
    ("folder.json/../out.json", "is the output"),
]


@pytest.fixture
def refusing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Input and output, in a folder with what REFUSED wants, where nothing may run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "in.json").write_bytes(line(0))
    (tmp_path / "link.json").symlink_to("in.json")
    monkeypatch.setattr(FakeRuntime, "prepare", lambda *_, **__: pytest.fail("it looked at the input"))
    return Path("in.json"), Path("out.json")


@pytest.mark.parametrize(("path", "message"), REFUSED)
def test_reports_that_are_refused_at_once(refusing: tuple[Path, Path], path: str, message: str) -> None:
    with pytest.raises(BatchFileError, match=message):
        run_batch(FakeRuntime(), *refusing, report=["fine.json", path])
    assert sorted(entry.name for entry in Path().iterdir()) == ["folder.json", "in.json", "link.json"]


@pytest.mark.parametrize("price", [-1, float("nan"), float("inf"), "3", True])
def test_prices_that_are_refused(refusing: tuple[Path, Path], price: Any) -> None:
    with pytest.raises(ParameterError, match=r"price_per_hour is .*; it must be a number from 0 to 1e\+09"):
        run_batch(FakeRuntime(), *refusing, price_per_hour=price)


def test_a_report_that_cannot_be_written(files: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    """The records come first: the output is whole, and what was interrupted says so."""
    folder = files[0].with_name("reports")

    def run(runtime: FakeRuntime) -> None:
        folder.mkdir()
        before = runtime.on_step
        runtime.on_step = lambda: (folder.exists() and folder.rmdir(), before())[1]
        run_batch(runtime, *files, report=folder / "report.json")

    runtime = FakeRuntime()
    interrupt_at(runtime, 3)
    with caplog.at_level(logging.WARNING), pytest.raises(BatchInterrupted):
        run(runtime)
    assert re.search(r"cannot write the report .*report\.json: No such file", caplog.text)
    with pytest.raises(BatchFileError, match=r"cannot write the report .*report\.json: No such file"):
        run(FakeRuntime())
    assert len(files[1].read_bytes().splitlines()) == 8
    assert not files[1].with_name("out.jsonl.run").exists()


# -- the command -------------------------------------------------------------------------------------------


class FakeBuilder:
    tokenizer, context_length = None, CONTEXT_LENGTH
    build = staticmethod(FakeRuntime().prepare)

    def __init__(self, *args: Any) -> None:
        pass


@pytest.fixture
def command(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setitem(vars(radixrt), "Runtime", lambda **options: FakeRuntime())
    monkeypatch.setattr(radixrt.frontend.request_builder, "builder_without_weights", FakeBuilder)
    monkeypatch.chdir(files[0].parent)
    return ["batch", "--input", "in.jsonl", "--output", "out.jsonl", "--no-progress"]


def test_the_command_writes_reports(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--report", "a.json", "--report", "b.html", "--price-per-hour", "3.5"]) == 0
    assert json.loads(Path("a.json").read_text())["cost"]["price_per_hour"] == 3.5
    assert "at 3.50 an hour" in ReportPage(Path("b.html").read_text()).said
    shown = capsys.readouterr().out
    assert re.search(r"cost +\S+ at 3\.50 an hour\n", shown)
    assert shown.endswith("reports           a.json, b.html\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--report", "a.txt"], "the report a.txt is neither a page nor JSON"),
        (["--report", "no/a.html"], "the folder no of the report does not exist; make it first"),
        (["--report", "a.json", "--report", "out.jsonl"], "the report out.jsonl is neither"),
        (["--price-per-hour", "-1"], "price_per_hour is -1.0; it must be a number from 0"),
    ],
)
def test_the_command_refuses_before_anything_runs(
    command: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    message: str,
) -> None:
    unwanted = radixrt.frontend.request_builder
    monkeypatch.setattr(unwanted, "builder_without_weights", lambda *_: pytest.fail("it went on"))
    assert main([*command, *options]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in Path().iterdir()] == ["in.jsonl"]


def test_activity() -> None:
    earlier, later = Activity(1, 2, 3, 4, 5.0, 6.0, 7.0), Activity(10, 20, 30, 40, 50.0, 60.0, 70.0)
    assert later - earlier == Activity(9, 18, 27, 36, 45.0, 54.0, 63.0)
    assert (later - earlier).busy_seconds == 99.0
