"""The throughput benchmark, end to end at tiny sizes; its figures and tables from given times."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import shlex
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from rich.console import Console

import radixrt
from radixrt.bench.catalogue import ABLATIONS, LISTS, SHAPES, write_shape
from radixrt.bench.run import Runs, answer
from radixrt.bench.subject import model_of
from radixrt.bench.throughput import benchmark, engine_process, passes
from radixrt.bench.throughput.engine_process import only_visible
from radixrt.bench.throughput.figures import (
    BaselineEngine,
    BaselineRun,
    KernelCost,
    Profile,
    ShapeFigures,
    StartUp,
    StepTime,
    WorkloadFigures,
)
from radixrt.bench.throughput.options import Options
from radixrt.bench.throughput.passes import busy_seconds, costs, device_intervals, measure_step, profile_passes
from radixrt.bench.throughput.start_up import cold_and_warm, measure_start_up
from radixrt.bench.throughput.table import print_comparison, print_details, print_start_up, print_workloads
from radixrt.builtin import MODEL_PATH
from radixrt.cli import main
from radixrt.errors import ParameterError, RadixrtError
from radixrt.runtime import Runtime
from radixrt.workloads import lists
from radixrt.workloads.lists import WorkloadPrompt
from tests.support.tiny_workloads import RUN, SIZES, make_tiny

HOME = Path(radixrt.__file__).resolve().parent.parent


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny(monkeypatch)
    monkeypatch.setattr(passes, "STEP_REQUESTS", 5)
    monkeypatch.setattr(passes, "WARM_STEPS", 1)
    monkeypatch.setattr(passes, "TIMED_STEPS", 3)
    monkeypatch.setattr(passes, "PREFILLS_BEFORE", 1)


@pytest.fixture
def runtime(tmp_path: Path, tiny: None) -> Any:
    with Runtime(
        write_shape("tiny", tmp_path),
        load_format="dummy",
        device="cpu",
        chunked_prefill_size=16,
        max_total_tokens=4096,
    ) as runtime:
        yield runtime


def printed(print_to: Callable[[Console], None], width: int = 125) -> str:
    console = Console(file=io.StringIO(), width=width, record=True, highlight=False)
    print_to(console)
    return console.export_text()


def figures(*workloads: WorkloadFigures, config: str = "qwen3-0.6b", **others: Any) -> ShapeFigures:
    return ShapeFigures(config, config, list(workloads), **others)


# -- the command -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("tiny")
def test_several_cards(tmp_path: Path) -> None:
    """The bound is that of all of them."""
    options = shlex.split("--scale cpu --repeat 1 --device cpu --bandwidth 1e6 --flops 1e9 --workload docqa")
    bounds = []
    for cards in ([], ["--tp", "2", "--pp", "2"]):
        report = tmp_path / "out.json"
        assert main(["bench", "throughput", *options, *cards, "--json", str(report)]) == 0
        written = json.loads(report.read_text())
        bounds.append(written["shapes"][0]["workloads"][0]["bound_seconds"])
        assert written["environment"].get("cards") == ("4 (2 ranks, 2 stages)" if cards else None)
    assert bounds[0] == pytest.approx(4 * bounds[1])


@pytest.mark.usefixtures("tiny")
def test_everything_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, Any]] = []

    def runtime(**options: Any) -> Runtime:
        made.append(options)
        return Runtime(**options)

    captured: list[Runtime] = []
    monkeypatch.setattr(Runtime, "capture_graphs", lambda self: captured.append(self))
    monkeypatch.setattr(benchmark, "Runtime", runtime)
    options = shlex.split("""
        --scale cpu --repeat 2 --device cpu --bandwidth 1e6 --flops 1e9
        --no-prefix-cache --no-overlap --no-graphs --flat --deterministic --text --max-running-requests 3
        --baseline transformers --idle --step --start-up
        --workload docqa
    """)
    report = tmp_path / "out.json"
    assert main(["bench", "throughput", *options, "--json", str(report), "--trace", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert f"{2 * 7 + 1 + 3}/{2 * 7 + 1 + 3}" in shown.err
    for words in ("decode step of 3 requests", "start-up with compiled kernels", "no prefix cache", "aten::mm"):
        assert words in shown.out
    assert "requests at once 3" in shown.out.replace("\n", " ")
    assert re.search(r"docqa +│ +6 │", shown.out), shown.out

    names = {name for _, options in ABLATIONS.values() for name in options}
    own = [{name: options.get(name) for name in names} for options in made]
    nothing = dict.fromkeys(own[0])
    assert own == [
        nothing,
        nothing | {"enable_prefix_cache": False},
        nothing | {"overlap": False},
        nothing | {"cuda_graphs": False},
        nothing | {"attention": "flat"},
        nothing | {"deterministic": True},
    ]
    assert {options["max_running_requests"] for options in made} == {3}
    assert len(captured) == len(made)  # but not where the start is measured, which another process does

    written = json.loads(report.read_text())
    assert set(written) == {"environment", "options", "shapes"}
    (shape,) = written["shapes"]
    assert shape["config"] == "tiny"
    assert [figures["workload"] for figures in shape["workloads"]] == ["docqa"]
    for workload in shape["workloads"]:
        assert len(workload["runs"]) == 2
        assert workload["runs"][0]["prompt_tokens"] != workload["runs"][1]["prompt_tokens"]
        assert workload["hit_rate"] == pytest.approx(workload["best_hit_rate"], abs=0.02)
        assert set(workload["ablations"]) == {
            *("no-prefix-cache", "no-overlap", "no-graphs", "flat", "deterministic")
        }
        for ablation in workload["ablations"].values():
            for run, ours in zip(ablation["runs"], workload["runs"], strict=True):
                assert run["prompt_tokens"] == ours["prompt_tokens"]  # the same lists
        without_cache = workload["ablations"]["no-prefix-cache"]["runs"]
        assert all(run["cached_tokens"] == 0 for run in without_cache)
        assert workload["baseline"]["seconds"] > 0
        assert workload["idle_share"] is None  # there is no GPU
        assert workload["times_bound"] > 0
    assert shape["baseline"]["settings"]["max_requests_per_batch"] == 3
    assert shape["step"]["requests"] == 3
    assert shape["start_up"]["warm"]["parts"]["total"] <= shape["start_up"]["warm"]["runtime"]
    assert [profile["name"] for profile in shape["profiles"]] == ["prefill", "decode"]
    for name in ("prefill", "decode"):
        assert json.loads((tmp_path / f"tiny-{name}.json").read_text())["traceEvents"]


def test_all_lists_are_measured_unless_some_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Options] = []
    monkeypatch.setattr(benchmark, "run_benchmark", lambda options, **_: asked.append(options) or 0)
    for words in ("", "--workload samples --workload docqa --workload samples"):
        assert main(["bench", "throughput", "--scale", "cpu", *words.split()]) == 0
    assert [options.workloads for options in asked] == [LISTS, ("samples", "docqa")]


@pytest.mark.usefixtures("tiny")
def test_every_list_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "out.json"
    words = f"--scale cpu --repeat 1 --device cpu --bandwidth 1e6 --flops 1e9 --json {report}"
    assert main(["bench", "throughput", *words.split()]) == 0
    assert "16/16" in capsys.readouterr().err
    ((shape,), tokens) = json.loads(report.read_text())["shapes"], {}
    for workload in shape["workloads"]:
        assert workload["hit_rate"] == pytest.approx(workload["best_hit_rate"], abs=0.02)
        assert workload["times_bound"] > 0
        tokens[workload["workload"]] = workload["runs"][0]["prompt_tokens"]
    assert tuple(tokens) == LISTS
    own = {name: getattr(lists, name)(**SIZES[name]) for name in LISTS}  # of the list's own seed
    assert tokens == {name: sum(len(one.prompt_ids) for one in own[name]) for name in LISTS}


@pytest.mark.usefixtures("tiny")
def test_a_model_and_what_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "out.json"
    options = "--scale cpu --model built-in --workload samples --workload samples --repeat 1 --device cpu"
    options += " --quantization fp8 --kv-dtype fp8"
    assert main(["bench", "throughput", *options.split(), "--json", str(report)]) == 0
    shown = capsys.readouterr()
    (shape,) = json.loads(report.read_text())["shapes"]
    given = json.loads(report.read_text())["options"]
    assert (given["quantization"], given["kv_dtype"]) == ("fp8", "fp8")
    assert [len(workload["runs"]) for workload in shape["workloads"]] == [1]
    assert "model built-in" in shown.out
    assert "1/1" in shown.err
    for words in ("start-up", "transformers", "decode step", "how many times ours"):
        assert words not in shown.out
    assert re.search(r"samples(.*│){6} +- │ +- │ +- │ +- │\n", shown.out), shown.out  # bound and idle


@pytest.mark.usefixtures("tiny")
def test_a_baseline_that_lasts_hides_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    command = shlex.split("bench throughput --scale cpu --workload docqa --repeat 1 --device cpu")
    assert main([*command, "--baseline", "transformers", "--baseline-limit", "0.001"]) == 0
    assert re.search(r"docqa +│ +[0-9.]+ │ +> 0\.001 │", capsys.readouterr().out)


@pytest.fixture
def other_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules `vllm` and `sglang` of the same surface, in this process and in those that it starts."""
    folder = HOME / "tests" / "support" / "other_engines"
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(HOME), os.environ.get("PYTHONPATH", "")]))


BESIDE = (
    "bench",
    "throughput",
    *["--scale", "cpu", "--repeat", "1", "--device", "cpu", "--workload", "docqa", "--workload", "samples"],
)


@pytest.mark.usefixtures("tiny", "other_engines")
@pytest.mark.parametrize(
    ("name", "shown_as", "setting"),
    [
        ("vllm", "vLLM 0.26.0", ("enable_prefix_caching", True)),
        ("sglang", "SGLang 0.5.17", ("disable_radix_cache", False)),
    ],
)
def test_another_engine_beside_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, shown_as: str, setting: tuple[str, bool]
) -> None:
    report = tmp_path / "out.json"
    assert main([*BESIDE, "--baseline", name, "--json", str(report)]) == 0
    shown = capsys.readouterr().out
    assert re.search(rf"s . +{shown_as}", shown), shown
    assert f"{shown_as}: load_format='dummy'" in shown
    assert "- [" not in shown
    assert "from texts" not in shown
    (shape,) = json.loads(report.read_text())["shapes"]
    assert shape["baseline"]["name"] == shown_as
    assert shape["baseline"]["settings"][setting[0]] is setting[1]
    for workload in shape["workloads"]:
        assert 0 < workload["baseline"]["seconds"] < 5


@pytest.mark.usefixtures("tiny", "other_engines")
@pytest.mark.parametrize(
    ("name", "at_once"), [("vllm", "max_num_seqs"), ("sglang", "max_running_requests")]
)
def test_texts_beside_their_ids_and_another_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, at_once: str
) -> None:
    report = tmp_path / "out.json"
    options = ["--text", "--tokenizer", str(MODEL_PATH), "--max-running-requests", "4", "--json", str(report)]
    assert main([*BESIDE, "--baseline", name, *options]) == 0
    shown = capsys.readouterr().out
    assert f"texts,tokenizer{MODEL_PATH}" in "".join(shown.split())
    (shape,) = json.loads(report.read_text())["shapes"]
    assert shape["tokenizer"] == str(MODEL_PATH)
    assert shape["baseline"]["settings"][at_once] == 4
    assert not shape["baseline"]["settings"]["skip_tokenizer_init"]
    for workload in shape["workloads"]:
        (of_text,), (of_ids,) = workload["runs"], workload["from_ids"]["runs"]
        wanted, tokens = workload["from_ids"]["list_tokens"], of_text["prompt_tokens"]
        assert tokens == pytest.approx(wanted, rel=0.02)
        assert all(of_text[key] == of_ids[key] for key in set(of_text) - {"seconds"})
        assert workload["hit_rate"] == pytest.approx(workload["best_hit_rate"], abs=0.02)
        assert workload["baseline"]["seconds"] > 0
        counts = rf"{workload['workload']} +│ +{tokens:,} │ +{tokens / wanted:.1%} │"
        assert re.search(counts + r" +[0-9.]+ │ +[0-9.]+ │ +x[0-9.]+ │", shown), shown


@pytest.mark.usefixtures("tiny", "other_engines")
@pytest.mark.parametrize(
    ("wrong", "cell", "reason"),
    [
        pytest.param("fails", r"- \[\d\]", "ValueError: the engine core died", marks=pytest.mark.long),
        ("crashes", r"- \[\d\]", "its process ended: Segmentation fault"),
        ("short", r"- \[\d\]", r"it made \d+ of \d+ tokens: nothing can be compared"),
        ("no start", r"- \[\d\]", "vLLM did not start: its process ended: RuntimeError: CUDA out of memory"),
        ("hangs", r"> 0\.5", ""),
    ],
)
def test_another_engine_that_goes_wrong_hides_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    wrong: str,
    cell: str,
    reason: str,
) -> None:
    monkeypatch.setenv("FAKE_ENGINE", wrong)
    child = tmp_path / "child"
    monkeypatch.setenv("FAKE_CHILD", str(child))
    assert main([*BESIDE, "--baseline", "vllm", "--baseline-limit", "0.5" if wrong == "hangs" else "2"]) == 0
    shown = capsys.readouterr().out
    for workload in ("docqa", "samples"):
        assert re.search(rf"{workload} +│ +[0-9.]+ │ +{cell} │", shown), shown
    assert re.search(reason, shown), shown
    if child.exists():
        assert has_ended(int(child.read_text()))


def has_ended(process: int) -> bool:
    """Whether a process is gone, or only waits to be reaped, within ten seconds."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if psutil.Process(process).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.usefixtures("tiny", "other_engines")
def test_ctrl_c_ends_the_other_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = tmp_path / "child"
    monkeypatch.setenv("FAKE_CHILD", str(child))

    def interrupted(**_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine_process, "BaselineRun", interrupted)
    assert main([*BESIDE, "--baseline", "vllm"]) == 130
    assert has_ended(int(child.read_text()))


@pytest.mark.parametrize(("name", "product"), [("vllm", "vLLM"), ("sglang", "SGLang")])
def test_another_engine_that_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, product: str
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda asked: None if asked == name else find(asked))
    monkeypatch.setattr(benchmark, "ShapeMeasurement", lambda *_: pytest.fail("it ran"))
    assert main([*BESIDE, "--baseline", name]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert re.fullmatch(rf"radixrt: error: baseline {name} needs {product}, .*`pip install {name}`.*\n", shown.err)


@pytest.mark.parametrize(
    ("device", "visible", "expected"),
    [
        ("cpu", None, {}),
        ("cuda", None, {}),
        ("cuda:1", None, {"CUDA_VISIBLE_DEVICES": "1"}),
        ("cuda:1", "4,6", {"CUDA_VISIBLE_DEVICES": "6"}),
    ],
)
def test_another_engine_sees_the_same_gpu(
    monkeypatch: pytest.MonkeyPatch, device: str, visible: str | None, expected: dict[str, str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert only_visible(torch.device(device)) == expected


@pytest.mark.usefixtures("tiny")
def test_two_shapes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "other", {**SHAPES["tiny"], "vocab_size": 40})
    options = Options(scale="cpu", configs=("tiny", "other"), workloads=("samples",), repeat=1, device="cpu")
    assert benchmark.run_benchmark(replace(options, baseline="transformers")) == 0
    shown = capsys.readouterr()
    assert "4/4" in shown.err
    titles = [line for line in shown.out.splitlines() if line.startswith(("tiny (", "other ("))]
    assert [title.split()[0] for title in titles] == ["tiny", "other", "tiny", "other"]
    assert "- [" not in shown.out  # prompts are of ids that each shape has


def test_ctrl_c(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(benchmark, "run_once", interrupted)
    assert main(["bench", "throughput", "--scale", "cpu", "--workload", "samples", "--device", "cpu"]) == 130
    assert capsys.readouterr().err.endswith("radixrt: interrupted\n")


@pytest.mark.parametrize("scale", ["cpu", "full"])
def test_sizes_for_a_gpu_on_a_cpu(
    scale: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(benchmark, "_measurement", interrupted)
    assert main(["bench", "throughput", "--device", "cpu", "--scale", scale]) == 130
    assert ("--scale cpu has sizes for a CPU" in capsys.readouterr().err) == (scale == "full")


def test_command_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "ShapeMeasurement", lambda *_: pytest.fail("it ran"))

    def fails(arguments: list[str], message: str) -> None:
        assert main(["bench", "throughput", "--device", "cpu", *arguments]) == 2
        shown = capsys.readouterr().err
        assert re.search(r"radixrt: error: .*" + message + r".*\n$", shown), shown

    fails(["--json", str(tmp_path)], "is in the way of the report")
    fails(["--trace", str(tmp_path / "no")], "is no folder")
    fails(["--repeat", "0"], "repeat is 0")
    fails(["--baseline-limit", "0"], "baseline_limit is 0")
    fails(["--model", "m", "--config", "tiny"], "give one")
    fails(["--text", "--model", str(tmp_path)], "cannot load a tokenizer from")
    monkeypatch.setitem(SHAPES, "tiny", {**SHAPES["tiny"], "vocab_size": 40})
    fails(["--text", "--config", "tiny"], "tokenizer built-in has 1,632 tokens, and the shape tiny has 40")
    for arguments in (["--workload", "chat"], ["--config", "gpt"], ["--baseline", "tgi"]):
        with pytest.raises(SystemExit) as ended:
            main(["bench", "throughput", *arguments])
        assert ended.value.code == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale": "huge"}, "scale is 'huge'; it must be one of: cpu, full"),
        ({"workloads": ("chat",)}, "workload is 'chat'; it must be one of: unshared, fewshot"),
        ({"configs": ("gpt",)}, "config is 'gpt'; it must be one of: tiny"),
        ({"ablations": ("no-thing",)}, "ablation is 'no-thing'"),
        ({"baseline": "tgi"}, "baseline is 'tgi'; it must be one of: transformers, vllm, sglang"),
        ({"seed": -1}, "seed is -1"),
        ({"tp": 0}, "tp is 0"),
        ({"pp": 65}, "pp is 65"),
        ({"bandwidth": 1e12}, "given together"),
        ({"tokenizer": "smollm2"}, "text is not"),
        ({"text": True, "tokenizer": "smollm2", "model": "m"}, "a model has its own"),
        ({"max_running_requests": 0}, "max_running_requests is 0"),
    ],
)
def test_options_out_of_bounds_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        Options(**changes)


@pytest.mark.gpu
@pytest.mark.usefixtures("tiny")
def test_on_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = shlex.split("--scale cpu --repeat 1 --device cuda --workload docqa --baseline transformers")
    report = tmp_path / "out.json"
    asked = ["--idle", "--step", "--start-up", "--trace", str(tmp_path), "--json", str(report)]
    assert main(["bench", "throughput", *options, *asked]) == 0
    (shape,) = json.loads(report.read_text())["shapes"]
    assert 0 < shape["workloads"][0]["idle_share"] < 1
    assert shape["step"]["waiting"] >= 0
    assert shape["start_up"]["cold"]["total"] > shape["start_up"]["warm"]["total"]
    for profile in shape["profiles"]:
        assert profile["costs"]
        assert not any(cost["name"].startswith("aten::") for cost in profile["costs"])


@pytest.mark.usefixtures("tiny")
def test_a_text_with_other_tokens_than_alone_stops_the_benchmark() -> None:
    with (
        model_of(None, "tiny", "built-in") as (folder, load_format),
        Runtime(folder, load_format=load_format, device="cpu", max_total_tokens=100) as runtime,
    ):
        ids = runtime.tokenizer.encode("the cat")
        answer(runtime, [WorkloadPrompt(ids, 1, text="the cat")])
        with pytest.raises(RadixrtError, match="other tokens in its list than by itself: 'the cap'"):
            answer(runtime, [WorkloadPrompt(ids, 1, text="the cap")])


# -- what is measured --------------------------------------------------------------------------------------


def test_a_decode_step_is_taken_apart(runtime: Runtime) -> None:
    engine = runtime.parts.engine
    step = measure_step(runtime)
    assert (step.requests, step.steps) == (5, 3)
    assert min(step.planning, step.launching) > 0
    assert step.waiting >= 0
    assert step.cpu_seconds == step.planning + step.launching
    assert not {"launch", "collect"} & set(vars(engine.runner))  # nothing of it stays behind
    assert not runtime.has_work
    assert runtime.flush_cache() == 0


def test_profiles(runtime: Runtime, tmp_path: Path) -> None:
    prompts = lists.unshared(requests=4, prompt_len=(20, 30))
    prefill, decode = profile_passes(runtime, prompts, tmp_path, "it")
    assert (prefill.steps, decode.steps) == (1, passes.DECODES_PROFILED)
    for profile in (prefill, decode):
        assert Path(profile.file).stat().st_size > 1000
        assert [cost.seconds for cost in profile.costs] == sorted((c.seconds for c in profile.costs), reverse=True)
    calls = {cost.name: cost.calls for cost in decode.costs}
    assert calls["aten::mm"] == 4 * 2 + 1  # of one step: four products a layer, and the head
    with pytest.raises(RadixrtError, match="nothing of 1 prompts was left"):
        profile_passes(runtime, lists.unshared(requests=1, prompt_len=(4, 4)), tmp_path, "it")


@pytest.mark.usefixtures("tiny")
def test_a_pool_that_is_too_small_for_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "NEW_TOKENS", 20)
    folder = write_shape("tiny", tmp_path)
    with (
        Runtime(folder, load_format="dummy", device="cpu", max_total_tokens=100) as runtime,
        pytest.raises(RadixrtError, match="5 requests of 20 new tokens never ran together"),
    ):
        measure_step(runtime)


def test_start_up_tells_why_it_failed(tmp_path: Path) -> None:
    with pytest.raises(RadixrtError, match=r"ended with status 1 before its first token: radixrt\.errors"):
        measure_start_up({"model": str(tmp_path), "device": "cpu"})


def test_the_second_start_finds_the_kernels_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    folders = []

    def measured(options: Any, environment: dict[str, str]) -> int:
        folders.append(Path(environment["TRITON_CACHE_DIR"]))
        assert [*folders[-1].iterdir()] == [folders[-1] / "kernel"] * (len(folders) - 1)
        (folders[-1] / "kernel").touch()
        return len(folders)

    monkeypatch.setattr("radixrt.bench.throughput.start_up.measure_start_up", measured)
    assert cold_and_warm({}) == (1, 2)
    assert folders[0] == folders[1]


def test_busy_time_is_a_union() -> None:
    second = 10**9
    assert busy_seconds([]) == 0
    intervals = [(5 * second, 6 * second), (0, 2 * second), (second, 3 * second), (second, 2 * second)]
    assert busy_seconds(intervals) == 4


def test_only_what_ran_on_the_gpu_counts() -> None:
    def event(name: str, device: str, start: int, duration: int, annotation: bool = False) -> Any:
        return SimpleNamespace(
            name=lambda: name,
            device_type=lambda: SimpleNamespace(name=device),
            start_ns=lambda: start,
            duration_ns=lambda: duration,
            is_user_annotation=lambda: annotation,
        )

    events = [
        event("matmul", "CUDA", 0, 3000),
        event("matmul", "CUDA", 5000, 5000),
        event("copy", "CUDA", 9000, 10000),
        event("all of it", "CUDA", 0, 90000, annotation=True),
        event("cudaLaunchKernel", "CPU", 0, 70000),
    ]
    profiler = SimpleNamespace(profiler=SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: events)))
    assert device_intervals(profiler) == [(0, 3000), (5000, 10000), (9000, 19000)]
    assert costs(profiler, 2, torch.device("cuda")) == (
        KernelCost("copy", pytest.approx(5e-6), 0.5),
        KernelCost("matmul", pytest.approx(4e-6), 1.0),
    )


# -- figures and tables ------------------------------------------------------------------------------------


def test_figures() -> None:
    runs = Runs([RUN, replace(RUN, seconds=6.0, bound_seconds=2.0), replace(RUN, seconds=4.0, cached_tokens=900)])
    assert (runs.seconds, runs.bound_seconds, runs.times_bound) == (4.0, 1.0, 3.0)
    assert (runs.output_tokens_per_second, runs.tokens_per_second) == (50.0, 300.0)
    assert (runs.hit_rate, runs.best_hit_rate) == (pytest.approx(0.7), pytest.approx(0.7))
    assert Runs([replace(RUN, bound_seconds=None)]).times_bound is None


def test_tables() -> None:
    docqa = WorkloadFigures("docqa", Runs([RUN]), idle_share=0.125)
    docqa.ablated = {"no-overlap": Runs([replace(RUN, seconds=3.0)])}
    docqa.baseline = BaselineRun(seconds=5.0)
    engine = BaselineEngine("vLLM 0.26.0", {"max_num_seqs": 512, "load_format": "dummy"})
    samples = WorkloadFigures("samples", Runs([RUN]), ablated={"no-overlap": Runs([RUN])})
    shape = figures(docqa, samples, baseline=engine)
    shown = printed(lambda console: print_workloads(shape, console))
    row = re.escape("docqa 3 2.00 100 600 60.0% 70.0% 1.00 x2.00 50 12.5%")
    assert re.search(row.replace(r"\ ", " +│ +") + " +│", shown), shown
    shown = printed(lambda console: print_comparison(shape, console))
    assert re.search(r"docqa +│ 2\.00 │ 3\.00 x1\.50 │ +5\.00 x2\.50 │", shown), shown
    assert re.search(r"samples +│ 2\.00 │ 2\.00 x1\.00 │ +- │", shown), shown
    assert re.search(r"no overlap │ +vLLM 0\.26\.0 ┃|no overlap ┃ +vLLM 0\.26\.0 ┃", shown), shown
    assert "vLLM 0.26.0: max_num_seqs=512, load_format='dummy'" in shown


def test_start_and_step() -> None:
    start = StartUp(imports=5.0, runtime=8.0, parts={"weights": 1.0, "graphs": 5.0}, first_token=1.0, total=14.0)
    shape = figures(
        step=StepTime(512, 100, planning=6e-4, launching=5e-4, waiting=2e-3),
        cold=replace(start, total=61.0, parts={}),
        warm=start,
        profiles=[Profile("decode", 5, (KernelCost("matmul", 2e-5, 4.0),), "a/it-decode.json")],
    )

    def show(console: Console) -> None:
        print_details(shape, console, "NVIDIA H200")
        print_start_up(shape, console)

    shown = printed(show, width=400)
    assert "compiled kernels: 61.00 s to the first token" in shown
    assert "disk: 14.00 s to the first token: imports 5.00, Runtime 8.00 (weights 1.00, graphs 5.00)" in shown
    assert "CPU 1.10 ms" in shown
    assert "pass itself" not in shown
    assert re.search(r"│ +20\.0 │ +4\.0 │ +5\.00 │ matmul", shown)
