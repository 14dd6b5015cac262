"""The prefix-reuse benchmark, end to end at tiny sizes."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import radixrt
from radixrt.bench import prefix_reuse
from radixrt.bench.catalogue import LISTS, SCALES, SHAPES, WORKLOADS, size_table, write_shape
from radixrt.bench.comparison import Comparison
from radixrt.bench.prefix_reuse import Options, compare, print_comparisons, run_benchmark
from radixrt.bench.run import Run, Runs
from radixrt.cli import main
from radixrt.errors import RadixrtError
from radixrt.models.config import read_architecture
from radixrt.models.registry import find_architecture
from radixrt.planning.cards import shape_of
from radixrt.workloads.bound import Experts, ModelShape
from tests.support.tiny_workloads import RUN, SIZES, make_tiny

HOME = Path(radixrt.__file__).resolve().parent.parent


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny(monkeypatch)


def printed(comparison: Comparison) -> str:
    console = Console(file=io.StringIO(), width=110, record=True)
    print_comparisons([comparison], console)
    return console.export_text()


def run(seconds: float, **changes: Any) -> Run:
    return replace(RUN, **{"seconds": seconds, "bound_seconds": None, **changes})


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    "options",
    [
        Options(repeat=1),
        Options(
            model="built-in", repeat=2, schedule_policy="fcfs", workloads=("unshared", "docqa", "chat", "choices")
        ),
    ],
)
def test_every_workload_reaches_the_best_hit_rate(options: Options) -> None:
    comparisons = compare(replace(options, device="cpu"))
    assert tuple(comparison.workload for comparison in comparisons) == options.workloads
    for comparison in comparisons:
        assert len(comparison.cached) == len(comparison.missed) == options.repeat
        assert comparison.cached.hit_rate == pytest.approx(comparison.cached.best_hit_rate, abs=0.01)
        assert comparison.percent_of_bound is None
        for cached, missed in zip(comparison.cached, comparison.missed, strict=True):
            assert missed.cached_tokens == 0
            same = ("requests", "prompt_tokens", "generated_tokens")
            assert all(getattr(cached, name) == getattr(missed, name) for name in same)
            assert cached.seconds > 0
            assert missed.seconds > 0
    by_name = {comparison.workload: comparison for comparison in comparisons}
    assert by_name["unshared"].cached.best_hit_rate < 0.05
    assert by_name["choices"].cached[0].generated_tokens == 0
    assert len({run.prompt_tokens for run in by_name["unshared"].cached}) == options.repeat  # fresh prompts


@pytest.mark.usefixtures("tiny")
def test_a_host_tier_keeps_what_the_pool_has_no_room_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SIZES, "chat", {**SIZES["chat"], "conversations": 8})
    report = tmp_path / "out.json"
    options = shlex.split(f"""
        --workload chat --repeat 1 --device cpu --max-total-tokens 150 --host-memory-gb 0.1
        --json {shlex.quote(str(report))}
    """)
    assert main(["bench", "prefix-reuse", *options]) == 0
    shown = capsys.readouterr()
    assert "3/3" in shown.err  # with the cache, with misses forced, with a host tier
    assert "without and with a host tier" in shown.out
    figures = json.loads(report.read_text())["workloads"][0]
    assert figures["hit_rate"] < figures["hit_rate_tiered"] <= figures["best_hit_rate"]
    assert len(figures["runs_tiered"]) == 1


@pytest.mark.usefixtures("tiny")
def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "out.json"
    options = shlex.split(f"""
        --workload docqa --workload chat --workload docqa --repeat 1 --device cpu --bandwidth 1e6 --flops 1e9
        --json {shlex.quote(str(report))}
    """)
    assert main(["bench", "prefix-reuse", *options]) == 0
    shown = capsys.readouterr()
    assert "tiny (random weights)" in shown.out
    assert re.search(r"docqa +│ +6 │", shown.out), shown.out
    assert "4/4" in shown.err  # two workloads, twice

    written = json.loads(report.read_text())
    assert set(written) == {"environment", "options", "workloads"}
    assert set(written["environment"]) == {"radixrt", "torch", "device", "model"}
    assert written["options"]["workloads"] == ["docqa", "chat"]
    docqa, chat = written["workloads"]
    assert chat["workload"] == "chat"
    assert set(docqa) == {
        "workload",
        "seconds_cached",
        "seconds_missed",
        "speed_up",
        "tokens_per_second",
        "generated_tokens_per_second",
        "hit_rate",
        "best_hit_rate",
        "percent_of_bound",
        "runs_cached",
        "runs_missed",
    }
    (cached,) = docqa["runs_cached"]
    assert set(cached) == set(asdict(run(1.0)))
    assert docqa["percent_of_bound"] == pytest.approx(100 * cached["bound_seconds"] / cached["seconds"])
    assert docqa["hit_rate"] == pytest.approx(docqa["best_hit_rate"], abs=0.01)


def test_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    figures = [Comparison(name, cached=Runs([run(1.0)]), missed=Runs([run(2.0)])) for name in WORKLOADS]
    monkeypatch.setattr(prefix_reuse, "compare", lambda *_, **__: figures)
    picture = tmp_path / "out.png"
    assert run_benchmark(Options(device="cpu"), plot_file=picture) == 0
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert picture.stat().st_size > 10_000


def test_figures() -> None:
    cached = Runs([run(1.0, bound_seconds=0.5), run(4.0, cached_tokens=800, bound_seconds=0.4), run(2.0)])
    comparison = Comparison("docqa", cached, missed=Runs([run(3.0), run(6.0), run(5.0)]))
    assert (cached.seconds, comparison.missed.seconds, comparison.speed_up) == (2.0, 5.0, 2.5)
    assert (cached.tokens_per_second, cached.output_tokens_per_second) == (600.0, 100.0)
    assert cached.hit_rate == pytest.approx(2 / 3)
    assert cached.best_hit_rate == pytest.approx(0.7)
    assert comparison.percent_of_bound == pytest.approx(100 / 6)  # 2 and 10 times the bound
    shown = printed(comparison)
    cells = ["docqa", "3", "1,000", "2.00", "5.00", "2.50x", "600", "66.67%", "70.00%", "17"]
    assert re.search(" +│ +".join(map(re.escape, cells)) + " │", shown), shown
    assert " - │" in printed(replace(comparison, cached=Runs([run(1.0)])))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("qwen3-0.6b", ModelShape(28, 1024, 3072, 16, 8, 128, 151936, 114_688)),
        ("llama-3.1-8b", ModelShape(32, 4096, 14336, 32, 8, 128, 128256, 131_072)),
        ("qwen3-32b", ModelShape(64, 5120, 25600, 64, 8, 128, 151936, 262_144)),
        ("llama-3.1-70b", ModelShape(80, 8192, 28672, 64, 8, 128, 128256, 327_680)),
        ("qwen3-30b-a3b", ModelShape(48, 2048, 0, 32, 4, 128, 151936, 98_304, experts=Experts(128, 8, 768))),
        ("gpt-oss-20b", ModelShape(24, 2880, 0, 64, 8, 64, 201088, 49_152, experts=Experts(32, 4, 2880, 17 / 32))),
    ],
)
def test_shapes(name: str, shape: ModelShape, tmp_path: Path) -> None:
    folder = write_shape(name, tmp_path)
    config = find_architecture(read_architecture(folder)).config_class.from_folder(folder)
    assert shape_of(config) == shape
    assert all(scale.shape in SHAPES for scale in SCALES.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale": "huge"}, "scale is 'huge'; it must be one of: cpu, full"),
        ({"workloads": ("docqa", "dogqa")}, "workload is 'dogqa'; it must be one of: unshared, fewshot"),
        ({"config": "gpt"}, "config is 'gpt'; it must be one of: tiny"),
        ({"config": "tiny", "model": "built-in"}, "give one"),
        ({"repeat": 0}, "repeat is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"bandwidth": 1e12}, "given together"),
        ({"bandwidth": 1e12, "flops": 0.0}, r"flops is 0\.0"),
        ({"chunked_prefill_size": 0}, "chunked_prefill_size is 0"),
        ({"max_total_tokens": 0}, "max_total_tokens is 0"),
        ({"host_memory_gb": -1.0}, r"host_memory_gb is -1\.0"),
        ({"dtype": "int8"}, "dtype 'int8' is not supported"),
    ],
)
def test_options_out_of_bounds_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RadixrtError, match=message):
        compare(Options(**{"device": "cpu", **changes}))


@pytest.mark.usefixtures("tiny")
def test_answers_that_the_context_cuts_are_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", {**SHAPES["tiny"], "max_position_embeddings": 102})
    monkeypatch.setitem(SIZES, "samples", {"prompts": 1, "prompt_len": 100, "samples": 1, "new_tokens": 4})
    with pytest.raises(RadixrtError, match=r"got 2 of 4 new ones \(the context is 102\)"):
        compare(Options(workloads=("samples",), device="cpu"))


def test_command_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prefix_reuse, "compare", lambda *_, **__: pytest.fail("it ran"))

    def fails(arguments: list[str], message: str) -> None:
        assert main(["bench", "prefix-reuse", *arguments]) == 2
        shown = capsys.readouterr().err
        assert re.fullmatch(r"radixrt: error: .*" + message + r".*\n", shown), shown

    fails(["--json", str(tmp_path)], "is in the way of the report")
    fails(["--plot", str(tmp_path / "no" / "out.png")], "of the picture does not exist")
    fails(["--repeat", "0"], "repeat is 0")
    fails(["--bandwidth", "1e12"], "given together")
    fails(["--model", "m", "--config", "tiny"], "give one")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    fails(["--plot", str(tmp_path / "out.png")], "pip install matplotlib")
    for arguments in (["--workload", "dogqa"], ["--config", "gpt"], ["--scale", "huge"]):
        with pytest.raises(SystemExit) as ended:
            main(["bench", "prefix-reuse", *arguments])
        assert ended.value.code == 2


def test_help_has_the_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "prefix-reuse", "--help"])
    shown = capsys.readouterr().out
    for name, sizes in size_table("cpu", WORKLOADS):
        assert re.search(rf"  {name} +{sizes}\n", shown), name


def test_documented_sizes_are_those_that_run() -> None:
    text = (HOME / "docs" / "workloads.md").read_text(encoding="utf-8")
    for name, sizes in size_table("cpu", (*WORKLOADS, *LISTS)):
        assert f"| {name} | {sizes} |" in text, name
