"""Compile the kernels for GPUs that are not there: registers, spills, shared memory and wgmma of each variant.

python tests/support/compile_kernels.py --arch 90 --cases few

The public operations are called on CPU tensors; instead of being launched, a kernel is compiled as its launch
would have had it. Run it in a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction, create_function_from_signature

from tests.support.kernel_cases import KernelCase, kernel_cases
from tests.support.probe_kernels import probe_cases
from triton_ops.attention.decode import decode_attention
from triton_ops.attention.extend import extend_attention
from triton_ops.implementation import GPU, compiling_for

NUM_SMS = {80: 108, 86: 84, 89: 128, 90: 132}
MAX_SHARED = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448}
"""Bytes of shared memory that one program can have."""
MAX_SPILLED = 32  # bytes a thread, eight registers: 13 of 4,440 variants for sm_80, sm_89 and sm_90 spill some
# Of kernels that add up finished superblocks: they spill there, once for hundreds of keys, and nothing within one
# (counted in their machine code for heads of 128). Hopper's extends spill around their loops, nothing within.
MAX_SPILLED_BY = {"ordered_kernel": 1500, "_extend_hopper_kernel": 48}
# Kernels whose wgmma must be able to overlap.
OVERLAPPING = {
    "ordered_kernel",
    "_gated_hopper_kernel",
    "_extend_hopper_kernel",
    "_experts_hopper_kernel",
}
# What must be in a kernel's PTX. A compiler leaves out an acquire whose result is not used, and splits accesses of
# 16 bytes where it does not know that addresses are aligned.
_OF_PEERS = ("ld.global.sys.acquire", "ld.volatile.global.v4")
NEEDED = dict.fromkeys(("_peer_sum_kernel", "_peer_join_kernel", "_peer_add_rms_norm_kernel"), _OF_PEERS)
PROCESSES = 2


@dataclass
class Variant:
    """A kernel with everything that its code depends on, and the cases that launch it."""

    arch: int
    source: ASTSource
    options: Any
    cases: list[KernelCase] = field(default_factory=list)


@dataclass(frozen=True)
class Compiled:
    """What became of a variant.

    Attributes:
        cases: the calls that launch it.
        constexprs: by name, with num_warps and num_stages.
        shared: bytes of shared memory a program.
        registers: a thread.
        spilled: bytes of stack a thread, which in these kernels hold spilled registers alone.
        wgmma: how many of these instructions its PTX has.
        serialised: whether the machine code of one that must not do so waits after each of them.
        missing: what its PTX needs and lacks.
        error: why it could not be compiled; None if it was.
    """

    arch: int
    kernel: str
    cases: tuple[str, ...]
    constexprs: dict[str, str]
    shared: int = 0
    registers: int = 0
    spilled: int = 0
    wgmma: int = 0
    serialised: bool = False
    missing: tuple[str, ...] = ()
    error: str | None = None

    @property
    def faults(self) -> list[str]:
        """Why it may not be used."""
        if self.error is not None:
            return [self.error]
        faults = []
        if self.spilled > MAX_SPILLED_BY.get(self.kernel, MAX_SPILLED):
            faults.append(f"spills {self.spilled} bytes a thread")
        if self.shared > MAX_SHARED[self.arch]:
            faults.append(
                f"wants {self.shared} bytes of shared memory; sm_{self.arch} has {MAX_SHARED[self.arch]}"
            )
        if self.serialised:
            faults.append("waits after every wgmma")
        faults.extend(f"has no {text}" for text in self.missing)
        return faults

    def __str__(self) -> str:
        values = " ".join(f"{name}={value}" for name, value in self.constexprs.items())
        return (
            f"sm_{self.arch} {self.kernel}: registers {self.registers}, spilled {self.spilled}, "
            f"shared {self.shared}, wgmma {self.wgmma}  [{self.cases[0]}; {values}]"
        )


class Recorder:
    """Within `recording`, kernels are not launched: their variants are kept."""

    def __init__(self, gpu: GPU) -> None:
        self.target = GPUTarget("cuda", gpu.capability, 32)
        self.backend = make_backend(self.target)
        self.gpu = gpu
        self.variants: dict[str, Variant] = {}
        self._case: KernelCase | None = None

    def record(self, cases: Iterable[KernelCase]) -> None:
        """Call every case."""

        def run(kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
            self._launch(kernel, arguments, grid, keywords)

        launched, JITFunction.run = JITFunction.run, run
        try:
            with compiling_for(self.gpu):
                for self._case in cases:
                    self._case.call()
        finally:
            JITFunction.run = launched

    def _launch(
        self, kernel: JITFunction, arguments: tuple[Any, ...], grid: Any, keywords: dict[str, Any]
    ) -> None:
        """What `JITFunction.run` does up to compiling, with Triton's own binder: it says which arguments are
        constants, 1, or divisible by 16.
        """
        bind = create_function_from_signature(kernel.signature, kernel.params, self.backend)
        bound, specialization, options = bind(*arguments, **keywords)
        grid = grid(bound) if callable(grid) else grid
        if not all(isinstance(size, int) and size >= 0 for size in grid):
            raise ValueError(f"{kernel.__name__} has the grid {grid}")
        options, signature, constexprs, attributes = kernel._pack_args(
            self.backend, keywords, bound, specialization, options
        )
        kind = GluonASTSource if kernel.is_gluon() else ASTSource
        source = kind(kernel, signature, constexprs, attributes)
        key = f"{kernel.__name__} {source.hash()} {options.hash()}"
        variant = self.variants.setdefault(key, Variant(self.gpu.capability, source, options))
        assert self._case is not None
        if self._case not in variant.cases:
            variant.cases.append(self._case)


def compile_variant(variant: Variant) -> Compiled:
    """Compile it, and read what the compilers say of it."""
    source, options = variant.source, variant.options
    constexprs = {
        source.fn.arg_names[path[0]]: str(value) for path, value in source.constants.items() if len(path) == 1
    }
    constexprs |= {"num_warps": str(options.num_warps), "num_stages": str(options.num_stages)}
    compiled = partial(
        Compiled,
        variant.arch,
        source.fn.__name__,
        tuple(str(case) for case in variant.cases),
        constexprs,
    )
    try:
        # Triton prints the whole PTX where ptxas fails.
        with contextlib.redirect_stdout(io.StringIO()):
            kernel = triton.compile(
                source, target=GPUTarget("cuda", variant.arch, 32), options=dict(options.__dict__)
            )
    except Exception as error:  # of any kind: a defect of the kernel, to be reported with the others
        return compiled(error=f"{type(error).__name__}: {_first_words(str(error))}")
    registers, spilled = _resources(kernel.asm["cubin"])
    ptx = kernel.asm["ptx"]
    wgmma = ptx.count("wgmma.mma_async")
    must_overlap = wgmma > 0 and source.fn.__name__ in OVERLAPPING
    return compiled(
        shared=kernel.metadata.shared,
        registers=registers,
        spilled=spilled,
        wgmma=wgmma,
        serialised=must_overlap and _waits(kernel.asm["cubin"]) > 2 * ptx.count("wgmma.wait_group"),
        missing=tuple(text for text in NEEDED.get(source.fn.__name__, ()) if text not in ptx),
    )


def _first_words(message: str) -> str:
    fatal = re.search(r"ptxas (?:fatal|error) *: (.*)", message)
    return fatal[1] if fatal else message.strip()[-500:]


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers a thread, and bytes of stack a thread."""
    shown = _dump(cubin, "-res-usage")
    usage = re.search(r"REG:(\d+) STACK:(\d+).* LOCAL:(\d+)", shown)
    if usage is None:
        raise ValueError(f"cuobjdump said: {shown}")
    return int(usage[1]), int(usage[2]) + int(usage[3])


def _waits(cubin: bytes) -> int:
    """How often the machine code waits for wgmma. Where ptxas cannot let them overlap, it waits after each."""
    return _dump(cubin, "-sass").count("WARPGROUP.DEPBAR")


def _dump(cubin: bytes, option: str) -> str:
    """What cuobjdump shows."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout


_variants: list[Variant] = []  # a forked process finds them here: a kernel cannot be pickled


def _compile_nth(index: int) -> Compiled:
    return compile_variant(_variants[index])


def fewest(variants: Iterable[Variant]) -> Iterator[Variant]:
    """Those of the few cases that `make test` compiles: for Hopper all of one case an operation, with wgmma and
    without, with e4m3 and without, and of one case each kernel; for other architectures, which have configurations
    in common, each kernel once, and for the one with the least shared memory attention in full.
    """
    for_hopper: dict[object, KernelCase] = {}
    seen = set()
    hopper = []
    for variant in variants:
        case, kernel = variant.cases[0], variant.source.fn.__name__
        kind = variant.arch, kernel, case.min_capability  # with e4m3 and without
        in_full = variant.arch == 89 and case.op in (decode_attention, extend_attention)
        if variant.arch == 90:
            hopper.append(variant)
            for_hopper.setdefault(kernel, case)
            for own in variant.cases:
                for_hopper.setdefault((own.op, own.min_capability, own.wgmma), own)
        elif in_full or kind not in seen:
            yield variant
        seen.add(kind)
    chosen = [*for_hopper.values()]
    for variant in hopper:
        variant.cases = [case for case in variant.cases if case in chosen]
        if variant.cases:
            yield variant


def compile_all(cases: list[KernelCase], archs: Iterable[int], *, few: bool = False) -> Iterator[Compiled]:
    """Every distinct variant that the cases launch on each architecture, or the fewest, as they are made; for GPUs
    before Hopper these are of one case an operation.
    """
    _variants.clear()
    for arch in archs:
        recorder = Recorder(GPU(arch, NUM_SMS[arch]))
        chosen = [case for case in cases if case.min_capability <= arch]
        if few and arch != 90:
            chosen = list({case.op: case for case in reversed(chosen)}.values())
        recorder.record(chosen)
        variants = recorder.variants.values()
        _variants.extend(fewest(variants) if few else variants)
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("fork")) as processes:
        yield from processes.map(_compile_nth, range(len(_variants)))


def without_wgmma(cases: Iterable[KernelCase], results: list[Compiled]) -> list[str]:
    """The cases that want these instructions on Hopper, and of whose kernels none has any."""
    have = {case for compiled in results if compiled.wgmma for case in compiled.cases}
    launched = {case for compiled in results if compiled.arch == 90 for case in compiled.cases}
    return [str(case) for case in cases if case.wgmma and str(case) in launched - have]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--arch", type=int, nargs="+", choices=sorted(NUM_SMS), default=[90])
    parser.add_argument("--cases", choices=("few", "all", "probe"), default="few")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name has it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="gets what is printed")
    arguments = parser.parse_args(argv)
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET is set; nothing would be compiled")
    torch.set_num_threads(1)
    every = probe_cases() if arguments.cases == "probe" else kernel_cases()
    cases = [case for case in every if arguments.cases != "few" or case.few]
    cases = [case for case in cases if arguments.only in str(case)]
    results = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        for compiled in compile_all(cases, arguments.arch, few=arguments.cases == "few"):
            results.append(compiled)
            print(compiled, *(f"\n  FAULT: {fault}" for fault in compiled.faults), flush=True)
    missing = without_wgmma(cases, results)
    for case in missing:
        print(f"FAULT: no wgmma on sm_90: {case}")
    if arguments.json is not None:
        report = {
            "variants": [asdict(compiled) | {"faults": compiled.faults} for compiled in results],
            "without_wgmma": missing,
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return int(bool(missing) or any(compiled.faults for compiled in results))


if __name__ == "__main__":
    sys.exit(main())
