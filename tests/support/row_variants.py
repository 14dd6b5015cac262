"""Whether kernels have the same code and launch at several numbers of rows: then a row's bits cannot depend on it.

python tests/support/row_variants.py

prints JSON: "variants", for each operation the names of its kernels of which there is more than one variant;
"launches change no code", as launches of few rows overlap with others; and "sums", for each variant of
`token_logprobs`, of which other rows decide, the layouts that its sums of floats run over. Run it in a process
without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from scripts.kernel_benchmarks.experts import ExpertShape
from tests.support.compile_kernels import Recorder, Variant
from tests.support.kernel_cases import KernelCase, LogitsShape, route, run_experts
from triton_ops.activations.gelu_and_mul import gelu_and_mul
from triton_ops.activations.silu_and_mul import silu_and_mul
from triton_ops.attention.soft_cap import soft_cap
from triton_ops.implementation import GPU
from triton_ops.kv.qk_norm_rope_store import HeadNorm, Rotation, qk_norm_rope_store
from triton_ops.kv.view import KVView
from triton_ops.moe.topk_sigmoid import topk_sigmoid
from triton_ops.moe.topk_softmax import topk_softmax
from triton_ops.norms.rms_norm import add_rms_norm, rms_norm, rms_norm_add
from triton_ops.recurrent.causal_conv import causal_conv
from triton_ops.recurrent.gated_delta import gated_delta
from triton_ops.recurrent.gated_rms_norm import gated_rms_norm, gated_squares
from triton_ops.recurrent.rows import StateRows
from triton_ops.sampling.logprobs import token_logprobs

COUNTS = (1, 2, 3, 15, 16, 17, 64, 511, 512)


def calls(count: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Each operation on so many rows, by name."""
    for size in (1024, 100):
        row, gated, weight = bf16(count, size), bf16(count, 2 * size), bf16(size)
        for offset in (None, 1.0):
            norm = {"eps": 1e-6, "offset": offset, "impl": "triton"}
            yield f"rms_norm {size} {offset}", partial(rms_norm, row, weight, **norm)
            yield f"add_rms_norm {size} {offset}", partial(add_rms_norm, row, row, weight, before=weight, **norm)
            yield f"rms_norm_add {size} {offset}", partial(rms_norm_add, row, row, weight, **norm)
        yield f"silu_and_mul {size}", partial(silu_and_mul, gated, impl="triton")
        yield f"gelu_and_mul {size}", partial(gelu_and_mul, gated, approximate="tanh", impl="triton")
        yield f"soft_cap {size}", partial(soft_cap, row, 30.0, impl="triton")
    # Norms over all heads read parts of a packed projection.
    heads = bf16(count, 24, 128)[:, 16:20].flatten(1)
    yield "rms_norm of heads", partial(rms_norm, heads, bf16(512), 1e-6, impl="triton")
    yield "qk_norm_rope_store", partial(prepare_heads, count)
    for vocab_size in (151_936, 50_257):
        logits, seen = LogitsShape(count, vocab_size, torch.bfloat16), f"{count} x "
        for case in logits.cases():
            yield str(case).replace(seen, ""), case.call
    experts = ExpertShape(count, 128, 8, 2048, 768)
    yield "topk_softmax", partial(route, experts, topk_softmax, True)
    yield "topk_sigmoid", partial(route, experts, topk_sigmoid, True)
    yield "experts", partial(run_experts, experts)
    heads = bf16(count, 32, 128)
    yield "gated_rms_norm", partial(gated_rms_norm, heads, heads, bf16(128), 1e-6, impl="triton")
    yield "gated_squares", partial(gated_squares, heads, heads, 256, impl="triton")
    mean, args = torch.empty(count, 32), (heads, heads, bf16(128), 1e-6)
    yield "gated_rms_norm, with a mean", partial(gated_rms_norm, *args, gate_first=True, mean=mean, impl="triton")
    for name, num_extends in (("steps", 0), ("extends", count)):
        yield f"causal_conv, {name}", partial(convolve, count, num_extends)
        yield f"causal_conv, gated, {name}", partial(convolve, count, num_extends, gated=True)
        yield f"gated_delta, {name}", partial(learn, count, num_extends)


def state_rows(count: int, num_extends: int) -> StateRows:
    ints = torch.empty(512, dtype=torch.int32)[:count]
    return StateRows(ints, ints, ints, ints, num_extends)


def convolve(count: int, num_extends: int, *, gated: bool = False) -> None:
    x, before, after = bf16(count, 3 * 8192).chunk(3, 1)
    gates, rows = (before, after) if gated else None, state_rows(count, num_extends)
    causal_conv(x, bf16(8192, 4), None, bf16(3, 8192, 3), rows, gates=gates, impl="triton")


def learn(count: int, num_extends: int) -> None:
    q, k, v = bf16(count, 64, 128).split([16, 16, 32], 1)
    b, a = bf16(count, 64).split(32, 1)
    rows, states = state_rows(count, num_extends), torch.empty(3, 32, 128, 128)
    gated_delta(q, k, v, a, b, bf16(32), bf16(32), states, rows, impl="triton")


def bf16(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def prepare_heads(count: int) -> None:
    q, k, v = bf16(count, 24, 128).split([16, 4, 4], dim=1)
    slots = torch.arange(count, dtype=torch.int32)
    kv = KVView(bf16(512, 4, 128), bf16(512, 4, 128), slots[None])
    rotation = Rotation(torch.empty(1000, 128), slots)
    qk_norm_rope_store(
        q, k, v, kv, slots, norm=HeadNorm(bf16(128), bf16(128), 1e-6), rotation=rotation, impl="triton"
    )


def several_variants() -> dict[str, list[str]]:
    recorders: dict[str, Recorder] = {}
    for count in COUNTS:
        for name, call in calls(count):
            recorder = recorders.setdefault(name, Recorder(GPU(90, 132)))
            recorder.record([KernelCase(call, name, call)])
    found = {}
    for name, recorder in recorders.items():
        codes = {(variant.source.fn.__name__, *code_of(variant)) for variant in recorder.variants.values()}
        numbers = Counter(kernel for kernel, *_ in codes)
        found[name] = sorted(kernel for kernel, number in numbers.items() if number > 1)
    return found


def code_of(variant: Variant) -> tuple[str, str]:
    """What a variant's code depends on: not when it is launched (`launches_change_no_code`)."""
    return variant.source.hash(), replace(variant.options, launch_pdl=False).hash()


def launches_change_no_code() -> bool:
    """Whether the code of a norm is the same if it is launched while what is before it ends."""
    recorder, codes = Recorder(GPU(90, 132)), set()
    for count in (1, 512):
        call = partial(rms_norm, bf16(count, 1024), bf16(1024), 1e-6, impl="triton")
        recorder.record([KernelCase(call, f"{count}", call)])
    early = {variant.options.launch_pdl for variant in recorder.variants.values()}
    for variant in recorder.variants.values():
        target = GPUTarget("cuda", variant.arch, 32)
        compiled = triton.compile(variant.source, target=target, options=dict(variant.options.__dict__))
        codes.add(compiled.asm["ptx"])
    return early == {False, True} and len(codes) == 1


def logprob_sums(dtype: torch.dtype) -> list[list[str]]:
    recorder = Recorder(GPU(90, 132))
    recorder.record(case for case in LogitsShape(64, 151_936, dtype).cases() if case.op is token_logprobs)
    blocks = [variant for variant in recorder.variants.values() if variant.source.fn.__name__ == "_block_kernel"]
    return [_float_sums(variant) for variant in blocks]


def _float_sums(variant: Variant) -> list[str]:
    target = GPUTarget("cuda", variant.arch, 32)
    code = triton.compile(variant.source, target=target, options=dict(variant.options.__dict__)).asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\..*)$", code, re.MULTILINE))
    found = []
    for reduction in re.split(r'(?="tt\.reduce")', code)[1:]:
        body, _, kind = reduction.partition("})")
        operand = re.match(r" : \(tensor<[^,]*, (#\w+)>\)", kind)
        if "arith.addf" in body and operand is not None:
            found.append(layouts[operand[1]])
    return found


if __name__ == "__main__":
    sums = {str(dtype): logprob_sums(dtype) for dtype in (torch.bfloat16, torch.float32)}
    found = {"variants": several_variants(), "sums": sums, "launches change no code": launches_change_no_code()}
    print(json.dumps(found))
