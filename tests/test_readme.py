"""What the README shows is what happens."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

HOME = Path(__file__).resolve().parent.parent
README = (HOME / "README.md").read_text(encoding="utf-8")


def test_the_python_example_prints_what_the_readme_says() -> None:
    found = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", README, flags=re.DOTALL)
    assert found is not None
    code, printed = found.groups()
    assert len(code.splitlines()) <= 10
    result = subprocess.run([sys.executable, "-c", code], cwd=HOME, capture_output=True, text=True, timeout=300)
    assert result.stdout == printed, result.stderr


def test_the_commands_print_what_the_readme_says(tmp_path: Path) -> None:
    found = re.search(r"```console\n(.*?)```", README, flags=re.DOTALL)
    assert found is not None
    (tmp_path / "radixrt").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m radixrt "$@"\n')
    (tmp_path / "radixrt").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(HOME)}
    commands = re.findall(r"^\$ (.*)$", found[1], flags=re.MULTILINE)
    running = [
        subprocess.Popen(["bash", "-c", command], env=environment, stdout=subprocess.PIPE, text=True)
        for command in commands
    ]
    printed = [process.communicate(timeout=300)[0] for process in running]
    assert "".join(f"$ {command}\n{out}" for command, out in zip(commands, printed, strict=True)) == found[1]


def test_every_path_that_the_documents_name_exists() -> None:
    documents = [HOME / "README.md", *sorted((HOME / "docs").glob("*.md"))]
    for document in documents:
        for path in re.findall(
            r"`((?:docs|scripts|examples|tests|radixrt)/[\w/.]+)`", document.read_text("utf-8")
        ):
            where = HOME / path
            assert where.exists() or where.with_suffix(".py").exists(), f"{document.name} names {path}"
