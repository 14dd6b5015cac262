"""What the README and the pages on the API show is what happens: snippets are run, or stand in NOT_RUN.

A snippet is a fenced block, and its kind the word behind the fence: `python`, `sh` (commands), `console` (commands
with what they print) or `json` (lines of a batch file). A block without a kind is what the snippet before prints.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import torch
from packaging.specifiers import SpecifierSet

from radixrt.cli import main
from radixrt.config import RuntimeConfig
from radixrt.frontend.sampling_aliases import known_parameters
from radixrt.runtime import Runtime
from radixrt.sampling_params import SamplingParams

HOME = Path(__file__).resolve().parents[1]
README = (HOME / "README.md").read_text(encoding="utf-8")

NOT_RUN = {
    "radixrt generate 'The capital of Norway is' --model Qwen/Qwen3-0.6B --temperature 0 --max-new-tokens 16": (
        "downloads a model; tests/cli/test_generate.py runs it with the built-in one"
    ),
    "radixrt batch --input questions.jsonl --output answers.jsonl --model Qwen/Qwen3-0.6B": (
        "downloads a model; the command before it is the same with the built-in one"
    ),
    "radixrt bench throughput": "wants a GPU; tests/bench/test_throughput.py runs it with small numbers",
    "python -m radixrt.integrations.lm_eval"
    " --model_args pretrained=path/to/model --tasks hellaswag,gsm8k --num_fewshot 5": (
        "wants a model and downloads tasks; tests/integrations/test_lm_eval.py runs it with tasks of its own"
    ),
}

INSTALLATION = ("make ", "pip ", "python3 -m venv ", ". ")
"""How commands begin that no test runs; `check_installation` looks at them."""

ELSEWHERE = {"make demo": "tests/cli/test_demo.py"}
"""Who compares what a command prints, if it is not done here."""


@dataclass(frozen=True)
class Snippet:
    kind: str
    text: str
    printed: str | None = None


def snippets(document: str) -> list[Snippet]:
    """All snippets in order. Fails for what is shown as code in any other way, since nothing would check it."""
    found: list[Snippet] = []
    for kind, text in re.findall(r"^```(.*)\n((?s:.*?))^```$", document, flags=re.MULTILINE):
        assert kind in ("", "python", "sh", "console", "json"), f"nothing runs snippets of kind {kind!r}"
        if kind:
            found.append(Snippet(kind, text))
        else:
            assert found, f"no snippet comes before what prints {text!r}"
            assert found[-1].printed is None, f"two blocks say what one snippet prints; the second is {text!r}"
            found[-1] = Snippet(found[-1].kind, found[-1].text, text)
    prose = re.sub(r"^```(?s:.*?)^```$", "", document, flags=re.MULTILINE)
    stray = re.findall(r"^(?: {4}|\t| *```| *~~~).*", prose, flags=re.MULTILINE)
    assert not stray, f"write code between fences of ```, not as {stray}"
    return found


def of_kind(kind: str) -> list[Snippet]:
    return [snippet for snippet in snippets(README) if snippet.kind == kind]


def commands(text: str) -> Iterator[str]:
    """The commands of a `sh` snippet, without their comments."""
    for line in text.splitlines():
        command = re.sub(r"\s+#.*", "", line).strip()
        if command:
            yield command


@pytest.mark.parametrize("shown", ["```yaml\na: 1\n```\n", "Do this:\n\n    radixrt models\n", "```\nlost\n```\n"])
def test_a_snippet_that_nothing_would_run_is_found(shown: str) -> None:
    with pytest.raises(AssertionError):
        snippets(shown)


@pytest.mark.whole_gpu
@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/python-api.md",
        "docs/coming-from-vllm-sglang.md",
        "docs/verify.md",
        "docs/replicas.md",
        pytest.param(
            "docs/forms.md",
            marks=pytest.mark.skipif(
                importlib.util.find_spec("llguidance") is None,
                reason="llguidance is not installed: pip install 'radixrt[test]'",
            ),
        ),
    ],
)
def test_python_prints_what_the_page_says(
    page: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = [snippet for snippet in snippets((HOME / page).read_text("utf-8")) if snippet.kind == "python"]
    assert found
    names: dict[str, object] = {"__name__": "__main__"}
    for snippet in found:
        assert len(snippet.text.splitlines()) <= 12
        exec(compile(snippet.text, page, "exec"), names)
        assert capsys.readouterr().out == (snippet.printed or ""), snippet.text


@pytest.mark.whole_gpu
def test_commands_run_and_print_what_the_readme_says(tmp_path: Path) -> None:
    tools = {"radixrt": f'"{sys.executable}" -m radixrt', "python": f'"{sys.executable}"'}
    for name, command in tools.items():
        (tmp_path / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (tmp_path / name).chmod(0o755)
    (tmp_path / "examples").symlink_to(HOME / "examples")
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(HOME)}
    expected: list[tuple[str, str | None]] = []
    not_run = set()
    for snippet in of_kind("sh"):
        for command in commands(snippet.text):
            if command in NOT_RUN:
                not_run.add(command)
            elif command.startswith(INSTALLATION):
                check_installation(command)
            else:
                expected.append((command, None))
        if snippet.printed is not None:
            first = next(commands(snippet.text))
            assert first in ELSEWHERE, f"a `console` snippet says what {first!r} prints"
    for snippet in of_kind("console"):
        found = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", snippet.text, flags=re.MULTILINE)
        assert "".join(f"$ {command}\n{printed}" for command, printed in found) == snippet.text
        expected += found
    assert not_run == set(NOT_RUN), "NOT_RUN lists what the README does not show"

    def run(command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )

    at_once = 1 if torch.cuda.is_available() else len(expected)  # each takes what is free on a GPU
    with ThreadPoolExecutor(at_once) as pool:
        for (command, printed), done in zip(expected, pool.map(run, [c for c, _ in expected]), strict=True):
            assert done.returncode == 0, f"{command}: {done.stderr}"
            assert printed is None or done.stdout == printed, command


def check_installation(command: str) -> None:
    """See that what an installing command names exists; it installs, which no test does."""
    if command in ("python3 -m venv .venv", ". .venv/bin/activate"):
        return
    tool, *words = shlex.split(command)
    if tool == "make":
        dry = subprocess.run(["make", "-n", *words], cwd=HOME, capture_output=True, text=True)
        assert dry.returncode == 0, dry.stderr
        return
    here = re.fullmatch(r"\.(?:\[([\w,]+)\])?", words[1])
    assert words[0] == "install" and here, f"nothing checks {command!r}"  # noqa: PT018
    project = (HOME / "pyproject.toml").read_text("utf-8")
    for extra in filter(None, (here[1] or "").split(",")):
        assert re.search(rf"^{extra} = \[", project, flags=re.MULTILINE), f"there is no extra {extra!r}"
    for pinned in words[2:]:
        if pinned.startswith("torch"):
            least = re.search(r'"torch>=([\d.]+)"', project)
            assert least
            assert SpecifierSet(f">={least[1]}").contains(pinned.partition("==")[2].replace("*", "0"))


@pytest.mark.parametrize(
    "command", [command.partition(" ")[2] for command in NOT_RUN if command.startswith("radixrt bench ")]
)
def test_commands_that_are_not_run_exist(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([*command.split(), "--help"])
    assert end.value.code == 0
    assert f"usage: radixrt {command}" in capsys.readouterr().out


@pytest.mark.parametrize("page", ["README.md", "docs/coming-from-vllm-sglang.md"])
def test_batch_lines_give_the_records_that_the_page_shows(page: str, tmp_path: Path) -> None:
    found = [snippet for snippet in snippets((HOME / page).read_text("utf-8")) if snippet.kind == "json"]
    assert found
    for snippet in found:
        (tmp_path / "in.jsonl").write_text(snippet.text)
        files = ("--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl"), "--overwrite")
        options = ("--temperature", "0", "--max-total-tokens", "2000", "--no-progress")
        assert main(["batch", *files, *options]) == 0
        assert snippet.printed is not None
        pattern = re.escape(snippet.printed).replace(re.escape("..."), ".*")
        assert re.fullmatch(pattern, (tmp_path / "out.jsonl").read_text())


def test_every_path_that_the_documents_name_exists() -> None:
    documents = [HOME / "README.md", *sorted((HOME / "docs").rglob("*.md"))]
    for document in documents:
        for path in re.findall(
            r"`((?:docs|scripts|examples|tests|radixrt)/[\w/.]+)`", document.read_text("utf-8")
        ):
            where = HOME / path
            assert where.exists() or where.with_suffix(".py").exists(), f"{document.name} names {path}"


def test_the_picture_shows_the_figures_of_the_benchmarks(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from scripts.plot_whole_lists import draw, read

    page = (HOME / "docs" / "benchmarks.md").read_text("utf-8")
    tables = page.partition("\n## Whole lists\n")[2].partition("\n## ")[0]
    shape, measured = "", []
    for line in re.findall(r"^\| *(\w.*?) *\|$", tables, flags=re.MULTILINE):
        first, *cells = [cell.strip() for cell in line.split("|")]
        if cells[0].startswith("vLLM"):
            shape = first
        else:
            measured.append([shape, first, *cells[:3]])
    rows = read(HOME / "docs" / "whole-lists.csv")
    assert rows == measured
    assert "1.06 to 7.5 times as fast" in re.sub(r"\s+", " ", README)
    times = sorted(float(row[4]) for row in rows)
    assert (times[0], times[-1]) == (1.06, 7.5)
    draw(rows, tmp_path / "lists.png")
    assert (tmp_path / "lists.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_every_link_between_the_documents_leads_somewhere() -> None:
    for document in [HOME / "README.md", *sorted((HOME / "docs").rglob("*.md"))]:
        for path in re.findall(r"\]\((?!https?://|#)([^)#\s]+)", document.read_text("utf-8")):
            assert (document.parent / path).exists(), f"{document.name} links to {path}"


@pytest.mark.parametrize(
    ("heading", "known"),
    [
        ("Options", {field.name for field in fields(RuntimeConfig)}),
        ("Sampling parameters", {field.name for field in fields(SamplingParams)}),
    ],
)
def test_names_for_those_who_come_from_other_engines(heading: str, known: set[str]) -> None:
    page = (HOME / "docs" / "coming-from-vllm-sglang.md").read_text("utf-8")
    section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)", row[-1])}
    assert named
    assert named <= known
    if heading == "Sampling parameters":
        for row in rows:  # the others' spellings are taken
            for theirs in re.findall(r"`(\w+)`", " ".join(row[:-1])):
                assert theirs in known_parameters() or "of `generate`" in row[1], theirs


def test_methods_for_those_who_come_from_other_engines() -> None:
    page = (HOME / "docs" / "coming-from-vllm-sglang.md").read_text("utf-8")
    named = re.findall(r"`Runtime\.(\w+)", page)
    assert len(named) > 8
    assert [name for name in named if not hasattr(Runtime, name)] == []


def test_options_that_the_python_api_lists_exist() -> None:
    page = (HOME / "docs" / "python-api.md").read_text("utf-8")
    table = page.partition("| option | default | meaning |")[2].partition("\n\n")[0]
    named = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (.*?) \|", table, flags=re.MULTILINE))))
    assert len(named) > 10
    assert named <= {field.name for field in fields(RuntimeConfig)}
