"""`radixrt compile`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import radixrt
import radixrt.ranks.rank
from radixrt.cli import main
from tests.support.checkpoints import llama, write
from tests.support.fake_runtime import FakeRuntime


def test_a_cpu_has_nothing_to_compile(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "--device", "cpu"]) == 2
    assert "nothing is compiled for cpu: kernels run on an NVIDIA GPU" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--load-format", "--save-cache"])
def test_options_that_would_do_nothing_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["compile", option, "auto"])
    assert f"unrecognized arguments: {option} auto" in capsys.readouterr().err


def test_it_starts_a_runtime_without_weights(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[dict[str, Any]] = []

    class Starting(FakeRuntime):
        def __init__(self, **options: Any) -> None:
            super().__init__()
            made.append(options)
            self.start_up = {"weights": 0.25, "memory": 3.0, "graphs": 1.5, "total": 4.75}

        def capture_graphs(self) -> None:
            """Those for which other kernels are compiled."""
            clock[0] += 2.0

    clock = [10.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setitem(vars(radixrt), "Runtime", Starting)
    monkeypatch.setattr(radixrt.ranks.rank, "check_config", lambda config: (torch.device("cuda"), True, True))
    assert main(["compile", "--model", "m", "--deterministic"]) == 0
    assert made == [{"model": "m", "deterministic": True, "load_format": "dummy"}]
    assert capsys.readouterr().out == "compiled in 6.8 s: weights 0.2, memory 3.0, graphs 3.5\n"


@pytest.mark.gpu
def test_kernels_are_in_the_cache_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    folder = write(llama(head_dim=16), tmp_path / "model")
    assert main(["compile", "--model", str(folder), "--max-total-tokens", "4000"]) == 0
    assert capsys.readouterr().out.startswith("compiled in ")
    assert list((tmp_path / "cache").rglob("*.cubin"))
