"""What Triton's interpreter does again and again around the arithmetic, which is most of the time that a kernel
takes in it. To import this leaves out what changes no result:

- It puts its own operations in the place of the language's at each call of a function within a kernel; here once a
  launch for each module of the language.
- It computes each sum, difference and product of integers a second time, in 64 bits, for a check that it never
  makes: that belongs to `debug`, which it has switched off.
- It derives the same numbers of every tensor's type, and looks NumPy's type up in a table that it makes anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

from triton import language
from triton.runtime import interpreter

_put_in_place = interpreter._patch_lang
_launch = interpreter.GridExecutor.__call__
_numpy_type = interpreter._get_np_dtype
_init_block_type = language.block_type.__init__
_init_tensor = language.tensor.__init__
_done: set[ModuleType] = set()  # in the launch that runs
_numpy_types: dict[str, Any] = {}
_block_types: dict[tuple[Any, ...], dict[str, Any]] = {}
_tensors: dict[str, dict[str, Any]] = {}


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


def numpy_type(dtype: Any) -> Any:
    """A block has that of its elements."""
    element = dtype.element_ty if isinstance(dtype, language.block_type) else dtype
    if element.name not in _numpy_types:
        _numpy_types[element.name] = _numpy_type(element)
    return _numpy_types[element.name]


def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    """What it has, from another of the same elements and shape."""
    sizes = (size.value if isinstance(size, language.constexpr) else size for size in shape)
    key = (element_ty.name, *sizes)
    if key not in _block_types:
        _init_block_type(self, element_ty, shape)
        _block_types[key] = dict(vars(self))
    else:
        vars(self).update(_block_types[key])


def init_tensor(self: Any, handle: Any, type: Any) -> None:
    """What it has but its handle, from another of the same type."""
    if type.name not in _tensors:
        _init_tensor(self, handle, type)
        _tensors[type.name] = dict(vars(self))
    else:
        vars(self).update(_tensors[type.name])
        self.handle, self.type = handle, type


interpreter._patch_lang = put_in_place
interpreter.GridExecutor.__call__ = launch
interpreter._get_np_dtype = numpy_type
interpreter.interpreter_builder.options = replace(
    interpreter.interpreter_builder.options, debug=False, sanitize_overflow=False
)
language.block_type.__init__ = init_block_type
language.tensor.__init__ = init_tensor
