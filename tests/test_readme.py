"""What the README shows is what happens: every snippet is run, or stands in NOT_RUN with the reason.

A snippet is a fenced block, and its kind the word behind the fence: `python`, `sh` (commands), `console` (commands
with what they print) or `json` (lines of a batch file). A block without a kind is what the snippet before prints.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from radixrt.cli import main

HOME = Path(__file__).resolve().parents[1]
README = (HOME / "README.md").read_text(encoding="utf-8")

NOT_RUN = {
    "radixrt bench prefix-reuse": "takes minutes; tests/bench/test_prefix_reuse.py runs it with small numbers",
    "python -m radixrt.lm_eval --model_args pretrained=path/to/model --tasks hellaswag,gsm8k --num_fewshot 5": (
        "wants a model and downloads tasks; tests/integrations/test_lm_eval.py runs it with tasks of its own"
    ),
}

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
def test_python_prints_what_the_readme_says(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    for snippet in of_kind("python"):
        assert len(snippet.text.splitlines()) <= 10
        exec(compile(snippet.text, "README.md", "exec"), names)
        assert capsys.readouterr().out == (snippet.printed or "")


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
            elif command.startswith(("make ", "pip ")):
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
    """See that what a make or pip command names exists; it installs, which no test does."""
    tool, *words = command.split()
    if tool == "make":
        dry = subprocess.run(["make", "-n", *words], cwd=HOME, capture_output=True, text=True)
        assert dry.returncode == 0, dry.stderr
        return
    extra = re.fullmatch(r"pip install 'radixrt\[(\w+)\]'", command)
    assert extra is not None, f"nothing checks {command!r}"
    assert re.search(rf"^{extra[1]} = \[", (HOME / "pyproject.toml").read_text("utf-8"), flags=re.MULTILINE)


@pytest.mark.parametrize(
    "command", [command.partition(" ")[2] for command in NOT_RUN if command.startswith("radixrt ")]
)
def test_commands_that_are_not_run_exist(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([*command.split(), "--help"])
    assert end.value.code == 0
    assert f"usage: radixrt {command}" in capsys.readouterr().out


def test_batch_lines_give_the_records_that_the_readme_shows(tmp_path: Path) -> None:
    for snippet in of_kind("json"):
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
