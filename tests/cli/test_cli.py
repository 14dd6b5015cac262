"""The command line, over a runtime without a model."""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import radixrt
import radixrt.frontend.request_builder
import radixrt.replicas.group  # as long as it gets the real builder
import radixrt.verify.matrix
from radixrt.batch.job import Batch
from radixrt.batch.journal.run_folder import RunFolder, run_path
from radixrt.cli import main
from radixrt.cli.options import MODEL, SAMPLING, SCHEDULE, add_options, sampling_params
from radixrt.config import RuntimeConfig
from radixrt.errors import DeviceLostError, ModelError, SchedulerError
from radixrt.frontend.sampling_aliases import SPELLINGS
from radixrt.models.families import FAMILIES
from radixrt.models.registry import find_architecture
from tests.support.fake_runtime import CONTEXT_LENGTH, FakeRuntime
from tests.support.file_limit import file_limit

HOME = Path(radixrt.__file__).resolve().parent.parent


class Recorder(FakeRuntime):
    """Notes what it is made with."""

    made_with: tuple[tuple[Any, ...], dict[str, Any]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        Recorder.made_with = (args, kwargs)


class FakeBuilder:
    """Takes what a FakeRuntime takes, and notes what it is made with."""

    made_with: tuple[Any, ...]
    told_of_chats: dict[str, Any]
    tokenizer, context_length = None, CONTEXT_LENGTH
    build = staticmethod(FakeRuntime().prepare)

    def __init__(self, *args: Any, **told: Any) -> None:
        FakeBuilder.made_with, FakeBuilder.told_of_chats = args, told


@pytest.fixture
def batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments of a batch of two lines, over a Recorder."""
    monkeypatch.setitem(vars(radixrt), "Runtime", Recorder)  # not setattr: it would import the real one
    monkeypatch.setattr(radixrt.frontend.request_builder, "builder_without_weights", FakeBuilder)
    (tmp_path / "in.jsonl").write_text(
        '{"prompt": "ab"}\n{"prompt": "ab", "sampling_params": {"temperature": 1}}\n'
    )
    return ["batch", "--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]


def test_batch(batch: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*batch, "--max-new-tokens", "5"]) == 0
    records = [json.loads(line) for line in Path(batch[-1]).read_text().splitlines()]
    assert [record["token_ids"] for record in records] == [[195, 5], [195, 5]]
    shown = capsys.readouterr()
    for row in (
        r"requests +2\n",
        r"errors +0\n",
        r"prompt tokens +4\n",
        r"cached tokens +2\n",
        r"hit rate +50\.00% \(best possible 25\.00%, predicted 25\.00%\)\n",
        r"generated tokens +4\n",
        r"time +(under )?\d+ m?s \(.* generated tokens/s\)\n",
        r"output +",
    ):
        assert re.search(row, shown.out), shown.out
    assert "2/2" in shown.err
    assert Recorder.made_with == ((), {})
    assert main([*batch, "--overwrite", "--no-progress"]) == 0
    assert capsys.readouterr().err == ""


def test_bad_lines_are_named_before_the_weights_are_loaded(
    batch: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [b'{"prompt": "ab", "custom_id": "a"}', b"{", b"", b'{"token_ids": [1000], "metadata": 3}']
    Path(batch[2]).write_bytes(b"\n".join([*lines, *[lines[0]] * 30]))
    named = [
        "32 of 33 lines are bad (30 duplicate_custom_id, 1 invalid_line, 1 invalid_prompt):\n",
        "  line 2: invalid_line: ",
        "\n  line 4: invalid_prompt: the prompt holds token id 1000; the model's ids are 0 to 999\n  line 5: ",
        "\n  ... and 12 more\n",
    ]
    made: list[bool] = []
    monkeypatch.setitem(vars(radixrt), "Runtime", lambda: made.append(True) or Recorder())
    assert main([*batch, "--no-progress", "--strict"]) == 2
    shown = capsys.readouterr().err
    assert all(part in shown for part in named), shown
    assert "Nothing has run" in shown
    assert not made
    assert not Path(batch[-1]).with_name("out.jsonl.run").exists()
    assert main([*batch, "--no-progress"]) == 0
    shown = capsys.readouterr().err
    assert all(part in shown for part in named), shown
    assert made == [True]
    assert len(Path(batch[-1]).read_bytes().splitlines()) == 33


def test_options_reach_the_runtime_and_the_requests(batch: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(Recorder, "submit", lambda self, *requests, **_: seen.extend(r.params for r in requests))
    options = shlex.split("""
        --temperature 0.5 --top-k 3 --top-p 0.9 --min-p 0.1 --max-new-tokens 4
        --model m --dtype float32 --device cpu --impl torch --load-format dummy --context-length 64 --seed 5
        --memory-fraction 0.5 --max-total-tokens 100 --host-memory-gb 0.5 --max-running-requests 3
        --chunked-prefill-size 32 --schedule-policy fcfs --force-miss --no-overlap --no-graphs
        --attention flat
    """)
    assert main([*batch, "--restart", *options]) == 1  # the requests were taken away
    assert FakeBuilder.made_with == ("m", 64)
    assert Recorder.made_with[1] == {
        "model": "m",
        "dtype": "float32",
        "device": "cpu",
        "impl": "torch",
        "load_format": "dummy",
        "context_length": 64,
        "seed": 5,
        "memory_fraction": 0.5,
        "max_total_tokens": 100,
        "host_memory_gb": 0.5,
        "max_running_requests": 3,
        "chunked_prefill_size": 32,
        "schedule_policy": "fcfs",
        "force_miss": True,
        "overlap": False,
        "cuda_graphs": False,
        "attention": "flat",
    }
    first, second = seen
    assert first == radixrt.SamplingParams(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, max_new_tokens=4)
    assert (second.temperature, second.top_k) == (1.0, 3)
    assert main([*batch, "--restart", "--no-prefix-cache"]) == 1
    assert Recorder.made_with[1] == {"enable_prefix_cache": False}


def test_the_chat_template_and_a_revision(batch: list[str]) -> None:
    thinking = '{"enable_thinking": false}'
    assert main([*batch, "--model", "m/n", "--revision", "v2", "--chat-template-kwargs", thinking]) == 0
    told = {"revision": "v2", "chat_template_kwargs": {"enable_thinking": False}}
    assert FakeBuilder.told_of_chats == told
    assert Recorder.made_with[1] == {"model": "m/n", **told}


def test_verbose_tells_what_is_logged(batch: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("radixrt")
    handlers, level = log.handlers, log.level
    try:
        assert main([*batch, "--verbose"]) == 0
        log.getChild("assembly").info("KV pool: %d", 5)
    finally:
        log.handlers, log.level = handlers, level
    assert capsys.readouterr().err.endswith("radixrt: KV pool: 5\n")


def test_options_without_a_stop() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, "sampling", SAMPLING)
    assert sampling_params(parser.parse_args(["--no-detokenize", "--max-tokens", "3"])) == radixrt.SamplingParams(
        detokenize=False, max_new_tokens=3
    )


def test_every_keyword_of_the_api_is_an_option() -> None:
    sampling = [SPELLINGS.get(option.name, option.name) for option in SAMPLING]
    assert sorted(sampling) == sorted(field.name for field in fields(radixrt.SamplingParams))
    runtime = [option.name for option in (*MODEL, *SCHEDULE)]
    assert sorted(runtime) == sorted(field.name for field in fields(RuntimeConfig))


def test_sampling_options_are_the_parameters() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, "sampling", SAMPLING)
    assert sampling_params(parser.parse_args([])) == radixrt.SamplingParams()
    options = shlex.split(r"""
        --max-new-tokens 9 --min-new-tokens 2 --n 3 --temperature 0.5 --top-k 4 --top-p 0.5 --min-p 0.25
        --repetition-penalty 1.5 --presence-penalty -1 --frequency-penalty 0.5 --logit-bias 2=-100,13=1.5
        --allowed-token-ids 2,13 --bad-word no --bad-word ' never' --sampling-seed 7 --stop 'a b' --stop c
        --stop-regex '\n+Q' --stop-regex 'b|c' --include-stop-str --stop-token-ids 5 --ignore-eos
        --no-skip-special-tokens --logprobs 2 --prompt-logprobs 0 --prompt-logprobs-start 4
        --logprobs-mode processed_logprobs --choice yes --choice no --form-engine llguidance
    """)
    assert sampling_params(parser.parse_args(options)) == radixrt.SamplingParams(
        max_new_tokens=9,
        min_new_tokens=2,
        n=3,
        temperature=0.5,
        top_k=4,
        top_p=0.5,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-1,
        frequency_penalty=0.5,
        logit_bias=((2, -100.0), (13, 1.5)),
        allowed_token_ids=(2, 13),
        bad_words=("no", " never"),
        seed=7,
        stop=("a b", "c"),
        stop_regex=(r"\n+Q", "b|c"),
        include_stop_str=True,
        stop_token_ids=(5,),
        ignore_eos=True,
        skip_special_tokens=False,
        logprobs=2,
        prompt_logprobs=0,
        prompt_logprobs_start=4,
        logprobs_mode="processed_logprobs",
        choice=("yes", "no"),
        form_engine="llguidance",
    )


def test_options_of_forms(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, "sampling", SAMPLING)
    file = tmp_path / "form"

    def read(*options: str) -> radixrt.SamplingParams:
        return sampling_params(parser.parse_args(options))

    file.write_text(' {"const": "é"}\n', "utf-8")
    for given in (str(file), '{"const":"é"}'):
        assert read("--json-schema", given) == radixrt.SamplingParams(json_schema={"const": "é"})
    file.write_text('start: "a"\n')
    assert read("--grammar", str(file)) == radixrt.SamplingParams(grammar='start: "a"\n')
    assert read("--regex", r"\d+") == radixrt.SamplingParams(regex=r"\d+")
    assert read("--json-object") == radixrt.SamplingParams(json_object=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--logit-bias 3", "argument --logit-bias: '3' is not a list of biases, such as 2=-100,13=1.5"),
        ("--stop-token-ids 3,x", "argument --stop-token-ids: '3,x' is not a list of token ids, such as 2,13"),
        ("--temp 0", "unrecognized arguments: --temp"),
        ("--grammar /no/file", "argument --grammar: cannot read /no/file: "),
        ("--json-schema /no/file", "argument --json-schema: cannot read /no/file: "),
    ],
)
def test_options_that_cannot_be_read(
    batch: list[str], capsys: pytest.CaptureFixture[str], options: str, message: str
) -> None:
    for command in (batch, ["generate", "x"], ["chat"]):
        with pytest.raises(SystemExit) as ended:
            main([*command, *options.split()])
        assert ended.value.code == 2
        shown = capsys.readouterr().err
        assert message in shown
        assert len(shown.splitlines()) == 2


def test_models(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["models"]) == 0
    shown = capsys.readouterr().out
    for name, family in FAMILIES.items():
        assert re.search(rf"{name} +{family.name} +{re.escape(family.checkpoints)}", shown)
    assert "A model takes 2 bytes a parameter in bf16, 1 in fp8" in shown
    assert find_architecture("Qwen3ForCausalLM").__name__ == "Qwen3"


def test_mistakes_show_in_one_line_before_the_model_loads(
    batch: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(vars(radixrt), "Runtime", lambda: pytest.fail("it loaded"))

    def fails(arguments: list[str], status: int, message: str) -> None:
        assert main(arguments) == status
        shown = capsys.readouterr().err
        assert re.fullmatch(r"radixrt: error: .*" + message + r".*\n", shown), shown

    fails([*batch, "--temperature", "-1"], 2, r"temperature is -1\.0")
    fails([*batch[:2], "nothing.jsonl", *batch[3:]], 2, r"nothing\.jsonl does not exist")
    fails([*batch[:-1], "out.parquet"], 2, r"records are JSON lines; name it \.jsonl, .*")
    Path(batch[-1]).write_text("precious")
    fails(batch, 2, "--overwrite replaces it")
    assert Path(batch[-1]).read_text() == "precious"


@pytest.mark.parametrize(
    ("error", "status"),
    [(ModelError("no such model"), 2), (SchedulerError("stuck"), 1), (DeviceLostError("it works no more"), 75)],
)
def test_status_says_whose_fault_it_is(
    batch: list[str], monkeypatch: pytest.MonkeyPatch, error: Exception, status: int
) -> None:
    def fail(**options: Any) -> None:
        raise error

    monkeypatch.setitem(vars(radixrt), "Runtime", fail)
    assert main(batch) == status


def test_interrupt(batch: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> Recorder:
        runtime = Recorder()
        runtime.on_step = lambda: signal.raise_signal(signal.SIGINT) if len(runtime.running) == 2 else None
        return runtime

    monkeypatch.setitem(vars(radixrt), "Runtime", interrupted)
    assert main([*batch, "--no-progress"]) == 130
    assert re.fullmatch(
        r"radixrt: stopped: 1 of 2 records are kept in .*out\.jsonl\.run; the same command goes on from there\n",
        capsys.readouterr().err,
    )


@pytest.mark.parametrize(
    ("number", "status", "said"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")]
)
def test_interrupt_while_the_model_loads(
    batch: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: str,
    status: int,
    said: str,
) -> None:
    monkeypatch.setitem(vars(radixrt), "Runtime", lambda: signal.raise_signal(signal.Signals[number]))
    assert main(batch) == status
    assert capsys.readouterr().err == f"radixrt: {said}\n"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--seed -1", "seed is -1"),
        ("--device tpu", "device is 'tpu'; it must be on cpu or cuda, such as 'cuda:0'"),
        ("--device cuda:9", "device is 'cuda:9', but torch sees"),
        ("--dtype int8", "dtype 'int8' is not supported"),
        ("--load-cache nope", "--load-cache nope: there is no such file"),
        ("--save-cache nodir/x", "the folder nodir of the cache file does not exist"),
        ("--max-running-requests 0", "max_running_requests is 0"),
        ("--chunked-prefill-size 0", "chunked_prefill_size is 0"),
        ("--max-total-tokens 0", "max_total_tokens is 0"),
        ("--memory-fraction 2", "memory_fraction is 2"),
        ("--no-prefix-cache --force-miss", "there is no cache to miss"),
        ("--no-prefix-cache --host-memory-gb 1", "nothing is kept"),
        ("--drain-seconds -1", "drain_seconds is -1"),
        ("--model=", "model is ''; it must be a folder or a hub id"),
    ],
)
def test_options_are_checked_before_the_input_is_read(
    batch: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: str,
    message: str,
) -> None:
    monkeypatch.setattr(Batch, "scan", lambda *_: pytest.fail("it read"))
    monkeypatch.setattr(FakeBuilder, "__init__", lambda *_: pytest.fail("it read the model"))
    assert main([*batch, *options.split()]) == 2
    shown = capsys.readouterr().err
    assert re.fullmatch(r"radixrt: error: .*\n", shown)
    assert message in shown
    assert os.listdir(Path(batch[2]).parent) == ["in.jsonl"]


def test_replicas_on_ray_need_ray(
    batch: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "radixrt.replicas.ray_links", raising=False)
    monkeypatch.setattr(Batch, "scan", lambda *_: pytest.fail("it read"))
    assert main([*batch, "--ray", "--replicas", "2"]) == 2
    assert capsys.readouterr().err == (
        "radixrt: error: --ray: replicas on Ray need Ray, which is not installed: pip install 'radixrt[ray]'\n"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--replicas", "0"], "replicas is 0"),
        (["--replicas", "2", "--save-cache", "kept.safetensors"], "--save-cache is for one replica"),
        (["--replicas", "2", "--device", "cuda:0"], "leave the number out"),
        (["--hang-seconds", "-5"], "hang_seconds is -5"),
    ],
)
def test_options_that_do_not_go_with_replicas_are_refused_before_the_input_is_read(
    batch: list[str],
    options: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Batch, "scan", lambda *_: pytest.fail("it read"))
    assert main([*batch, *options]) == 2
    assert message in capsys.readouterr().err


BAD = b"{"
SOUND = b'{"prompt": "ab"}'


def test_a_batch_of_bad_lines_needs_no_weights(
    batch: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(vars(radixrt), "Runtime", lambda **options: pytest.fail("it loaded"))
    Path(batch[2]).write_bytes(b"\n".join([BAD] * 3))
    report = str(Path(batch[-1]).with_name("report.json"))
    assert main([*batch, "--report", report]) == 3
    assert re.search(r"errors +3\n", capsys.readouterr().out)
    assert [json.loads(line)["index"] for line in Path(batch[-1]).read_text().splitlines()] == [0, 1, 2]
    assert json.loads(Path(report).read_text())["errors"] == 3
    Path(batch[2]).write_bytes(b"")
    assert main([*batch, "--overwrite"]) == 0


def test_a_line_of_many_bytes(batch: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path(batch[2]).write_bytes(b"\n".join([SOUND + b" " * 40 + b"{", SOUND]))
    assert main([*batch, "--max-line-bytes", "20"]) == 0
    assert "line 1: invalid_line: the line has 58 bytes; at most 20 are read" in capsys.readouterr().err
    for command in (batch, ["plan", batch[2]]):
        assert main([*command, "--max-line-bytes", "0"]) == 2
        assert "max_line_bytes is 0" in capsys.readouterr().err
    records = [json.loads(line) for line in Path(batch[-1]).read_text().splitlines()]
    assert [record["error"] is None for record in records] == [False, True]


def test_why_sound_lines_have_errors_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Such as prompts that the pool, which the scan does not know, cannot hold."""
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"\n".join([BAD, SOUND, SOUND]))
    words = f"--output {tmp_path / 'out.jsonl'} --device cpu --max-total-tokens 10 --no-progress"
    assert main(["batch", "--input", str(source), *words.split()]) == 3
    first, _, errors = capsys.readouterr().err.partition("radixrt: errors of the run:\n")
    assert "1 of 3 lines is bad" in first
    assert re.fullmatch(r"  2 x invalid_prompt: the prompt needs up to .*, but the pool has 10: .*\n", errors)
    source.write_bytes(b"\n".join([b"", SOUND, SOUND]))
    strict = ["batch", "--input", str(source), *words.split(), "--strict", "--overwrite"]
    assert main(strict) == 2
    told = "2 of 2 lines need more than the 10 tokens of the KV pool, the first one is line 2: raise max_total"
    assert told in capsys.readouterr().err
    assert not run_path(tmp_path / "out.jsonl").exists()  # it would be tied to this input
    strict[strict.index("10")] = "400"
    assert main(strict) == 0


def test_sound_lines_errors_are_told_behind_many_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of which more differ than are remembered."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    bad = [b'{"prompt": "a", "key%d": 1}' % number for number in range(110)]
    source.write_bytes(b"\n".join([*bad, SOUND]))
    words = f"--output {output} --device cpu --max-total-tokens 10 --no-progress"
    assert main(["batch", "--input", str(source), *words.split()]) == 3
    assert "radixrt: errors of the run:\n  1 x invalid_prompt: the prompt needs" in capsys.readouterr().err


def test_one_sound_line_makes_a_batch_good(batch: list[str]) -> None:
    Path(batch[2]).write_bytes(b"\n".join([BAD, SOUND, BAD]))
    assert main(batch) == 0


def test_a_batch_whose_records_are_all_kept_needs_no_weights(
    batch: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was killed before its output was made. What differs from that run is named without them, too."""
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "finish", lambda *_: signal.raise_signal(signal.SIGINT))
        assert main([*batch, "--no-progress"]) == 0
    assert not Path(batch[-1]).exists()
    monkeypatch.setitem(vars(radixrt), "Runtime", lambda **options: pytest.fail("it loaded"))
    assert main([*batch, "--seed", "3"]) == 2
    assert "settings.seed is 0 there and 3 here" in capsys.readouterr().err
    assert main(batch) == 0
    assert len(Path(batch[-1]).read_bytes().splitlines()) == 2
    assert sorted(os.listdir(Path(batch[-1]).parent)) == ["in.jsonl", "out.jsonl"]


def test_empty_input(batch: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path(batch[2]).write_text("\n")
    assert main(batch) == 0
    assert "holds no prompts" in capsys.readouterr().out
    assert Path(batch[-1]).read_bytes() == b""


@pytest.mark.parametrize("output", ["out.jsonl", "-"])
def test_a_disk_that_is_full_before_anything_runs(
    batch: list[str], capsys: pytest.CaptureFixture[str], output: str
) -> None:
    """The same command can run again: no remains block it."""
    source = Path(batch[2])
    batch[-1] = output if output == "-" else batch[-1]
    source.write_text(json.dumps({"prompt": "ab", "metadata": "x" * 50_000}))
    with file_limit(10_000):
        assert main(batch) == 75
    assert "entries.jsonl: File too large; raise the limit" in capsys.readouterr().err
    assert list(source.parent.iterdir()) == [source]


def test_records_on_standard_output_are_alone_there(
    batch: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(Path(batch[2]).read_bytes())))
    assert main(["batch", "--input", "-", "--output", "-", "--no-progress"]) == 0
    shown = capfd.readouterr()
    assert [json.loads(line)["index"] for line in shown.out.splitlines()] == [0, 1]
    assert re.search(r"requests +2\n(.*\n)*output +standard output\n", shown.err)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert main(["batch", "--input", "-", "--output", "-", "--no-progress"]) == 0
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("", "standard input holds no prompts: standard output is empty\n")


def test_the_script_is_the_command(
    batch: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["offline_batch.py", *batch[1:]])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(HOME / "scripts" / "offline_batch.py"), run_name="__main__")
    assert ended.value.code == 0
    assert Path(batch[-1]).exists()


COMMANDS = ("generate", "chat", "batch", "bench", "bench prefix-reuse", "bench throughput", "models")


def test_help_teaches_and_imports_nothing_heavy() -> None:
    """Each in less than a second: but for an interpreter's start, which is measured with the first."""
    code = """
import sys, time
from radixrt.cli import main
for arguments in sys.argv[1:]:
    begin = time.perf_counter()
    try:
        main(arguments.split())
    except SystemExit as ended:
        assert ended.code == (0 if arguments else 2), arguments
    assert time.perf_counter() - begin < 1, arguments
assert not {"torch", "numpy", "transformers", "rich", "tqdm"} & set(sys.modules)
"""
    lines = ["--help", *(f"{command} --help" for command in COMMANDS), "--version", ""]
    result = subprocess.run(
        [sys.executable, "-c", code, *lines], cwd=HOME, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    helps = re.split(r"^usage: ", result.stdout, flags=re.MULTILINE)[1:]
    assert len(helps) == 1 + len(COMMANDS)
    for command, shown in zip(("", *COMMANDS), helps, strict=True):
        assert re.search(rf"^example.*\n?.*radixrt {command}", shown, flags=re.MULTILINE | re.DOTALL), command


# What has slowed starts down, or would: what transformers drags in, web clients, other parts' packages.
HEAVY = (
    "aiohttp",
    "gguf",
    "google.protobuf",
    "httpx",
    "huggingface_hub",
    "jinja2",
    "llguidance",
    "matplotlib",
    "pandas",
    "pyarrow",
    "rich",
    "scipy",
    "sentencepiece",
    "sklearn",
    "starlette",
    "sympy",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.tensor",
    "transformers",
    "uvicorn",
    "xgrammar",
    "yaml",
)


def test_an_answer_imports_nothing_heavy_but_torch() -> None:
    """Beside what torch imports by itself; on a build of torch for CPUs it needs no Triton."""
    code = """
import sys, torch
before = set(sys.modules)
from radixrt.cli import main
assert main(["generate", sys.argv[1], "--temperature", "0", "--device", "cpu"]) == 0
heavy = set(sys.argv[2:]) | (set() if torch.version.cuda or torch.version.hip else {"triton"})
assert not heavy & (set(sys.modules) - before), heavy & (set(sys.modules) - before)
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    prompt = "Mira likes Oslo.\nQ: Mira likes?\nA:"
    result = subprocess.run(
        [sys.executable, "-c", code, prompt, *HEAVY],
        cwd=HOME,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "Oslo\n", "")


def test_models_needs_no_torch() -> None:
    code = "import sys; from radixrt.cli import main; main(['models']); assert 'torch' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", code], cwd=HOME, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")


def test_version_and_module() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "radixrt", "--version"], cwd=HOME, capture_output=True, text=True, timeout=60
    )
    assert result.stdout == f"radixrt {radixrt.__version__}\n"
