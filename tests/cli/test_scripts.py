"""Each file in scripts/ says what it is when asked for `--help`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
NAMES = sorted(path.name for path in SCRIPTS.glob("*.py") if path.name != "__init__.py")
PARTS = {"serving_clients.py": "bench_serving.py"}
"""Files that are no programs, and the program of which they are a part."""
COMMANDS = {
    "bench_prefix_reuse.py": "radixrt bench prefix-reuse",
    "offline_batch.py": "radixrt batch",
}
"""Files that are a command of `radixrt`."""


@pytest.mark.parametrize("name", NAMES)
def test_help(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPTS / name), run_name="__main__")
    if name in PARTS:
        assert f"a part of scripts/{PARTS[name]}" in str(end.value.code)
    else:
        assert end.value.code in (0, None)
        assert capsys.readouterr().out.startswith(f"usage: {COMMANDS.get(name, name)} ")
