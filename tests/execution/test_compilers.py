"""Processes that compile kernels beside a first start. They need Triton, and no GPU."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from radixrt.config import RuntimeConfig
from radixrt.execution import compilers
from radixrt.execution.compilers import Compiled, compilers_beside, start_compilers
from radixrt.limits import PassLimits
from radixrt.models.loader import load_model
from radixrt.ranks.rank import _compiled
from tests.support.checkpoints import llama, write
from triton_ops.implementation import triton

pytestmark = pytest.mark.skipif(not triton.__version__, reason="there is no Triton")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """What a Runtime on a Hopper would ask for."""
    folder = write(llama(head_dim=16), tmp_path_factory.mktemp("llama"))
    decoder, _ = load_model(folder, dtype=torch.bfloat16, device=torch.device("cpu"))
    config = RuntimeConfig(str(folder))
    made = _compiled(folder, decoder, config, torch.bfloat16, PassLimits(4, 32), captures=True)
    assert made.tree
    return replace(made, num_sms=132)


def test_a_share_of_the_kernels_is_on_the_disk_then(
    compiled: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the model's, of which nothing but the config is read: the first of as many as there are at most."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    arguments = [sys.executable, "-m", "radixrt.execution.compilers", "3", "1000", json.dumps(asdict(compiled))]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = process.stderr.read()
    assert process.returncode == 0, said
    assert len(list(tmp_path.rglob("*.cubin"))) == 1


def test_they_start_with_the_first_kernel_that_is_not_there(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And somebody else's listener hears everything."""
    from triton import knobs

    heard, started = list[Any](), list[tuple[Compiled, int]]()
    monkeypatch.setattr(compilers, "start_compilers", lambda *asked: started.append(asked))
    monkeypatch.setattr(compilers, "MOST", 8)
    monkeypatch.setattr(compilers, "usable_processors", lambda: 16)
    monkeypatch.setattr(knobs.compilation, "listener", listener := lambda **told: heard.append(told["cache_hit"]))
    with compilers_beside(compiled):
        for cache_hit, count in ((True, 0), (False, 1), (False, 1)):
            knobs.compilation.listener(src=None, metadata={}, metadata_group={}, times=None, cache_hit=cache_hit)
            assert len(started) == count
    assert knobs.compilation.listener is listener
    assert heard == [True, False, False]
    assert started == [(compiled, 8)]
    monkeypatch.setattr(compilers, "usable_processors", lambda: 2)
    with compilers_beside(compiled):
        assert knobs.compilation.listener is listener


def test_one_that_fails_is_told_of(compiled: Compiled, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        for thread in start_compilers(replace(compiled, folder=str(tmp_path / "nothing")), 1):
            thread.join()
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == 1
    assert told[0].startswith("a process that compiles kernels ended with status 1: ")
    assert str(tmp_path / "nothing") in told[0]


def test_a_start_does_without_them_where_none_can_be_started(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from triton import knobs

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(compilers, "MOST", 8)
    monkeypatch.setattr(compilers, "usable_processors", lambda: 16)
    monkeypatch.setattr(knobs.compilation, "listener", None)
    with compilers_beside(compiled):
        knobs.compilation.listener(src=None, metadata={}, metadata_group={}, times=None, cache_hit=False)
        knobs.compilation.listener = other = print  # of another start
    assert "no process compiles kernels beside this one: no more processes" in caplog.text
    assert knobs.compilation.listener is other
