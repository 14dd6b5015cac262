"""The recipes of CONTRIBUTING.md, followed in a copy of the tree, where their tests pass."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HOME = Path(__file__).resolve().parents[1]
COPIED = ("radixrt", "layers", "memory_pool", "triton_ops", "tests/support", "pyproject.toml")
COPIED_TESTS = ("tests/__init__.py", "tests/conftest.py", "tests/server/__init__.py", "tests/server/conftest.py")


def blocks(language: str) -> list[str]:
    text = (HOME / "CONTRIBUTING.md").read_text("utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def change(home: Path, diff: str) -> None:
    """Each hunk's old lines, which the file has once, become its new ones."""
    for part in diff.split("--- ")[1:]:
        name, *hunks = part.split("\n@@\n")
        text = (home / name).read_text("utf-8")
        for hunk in hunks:
            lines = hunk.strip("\n").split("\n")
            old, new = ("".join(f"{line[1:]}\n" for line in lines if line[:1] in ("", " ", sign)) for sign in "-+")
            assert text.count(old) == 1, f"{name} does not have this once:\n{old}"
            text = text.replace(old, new)
        (home / name).write_text(text, "utf-8")


def test_the_recipes_work(tmp_path: Path) -> None:
    pytest.importorskip("starlette", reason="starlette is not installed: pip install 'radixrt[server]'")
    for name in (*COPIED, *COPIED_TESTS):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (HOME / name).is_dir() else shutil.copy2
        copy(HOME / name, tmp_path / name)
    for diff in blocks("diff"):
        change(tmp_path, diff)
    tests = []
    for code in blocks("python"):
        name = code.partition("\n")[0].removeprefix("# ")
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(code, "utf-8")
        tests += [name] if name.startswith("tests/") else []
    assert len(tests) == 3
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^[4-9] passed", done.stdout, flags=re.MULTILINE), done.stdout
