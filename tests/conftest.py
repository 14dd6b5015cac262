"""Settings of all tests."""

from __future__ import annotations

import os

# Before torch is imported, here or in a process that a test starts: on two shared cores OpenMP's threads cost
# more than they bring.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

import gc
import logging
import subprocess
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

# Where there is no GPU, kernels run in Triton's interpreter, which has to know before they are defined.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from hypothesis import settings

from radixrt.workers import process
from tests.support.forked_processes import forked
from tests.support.interpreter import require_interpreter
from triton_ops.implementation import triton

if triton.__version__ and not torch.cuda.is_available():
    from tests.support import (
        interpreter_calls,  # noqa: F401  # the interpreter's own calls of functions are slow
        interpreter_e4m3,  # noqa: F401  # and its conversions to and from e4m3 wrong
    )

gc.disable()  # until all tests are collected: there is hardly any garbage among so many objects

# A deadline fails on a busy machine, not on a slow program. The same examples each time: CI does not flicker.
settings.register_profile("radixrt", deadline=None, derandomize=True, max_examples=40)
settings.register_profile("radixrt-long", settings.get_profile("radixrt"), max_examples=100)


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("radixrt-long" if "long" in config.option.markexpr else "radixrt")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The tensors and random numbers of a test are made on this device unless it says otherwise."""
    if request.param == "cpu":  # as it is: to say so costs each operation as much time again
        yield torch.device("cpu")
        return
    with pytest.MonkeyPatch.context() as patch, torch.device(request.param) as chosen:

        class Generator(torch.Generator):  # a class: modules that torch imports late use it in annotations
            def __new__(cls, device: torch.device = chosen) -> torch.Generator:
                return super().__new__(cls, device)

        patch.setattr(torch, "Generator", Generator)
        yield chosen


@pytest.fixture(scope="module", params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def kernel_device(request: pytest.FixtureRequest) -> torch.device:
    """Where a kernel is compared with its reference: a GPU, or the CPU in Triton's interpreter, which knows
    float16 and float32 but not bfloat16.
    """
    if request.param == "cuda":
        return torch.device("cuda")
    require_interpreter()
    return torch.device("cpu")


@pytest.fixture(scope="session", autouse=True)
def _forked_workers() -> Iterator[None]:
    """Processes of Runtimes in this process start without their imports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "subprocess", forked)
        yield


@pytest.fixture
def real_workers() -> Iterator[None]:
    """They start as those of a user do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "subprocess", subprocess)
        yield


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Failed passes are logged with their traces; here they are made on purpose, by the thousand."""
    caplog.set_level(logging.CRITICAL, logger="radixrt.engine.engine")


def pytest_collection_finish() -> None:
    gc.collect()  # it makes full collections when there is a quarter more than at the last one
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out `long` tests unless -m names them, and `gpu` tests where there is no GPU; begin with `first`."""
    _mark_long(items, whole_files=not any("::" in argument for argument in config.args))
    unwanted = set()
    if "long" not in config.option.markexpr:
        unwanted.add("long")
    if any(item.get_closest_marker("gpu") for item in items) and not _has_gpu():
        unwanted.add("gpu")
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        (left_out if any(item.get_closest_marker(name) for name in unwanted) else kept).append(item)
    items[:] = sorted(kept, key=lambda item: item.get_closest_marker("first") is None)
    config.hook.pytest_deselected(items=left_out)


def _mark_long(items: list[pytest.Item], *, whole_files: bool) -> None:
    """Mark as `long` what `long_unless` says; a test of which nothing is left is an error."""
    kept: dict[str, bool] = {}
    for item in items:
        mark = item.get_closest_marker("long_unless")
        if mark is None or not isinstance(item, pytest.Function):
            continue
        is_kept = bool(mark.kwargs["kept"](item.callspec.params))
        name = item.nodeid.partition("[")[0]
        kept[name] = kept.get(name, False) or is_kept
        if not is_kept:
            item.add_marker("long")
    _mark_all_but_few(items)
    lost = [name for name, any_is in kept.items() if not any_is]
    if lost and whole_files:
        raise pytest.UsageError(f"long_unless keeps nothing of {', '.join(lost)}")


def _mark_all_but_few(items: list[pytest.Item]) -> None:
    """Mark as `long` what `each_once` leaves out. What needs a GPU is quick there, and stays."""
    cases: dict[str, list[pytest.Function]] = {}
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if isinstance(item, pytest.Function) and "each_once" in marks and not marks & {"gpu", "long"}:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for of_test in cases.values():
        values = [{f"{name} {value!r}" for name, value in item.callspec.params.items()} for item in of_test]
        missing = set.union(*values)
        kept, shown = set(), Counter[str]()
        while missing:  # the case with the most values that no other has shown; of several, with the rarest
            nth = max(
                range(len(values)),
                key=lambda nth: (len(values[nth] & missing), -sum(shown[value] for value in values[nth])),
            )
            kept.add(nth)
            missing -= values[nth]
            shown.update(values[nth])
        for nth, item in enumerate(of_test):
            if nth not in kept:
                item.add_marker("long")


def _has_gpu() -> bool:
    return torch.cuda.is_available()
