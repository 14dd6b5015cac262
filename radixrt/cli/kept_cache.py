"""A Runtime for a command, with a cache kept across runs: --load-cache and --save-cache."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import radixrt
from radixrt.cli.options import runtime_options
from radixrt.errors import ParameterError

if TYPE_CHECKING:
    from radixrt.runtime import Runtime


@contextmanager
def runtime_with_cache(arguments: argparse.Namespace, *, progress: bool = False) -> Iterator[Runtime]:
    """The Runtime of the options. Its cache is saved if the command finishes without an exception.

    Raises ParameterError before the model is loaded if a file cannot be read or written.
    """
    load, save = _path(arguments, "load_cache"), _path(arguments, "save_cache")
    options = runtime_options(arguments)
    if (load or save) and not options.get("enable_prefix_cache", True):
        raise ParameterError("--no-prefix-cache keeps nothing: there is no cache to load or to save")
    if load is not None and not load.is_file():
        raise ParameterError(f"--load-cache {load}: there is no such file; --save-cache makes one")
    if save is not None and (save.is_dir() or not save.parent.is_dir()):
        raise ParameterError(f"--save-cache {save}: it is a folder, or its folder does not exist")
    with radixrt.Runtime(**options) as runtime:
        if load is not None:
            count = runtime.load_cache(load, progress=progress)
            print(f"radixrt: {count:,} cached tokens loaded from {load}", file=sys.stderr)
        yield runtime
        if save is not None:
            count = runtime.save_cache(save, progress=progress)
            print(f"radixrt: {count:,} cached tokens saved to {save}", file=sys.stderr)


def _path(arguments: argparse.Namespace, name: str) -> Path | None:
    path: Path | None = getattr(arguments, name, None)
    return path
