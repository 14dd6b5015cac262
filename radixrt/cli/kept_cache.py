"""A Runtime for a command, with a cache kept across runs: --load-cache and --save-cache."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import radixrt
from radixrt.builtin import MODEL_PATH
from radixrt.checks import check_float, check_int
from radixrt.cli.options import runtime_options
from radixrt.errors import ParameterError
from radixrt.files.path_roles import PathRole, check_apart, is_same, read_role, written_role

if TYPE_CHECKING:
    from radixrt.config import RuntimeConfig
    from radixrt.replicas import ReplicaGroup
    from radixrt.runtime import Runtime


def runtime_places(arguments: argparse.Namespace) -> list[PathRole]:
    """The model's folder, and the files of --load-cache and --save-cache, checked one by one.

    Raises ParameterError or CacheFileError where one of them cannot be read or written.
    """
    from radixrt.kept_cache.cache_file import check_cache_target

    load, save = _path(arguments, "load_cache"), _path(arguments, "save_cache")
    if (load or save) and not getattr(arguments, "enable_prefix_cache", True):
        raise ParameterError("--no-prefix-cache keeps nothing: there is no cache to load or to save")
    places = model_place(arguments)
    if load is not None:
        if not os.path.isfile(load):
            raise ParameterError(f"--load-cache {load}: there is no such file; --save-cache makes one")
        if save is None or not is_same(load, save):  # a cache may be replaced by what became of it
            places += read_role("the file of --load-cache", load)
    if save is not None:
        check_cache_target(save)
        places += written_role("the file of --save-cache", save)
    return places


def checked_config(arguments: argparse.Namespace) -> RuntimeConfig:
    """The options of the Runtime, checked as far as they can be without a model.

    Raises:
        ParameterError, ModelError: one of them is outside its bounds, or not for this machine; with --ray, which
            is for others, only the bounds count.
    """
    from radixrt.config import RuntimeConfig
    from radixrt.ranks.rank import check_config

    config = RuntimeConfig(**runtime_options(arguments))
    if getattr(arguments, "ray", None) is None:
        check_config(config)
    return config


def model_place(arguments: argparse.Namespace) -> list[PathRole]:
    """The folder or file of the model; nothing if the hub has it."""
    path = os.path.expanduser(getattr(arguments, "model", MODEL_PATH))
    kind = "folder" if os.path.isdir(path) else "file"
    return read_role(f"the model's {kind}", path) if os.path.exists(path) else []


def check_replicas(arguments: argparse.Namespace) -> None:
    """Raise ParameterError where options do not go with several replicas."""
    check_float("hang_seconds", arguments.hang_seconds, 0.0, 1e9, above=True)
    if arguments.replicas is not None:
        check_int("replicas", arguments.replicas, 1, 1024)
    if arguments.replicas == 1 and arguments.ray is None:
        return
    for name in ("load_cache", "save_cache"):
        if _path(arguments, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise ParameterError(
                f"{option} is for one replica: each has a cache of its own; leave one of them out"
            )
    device = getattr(arguments, "device", None)
    if device is not None and ":" in str(device):
        raise ParameterError(f"device is {str(device)!r}; replicas take cards in turn: leave the number out")


def group_of(arguments: argparse.Namespace) -> ReplicaGroup:
    """Replicas with the Runtime of the options each, which `check_replicas` has seen."""
    from radixrt.replicas import ReplicaGroup

    check_apart(runtime_places(arguments))
    wanted = {"num_replicas": arguments.replicas, "hang_seconds": arguments.hang_seconds, "ray": arguments.ray}
    return ReplicaGroup(**wanted, **runtime_options(arguments))


@contextmanager
def runtime_with_cache(arguments: argparse.Namespace, *, progress: bool = False) -> Iterator[Runtime]:
    """The Runtime of the options. Its cache is saved if the command finishes without an exception.

    Raises as `runtime_places` does before the model is loaded, and BatchFileError where a file that would be
    written is another one.
    """
    check_apart(runtime_places(arguments))
    load, save = _path(arguments, "load_cache"), _path(arguments, "save_cache")
    with radixrt.Runtime(**runtime_options(arguments)) as runtime:
        if save is not None:  # not only when all is done
            runtime.check_keeps_a_cache("save_cache")
        if load is not None:
            count = runtime.load_cache(load, progress=progress)
            print(f"radixrt: {_told(runtime, count)} loaded from {load}", file=sys.stderr)
        yield runtime
        if save is not None:
            count = runtime.save_cache(save, progress=progress)
            print(f"radixrt: {_told(runtime, count)} saved to {save}", file=sys.stderr)


def _told(runtime: Runtime, num_tokens: int) -> str:
    """What a cache that is loaded first and saved last has."""
    told = f"{num_tokens:,} cached tokens"
    if runtime.limits.num_states:
        told += f" with {runtime.cache_stats().state_nodes:,} states"
    return told


def _path(arguments: argparse.Namespace, name: str) -> Path | None:
    path: Path | None = getattr(arguments, name, None)
    return path
