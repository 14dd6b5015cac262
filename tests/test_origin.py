"""What `import radixrt` imports, and from where."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import radixrt

HOME = Path(radixrt.__file__).resolve().parent.parent


def run(code: str, *first: Path) -> subprocess.CompletedProcess[str]:
    """Run `code` in a new process, with the folders `first` at the front of sys.path."""
    front = f"import sys; sys.path[:0] = {[*map(str, first), str(HOME)]!r}\n"
    return subprocess.run([sys.executable, "-c", front + code], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("name", ["layers", "memory_pool", "triton_ops"])
@pytest.mark.parametrize("package", [False, True])
def test_a_foreign_module_in_the_way_is_named(tmp_path: Path, name: str, package: bool) -> None:
    foreign = tmp_path / name / "__init__.py" if package else tmp_path / f"{name}.py"
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_text("raise SystemExit('it was imported')")
    result = run("import radixrt", tmp_path)
    assert result.returncode == 1
    assert f"ImportError: radixrt needs its own package '{name}' from {HOME}, but {foreign} is found first" in (
        result.stderr
    )


def test_a_module_already_loaded_is_named(tmp_path: Path) -> None:
    result = run("import sys, types; sys.modules['layers'] = types.ModuleType('layers'); import radixrt")
    assert "ImportError: radixrt needs its own package 'layers', but another module" in result.stderr
    (tmp_path / "layers.py").write_text("")
    result = run(f"import layers; sys.path.remove({str(tmp_path)!r}); import radixrt", tmp_path)
    assert f"but {tmp_path / 'layers.py'} is found first" in result.stderr


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    copy = tmp_path / "radixrt"
    copy.mkdir()
    for name in ("__init__.py", "ctrl_c.py", "version.py"):
        (copy / name).write_text((HOME / "radixrt" / name).read_text())
    result = subprocess.run(
        [sys.executable, "-S", "-E", "-c", "import radixrt"],  # only what is here and the standard library
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert f"ImportError: radixrt needs its package 'memory_pool', which is not in {tmp_path}" in result.stderr


def test_a_folder_without_init_is_not_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "layers").mkdir()
    assert run("import radixrt", tmp_path).returncode == 0


def test_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(HOME)
    assert run("import radixrt", tmp_path / "link").returncode == 0


def test_names_are_imported_when_used() -> None:
    code = """
import radixrt
heavy = {"torch", "numpy", "transformers", "triton", "tqdm", "rich", "layers"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
from radixrt import FinishReason, RadixrtError, SamplingParams, TokenizerError
import radixrt.errors
assert radixrt.PromptError is radixrt.errors.PromptError
assert SamplingParams(top_k=3).top_k == 3
assert set(radixrt.__all__) <= set(dir(radixrt))
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    result = run(code)
    assert result.returncode == 0, result.stderr


def test_every_export_exists() -> None:
    for name in radixrt.__all__:
        assert getattr(radixrt, name) is not None
    with pytest.raises(AttributeError, match="module 'radixrt' has no attribute 'Engine'"):
        radixrt.Engine  # noqa: B018
