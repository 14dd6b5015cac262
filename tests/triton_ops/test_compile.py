"""Every kernel compiles for GPUs that are not here, without spills and within their shared memory."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import triton_ops
from tests.support.kernel_cases import kernel_cases
from triton_ops.implementation import runs_triton, triton

pytestmark = pytest.mark.skipif(not triton.__version__, reason="there is no Triton")

TESTS = Path(__file__).resolve().parents[1]


def compile_kernels(folder: Path, cases: str, *archs: int) -> dict[str, Any]:
    """The report of tests/support/compile_kernels.py, from its own process: here kernels are interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent), environment.get("PYTHONPATH", "")])
    report = folder / "report.json"
    options = ["--cases", cases, "--arch", *map(str, archs), "--json", str(report)]
    done = subprocess.run(
        [sys.executable, str(TESTS / "support" / "compile_kernels.py"), *options],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert report.exists(), done.stdout + done.stderr
    written: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    assert done.returncode == int(bool(faults(written))), done.stderr
    return written


def faults(report: dict[str, Any]) -> list[str]:
    """One line each."""
    found = [
        f"{variant['kernel']} for sm_{variant['arch']} ({variant['cases'][0]}, {variant['constexprs']}): {fault}"
        for variant in report["variants"]
        for fault in variant["faults"]
    ]
    return found + [f"no wgmma for sm_90: {case}" for case in report["without_wgmma"]]


def test_faults_are_found(tmp_path: Path) -> None:
    report = compile_kernels(tmp_path, "probe", 89, 90)
    shown = [line.partition(", {")[0] + ": " + line.partition("}): ")[2] for line in faults(report)]
    fine = [f"product for sm_{arch} (product: {rows} rows" for arch in (89, 90) for rows in (16, 64)]
    assert not any(line.startswith(start) for line in shown for start in fine), shown
    for arch, limit in ((89, 101_376), (90, 232_448)):
        memory, registers, error = (line for line in shown if f"for sm_{arch} (" in line)
        assert memory.startswith(f"product for sm_{arch} (product: too many stages: wants ")
        assert memory.endswith(f" bytes of shared memory; sm_{arch} has {limit}")
        assert registers.startswith(f"sums for sm_{arch} (sums: too few registers: spills ")
        assert "no_such_operation" in error
    assert shown[-1].startswith("no wgmma for sm_90: product: 16 rows")
    assert len(shown) == 7
    # Two steps that are both divisible by 16 are one variant.
    (product,) = (v for v in report["variants"] if "product: 64 rows" in v["cases"] and v["arch"] == 90)
    assert product["cases"] == ["product: 64 rows", "product: 64 rows again"]
    assert product["constexprs"]["ROWS"] == "64"
    assert product["wgmma"] > 0
    assert 0 < product["registers"] <= 255


def test_every_operation_with_a_kernel_has_cases() -> None:
    """Those whose parameters say which implementation runs."""
    have = {case.op for case in kernel_cases() if case.few}
    for module in pkgutil.walk_packages(triton_ops.__path__, "triton_ops."):
        for op in vars(importlib.import_module(module.name)).values():
            if inspect.isfunction(op) and "impl" in inspect.signature(op).parameters and op is not runs_triton:
                assert op in have, op


@pytest.mark.first
@pytest.mark.parametrize("arch", [80, 90])
def test_kernels_compile(tmp_path: Path, arch: int) -> None:
    report = compile_kernels(tmp_path, "few", arch)
    assert not faults(report), "\n".join(faults(report))


@pytest.mark.first
@pytest.mark.long
@pytest.mark.parametrize("arch", [80, 86, 89, 90])
def test_every_configuration_compiles(tmp_path: Path, arch: int) -> None:
    report = compile_kernels(tmp_path, "all", arch)
    assert not faults(report), "\n".join(faults(report))
