"""Parameters of kernels have no types. mypy cannot tell kernels from other functions, so this asks for theirs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import triton_ops

HOME = Path(triton_ops.__file__).parent


def untyped(source: str) -> Iterator[str]:
    """Functions that are not compiled by Triton, and do not say what all they take and return is."""
    functions = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))
    for node in functions:
        if any(map(_compiles, node.decorator_list)):
            continue
        given = node.args
        taken = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
        if node.returns is None or any(
            one is not None and one.annotation is None and one.arg not in ("self", "cls") for one in taken
        ):
            yield node.name


def _compiles(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return ast.unparse(called) in ("triton.jit", "jit")


def test_untyped_functions_are_found() -> None:
    kernels = "@triton.jit\ndef a(x): ...\n@jit(do_not_specialize=[1])\ndef b(x): ...\n"
    others = "def c(x: int): ...\ndef d(*x) -> int: ...\nclass E:\n    def e(self, *, x) -> int: ...\n"
    typed = "class F:\n    @cache\n    def f(self, x: int, **y: int) -> int: ...\n"
    assert list(untyped(kernels + others + typed)) == ["c", "d", "e"]


def test_functions_on_the_host_are_typed() -> None:
    found = [(file.name, name) for file in sorted(HOME.rglob("*.py")) for name in untyped(file.read_text("utf-8"))]
    assert not found
