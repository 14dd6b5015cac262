"""--load-cache and --save-cache, over the built-in model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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

    for arguments, message in (
        (["--load-cache", str(tmp_path / "none")], f"--load-cache {tmp_path / 'none'}: there is no such file"),
        (["--save-cache", str(tmp_path)], "it is a folder, or its folder does not exist"),
        (["--save-cache", str(tmp_path / "none" / "x")], "it is a folder, or its folder does not exist"),
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
