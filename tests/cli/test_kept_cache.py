"""--load-cache and --save-cache, over the built-in model."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

import radixrt
from radixrt.builtin import MODEL_PATH
from radixrt.cli import main


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = "Mira likes Oslo. Tarek counts 374. Ines paints blue."
    options = ["--temperature", "0", "--max-total-tokens", "500", "--device", "cpu", "--json"]
    path = tmp_path / "bank.safetensors"

    def run(question: str, *more: str) -> tuple[int, str]:
        assert main(["generate", f"{facts}\nQ: {question}?\nA:", *options, *more]) == 0
        shown = capsys.readouterr()
        return json.loads(shown.out)["meta_info"]["cached_tokens"], shown.err

    assert run("Mira likes", "--save-cache", str(path)) == (0, f"radixrt: 24 cached tokens saved to {path}\n")
    hits, said = run("Tarek counts", "--load-cache", str(path))
    assert hits >= 16
    assert said == f"radixrt: 24 cached tokens loaded from {path}\n"
    run("Ines paints", "--load-cache", str(path), "--save-cache", str(path))
    assert run("Ines paints", "--load-cache", str(path))[0] > hits
    assert run("Ines paints", "--load-cache", str(path), "--tp", "2")[0] > hits

    for arguments, message in (
        (["--load-cache", str(tmp_path / "none")], f"--load-cache {tmp_path / 'none'}: there is no such file"),
        (["--save-cache", str(tmp_path)], f"{tmp_path} is in the way of the cache file and is not a plain file"),
        (["--save-cache", str(tmp_path / "none" / "x")], f"the folder {tmp_path / 'none'} of the cache file does"),
        (["--load-cache", str(path), "--no-prefix-cache"], "--no-prefix-cache keeps nothing"),
    ):
        assert main(["generate", "x", *options, *arguments]) == 2
        assert message in capsys.readouterr().err
    path.write_bytes(path.read_bytes()[:-1])
    assert main(["generate", "x", *options, "--load-cache", str(path)]) == 2
    assert "it is cut short" in capsys.readouterr().err


def test_a_batch_saves_what_it_has_cached(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, output = tmp_path / "bank.safetensors", tmp_path / "out.jsonl"
    questions = tmp_path / "in.jsonl"
    questions.write_text('{"prompt": "Mira likes Oslo.\\nQ: Mira likes?\\nA:"}\n')
    arguments = ["batch", "--input", str(questions), "--output", str(output), "--temperature", "0"]
    arguments += ["--max-total-tokens", "500", "--device", "cpu", "--overwrite", "--no-progress"]
    assert main([*arguments, "--save-cache", str(path)]) == 0
    assert main([*arguments, "--load-cache", str(path)]) == 0
    usage = json.loads(output.read_text())["usage"]
    assert usage["cached_tokens"] == usage["prompt_tokens"] - 1


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """All files of the current folder, with their content."""
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text('{"prompt": "Mira likes Oslo.\\nQ: Mira likes?\\nA:"}\n')
    Path("other.json").write_text("{}")
    shutil.copytree(MODEL_PATH, "model")
    os.link("in.jsonl", "hard")
    Path("soft").symlink_to("in.jsonl")
    return contents()


def contents() -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(Path().rglob("*")) if path.is_file()}


BATCH = ["batch", "--input", "in.jsonl", "--output", "out.jsonl", "--model", "model", "--no-progress"]


@pytest.mark.parametrize(
    "arguments",
    [
        [*BATCH, "--save-cache", "in.jsonl"],
        [*BATCH, "--save-cache", "hard"],
        [*BATCH, "--save-cache", "soft"],
        [*BATCH, "--save-cache", "other.json"],
        [*BATCH, "--save-cache", "out.jsonl"],
        [*BATCH, "--save-cache", "./out.jsonl"],
        [*BATCH, "--save-cache", "out.jsonl.run.finished"],
        [*BATCH, "--save-cache", "model/model.safetensors"],
        [*BATCH, "--save-cache", "model/kept.safetensors"],
        [*BATCH, "--report", "r.json", "--save-cache", "r.json"],
        [*BATCH, "--report", "r.json", "--save-cache", "r.json.partial"],
        [*BATCH, "--report", "other.json", "--load-cache", "other.json"],
        [*BATCH, "--report", "model/config.json"],
        [*BATCH[:3], "--output", "model/config.json", "--model", "model", "--overwrite"],
        [*BATCH[:3], "--output", "soft", "--overwrite"],
        ["generate", "x", "--model", "model", "--save-cache", "model/model.safetensors"],
        ["generate", "x", "--model", "model", "--save-cache", "model/new"],
        ["chat", "--model", "model", "--save-cache", "other.json"],
        ["plan", "in.jsonl", "--model", "model", "--html", "model/config.json"],
        ["plan", "in.jsonl", "--model", "model", "--html", "soft"],
    ],
)
def test_no_command_writes_over_its_files(
    files: dict[str, bytes],
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(vars(radixrt), "Runtime", lambda **options: pytest.fail("it loaded"))
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("radixrt: error: ")
    assert said.count("\n") == 1
    assert contents() == files
