"""Each module has its tests in the place that its name says, or a line that names them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

HOME = Path(__file__).resolve().parents[1]
PACKAGES = ("radixrt", "layers", "memory_pool", "triton_ops")
TESTED_IN = re.compile(r"^# Tests: (.+)$", re.MULTILINE)

EXCEPTIONS = {
    "radixrt/limits.py": "tests/execution/test_memory_budget.py",  # limits without code; the budget computes them
}


def modules() -> list[Path]:
    found = [file.relative_to(HOME) for package in PACKAGES for file in (HOME / package).rglob("*.py")]
    return sorted(file for file in found if file.name not in ("__init__.py", "__main__.py"))


def own_place(module: Path) -> Path:
    """`radixrt/x/y.py` -> `tests/x/test_y.py`, `layers/y.py` -> `tests/layers/test_y.py`."""
    inside = Path(*module.parts[1:]) if module.parts[0] == "radixrt" else module
    return Path("tests") / inside.parent / f"test_{module.name}"


def named_in(file: Path) -> list[str]:
    """The paths of the line `# Tests: PATH[, PATH]` in a file."""
    lines = TESTED_IN.findall((HOME / file).read_text(encoding="utf-8"))
    assert len(lines) <= 1, f"{file} has more than one line '# Tests: ...'"
    return lines[0].split(", ") if lines else []


def named_for_folder(folder: Path) -> list[str]:
    """The same in its `__init__.py`, for all modules of the folder; that of `radixrt` speaks for itself alone."""
    return [] if folder == Path("radixrt") else named_in(folder / "__init__.py")


@pytest.mark.parametrize("module", modules(), ids=str)
def test_a_module_has_tests_or_names_them(module: Path) -> None:
    own, named = own_place(module), named_in(module)
    assert not (named and (HOME / own).is_file()), f"{module} has {own} and names other tests"
    assert not (named and named == named_for_folder(module.parent)), f"{module} repeats the line of its folder"
    if (HOME / own).is_file() or str(module) in EXCEPTIONS:
        return
    assert named or named_for_folder(module.parent), f"{module} has neither {own} nor a line '# Tests: PATH'"


def test_named_tests_are_there() -> None:
    named = dict(EXCEPTIONS)
    for package in PACKAGES:
        for file in (HOME / package).rglob("*.py"):
            named |= {f"{file.relative_to(HOME)}: {path}": path for path in named_in(file)}
    assert [place for place, path in named.items() if not (HOME / path).is_file()] == []


def test_every_exception_is_needed() -> None:
    for module in map(Path, EXCEPTIONS):
        assert (HOME / module).is_file()
        assert not (HOME / own_place(module)).exists()
        assert not named_in(module)
