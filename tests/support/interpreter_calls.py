"""Calls of functions within a kernel, for Triton's interpreter, which puts its own operations in the place of the
language's at each of them: a third of the time that a kernel takes in it.

To import this lets that be done once a launch for each module of the language.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from triton import language
from triton.runtime import interpreter

_put_in_place = interpreter._patch_lang
_launch = interpreter.GridExecutor.__call__
_done: set[ModuleType] = set()  # in the launch that runs


def put_in_place(function: Callable[..., Any]) -> Any:
    """What undoes it; None if there was nothing to do, as in a call, of which the launch undoes it."""
    seen = {value for value in function.__globals__.values() if value is language or value is language.core}
    if seen and seen <= _done:
        return None
    _done.update(seen)
    return _put_in_place(function)


def launch(self: Any, *arguments: Any, **keywords: Any) -> None:
    _done.clear()
    try:
        _launch(self, *arguments, **keywords)
    finally:
        _done.clear()


interpreter._patch_lang = put_in_place
interpreter.GridExecutor.__call__ = launch
