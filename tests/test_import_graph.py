"""The import graph of files and of rooms has no cycle, so each room stands above all that it imports.

A room is a child of a package: a file, or a folder with all that is in it. `pytest -s` prints them floor by floor.
Imports inside functions and for type checkers count like all others.
"""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

HOME = Path(__file__).resolve().parents[1]
FLOORS = ("triton_ops", "memory_pool", "layers", "radixrt", "scripts")  # each may import those before it
Graph = Mapping[str, set[str]]


def module_of(file: Path) -> str:
    """Such as `radixrt.cache.radix_tree`; a package is its `__init__`."""
    return ".".join(file.relative_to(HOME).with_suffix("").parts)


@cache
def import_graph() -> Graph:
    """What each file of the project imports of the project."""
    files = {module_of(file): file for floor in FLOORS for file in sorted((HOME / floor).rglob("*.py"))}
    return {name: set(imports(ast.parse(file.read_bytes()), set(files))) - {name} for name, file in files.items()}


def imports(tree: ast.Module, modules: set[str]) -> Iterator[str]:
    """Those of `modules` that a file imports, anywhere in it."""
    for node in ast.walk(tree):
        named: list[str] = []
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            named = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in named:
            parent = name.rpartition(".")[0]
            found = (n for n in (name, f"{name}.__init__", parent, f"{parent}.__init__") if n in modules)
            yield from list(found)[:1]


def rooms_of(graph: Graph, package: str) -> Graph:
    """The graph of a package's children."""

    def room(module: str) -> str | None:
        inside = module.removeprefix(f"{package}.")
        return None if inside == module else inside.partition(".")[0]

    drawn: dict[str, set[str]] = {}
    for module, imported in graph.items():
        if (own := room(module)) is not None:
            drawn.setdefault(own, set()).update(r for r in map(room, imported) if r is not None and r != own)
    return drawn


def packages() -> list[str]:
    return sorted({module.removesuffix(".__init__") for module in import_graph() if module.endswith(".__init__")})


def floors(graph: Graph) -> list[list[str]]:
    """From the ground: each above all that it imports. Raises CycleError."""
    sorter = graphlib.TopologicalSorter(graph)
    sorter.prepare()
    found: list[list[str]] = []
    while ready := sorter.get_ready():
        found.append(sorted(ready))
        sorter.done(*ready)
    return found


def test_files_import_without_a_cycle() -> None:
    floors(import_graph())


@pytest.mark.parametrize("package", packages())
def test_rooms_import_without_a_cycle(package: str) -> None:
    for number, floor in enumerate(floors(rooms_of(import_graph(), package)), 1):
        print(f"{package}, floor {number}: {', '.join(floor)}")


def test_packages_import_what_is_below_them() -> None:
    upward = [
        f"{module} imports {other}"
        for module, imported in import_graph().items()
        for other in imported
        if FLOORS.index(other.partition(".")[0]) > FLOORS.index(module.partition(".")[0])
    ]
    assert not upward


def test_a_cycle_is_found() -> None:
    graph = {"p.a.x": {"p.b.y"}, "p.b.y": set(), "p.b.z": {"p.a.w"}, "p.a.w": set()}
    floors(graph)  # none among files
    with pytest.raises(graphlib.CycleError):
        floors(rooms_of(graph, "p"))
    with pytest.raises(graphlib.CycleError):
        floors({**graph, "p.b.y": {"p.a.x"}})
