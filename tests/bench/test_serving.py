"""The bench of a server."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("fastapi", reason="fastapi is not installed: pip install 'radixrt[server]'")

from scripts import bench_serving


def test_all_requests_are_answered(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--config", "tiny", "--small", "--device", "cpu", "--workload", "system_prompt", "--load", "0.5"]
    bench_serving.main(options)
    shown = capsys.readouterr().out
    generated, served = re.findall(r"system_prompt │ +(\S+) │ +([0-9.,]+) │ +([0-9.,]+) │", shown)
    assert (generated[0], served[0]) == ("generate", "0.50")
    assert 0 < float(served[1]) < float(generated[1])


@pytest.mark.parametrize("load", ["0", "1.5"])
def test_loads_have_bounds(load: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_serving.main(["--load", load])
    assert "--load is above 0, and 1 at most" in capsys.readouterr().err


def test_figures() -> None:
    told = [bench_serving.Told(0.0, [0.1, 0.3]), bench_serving.Told(1.0, [1.5])]
    assert bench_serving.row(told, 30, 1.0) == ["2.0", "20", "1.500", "300.0", "496.0", "200.0", "200.0"]
