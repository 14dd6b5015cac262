"""`RuntimeConfig`: the options of a Runtime, with their bounds and defaults."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from radixrt.checks import check_float, check_int
from radixrt.errors import ParameterError
from radixrt.limits import CPU_LIMITS, GPU_LIMITS, PassLimits
from radixrt.schedule.policy import SchedulePolicy

if TYPE_CHECKING:
    import torch

    from radixrt.models.loader import LoadFormat
    from triton_ops.implementation import Impl

Attention = Literal["tree", "flat"]


@dataclass(frozen=True)
class RuntimeConfig:
    """The options of a Runtime. None, where it is allowed, is a choice by the kind of device.

    Raises ParameterError where an option is outside its bounds.

    Attributes:
        model: folder or hub id of a model in Hugging Face format, or a .gguf file; None is the small built-in
            model.
        dtype: "auto" (the checkpoint's; float32 on a CPU), "float32", "bfloat16" or "float16".
        kv_dtype: of keys and values: "auto" (that of the weights), or "fp8" (e4m3: the pool holds twice the
            tokens, less precisely; a GPU needs compute capability 8.9; docs/architecture/kv-in-8-bits.md).
        quantization: "fp8" quantises the weights of linear layers to e4m3 as they are loaded, with a scale for
            each output, and in each product x, with a scale for each token; None: as the checkpoint has them (the
            only choice if that is in 4 bits). GPUs multiply e4m3 from compute capability 8.9 on; elsewhere the
            rounded weights are held in `dtype` (docs/models.md#fp8-weights).
        device: such as "cpu", "cuda" or "cuda:1"; None is CUDA where there is a GPU.
        tensor_parallel_size: ranks that compute the model together, each with its part of the weights: a process
            each, on cards from `device` on (docs/ranks.md).
        pipeline_parallel_size: stages of consecutive layers, each on `tensor_parallel_size` ranks of its own.
        memory_fraction: share of the free memory that the KV pool takes, above 0, at most 1; on a GPU, of what
            weights, the largest pass and graphs leave: several Runtimes on one GPU each need a share of their own.
            None is 0.95 on a GPU and 0.25 on a CPU.
        max_total_tokens: tokens that the KV pool holds; None: see memory_fraction.
        host_memory_gb: 10^9 bytes of host memory, page-locked for a GPU, for a second tier of the prefix cache,
            which takes the prefixes that leave the KV pool, a quarter of it states of sequences if layers keep
            some; ranks have equal parts of it. None or 0: no second tier.
        max_running_requests: requests that run at once; None is 2048 on a GPU, 1024 or 512 where memory is scarce,
            and 64 on a CPU.
        context_length: most tokens of a prompt with its answer; None is the model's own, which also is the limit
            unless its rope can reach farther (docs/models.md).
        chunked_prefill_size: prompt tokens of a pass, at most; None is 16384 on a GPU and 2048 on a CPU.
        schedule_policy: "lpm", longest matched prefix first, with ageing; or "fcfs", first come, first served.
        enable_prefix_cache: False: nothing is reused and nothing is kept.
        force_miss: find nothing in the cache, but run the same code: for measurements.
        overlap: plan a pass while the one before it is computed; False, for measurements: one after the other.
        cuda_graphs: replay passes as captured graphs, which take seconds and some memory to capture; None: where
            kernels run on a GPU.
        attention: how kernels read KV that requests of a pass share: "tree", once for all of them, where that is
            cheaper; or "flat", once for each, for comparison.
        deterministic: a prompt's tokens and log-probabilities have the same bits whatever is cached and whatever
            runs beside it (docs/same-bits.md). ModelError where the device cannot promise that.
        load_format: "auto" reads safetensors, "dummy" makes random weights from config.json alone.
        revision: branch, tag or commit of a hub id; None is its main branch.
        chat_template_kwargs: variables of the chat template, such as {"enable_thinking": False}, for chats that do
            not give them.
        generation_config: "auto": where a call gives no parameters, or a dict without some, the model's own
            generation_config.json has the defaults of temperature, top_k, top_p, min_p, repetition_penalty and
            max_new_tokens. "none": SamplingParams has all. End tokens are read from that file in any case.
        threads: processors that operations on a CPU use, in the whole process; None: as many as torch would, but
            not more than the process may use by its affinity and its control group's quota.
        seed: of dummy weights, and of requests without a seed of their own, together with their index and the
            number of their call: the same calls of two Runtimes draw the same. None: one of the system's, which
            `Runtime.seed` has; dummy weights are those of 0 then.
        impl: of the model's operations: "triton", kernels; "torch", the references; "auto", kernels on a GPU
            where Triton is installed, else references.
    """

    model: str | Path | None = None
    _: KW_ONLY
    dtype: str | torch.dtype = "auto"
    kv_dtype: str = "auto"
    quantization: Literal["fp8"] | None = None
    device: str | torch.device | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    memory_fraction: float | None = None
    max_total_tokens: int | None = None
    host_memory_gb: float | None = None
    max_running_requests: int | None = None
    context_length: int | None = None
    chunked_prefill_size: int | None = None
    schedule_policy: str | SchedulePolicy = SchedulePolicy.LPM
    enable_prefix_cache: bool = True
    force_miss: bool = False
    overlap: bool = True
    cuda_graphs: bool | None = None
    attention: Attention = "tree"
    deterministic: bool = False
    load_format: LoadFormat = "auto"
    revision: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    generation_config: Literal["auto", "none"] = "none"
    threads: int | None = None
    seed: int | None = 0
    impl: Impl = "auto"

    def __post_init__(self) -> None:
        known = {
            "attention": ("tree", "flat"),
            "generation_config": ("auto", "none"),
            "kv_dtype": ("auto", "fp8"),
            "quantization": (None, "fp8"),
            "schedule_policy": [*SchedulePolicy],
        }
        for name, choices in known.items():
            if (chosen := getattr(self, name)) not in choices:
                raise ParameterError(f"{name} is {chosen!r}; it must be one of: {', '.join(map(str, choices))}")
        for name in ("enable_prefix_cache", "force_miss", "overlap", "deterministic"):
            if not isinstance(chosen := getattr(self, name), bool):
                raise ParameterError(f"{name} is {chosen!r}; it must be True or False")
        if self.cuda_graphs is not None and not isinstance(self.cuda_graphs, bool):
            raise ParameterError(f"cuda_graphs is {self.cuda_graphs!r}; it must be True, False or None")
        if self.force_miss and not self.enable_prefix_cache:
            raise ParameterError("force_miss is True and enable_prefix_cache is False: there is no cache to miss")
        if self.model is not None and not (isinstance(self.model, (str, os.PathLike)) and str(self.model)):
            raise ParameterError(f"model is {self.model!r}; it must be a folder or a hub id")
        if self.memory_fraction is not None:
            fraction = check_float("memory_fraction", self.memory_fraction, 0.0, 1.0, above=True)
            object.__setattr__(self, "memory_fraction", fraction)
        if not isinstance(self.chat_template_kwargs, (Mapping, type(None))):
            raise ParameterError(f"chat_template_kwargs is {self.chat_template_kwargs!r}; it must be a dict")
        most = {
            "max_total_tokens": 2**40,
            "context_length": 2**31 - 1,
            "tensor_parallel_size": 64,
            "pipeline_parallel_size": 64,
            "max_running_requests": 2**16,
            "chunked_prefill_size": 2**20,
            "threads": 2**10,  # OpenMP crashes where it gets no more
        }
        for name, high in most.items():
            if (number := getattr(self, name)) is not None or name.endswith("_parallel_size"):
                object.__setattr__(self, name, check_int(name, number, 1, high))
        if self.seed is not None:
            object.__setattr__(self, "seed", check_int("seed", self.seed, 0, 2**63 - 1))
        if self.host_memory_gb and not self.enable_prefix_cache:
            given = f"host_memory_gb is {self.host_memory_gb!r} and enable_prefix_cache is False"
            raise ParameterError(f"{given}: nothing is kept that could go to the host")

    @property
    def num_ranks(self) -> int:
        """Processes that compute the model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def told_ranks(self) -> str:
        """How many ranks there are, and why, for messages."""
        told = f"tensor_parallel_size is {self.tensor_parallel_size}"
        if self.pipeline_parallel_size == 1:
            return told
        return f"{told} and pipeline_parallel_size {self.pipeline_parallel_size}: {self.num_ranks} ranks"

    @property
    def num_lanes(self) -> int:
        """Parts of the running answers that decode in turn, so that each stage works on another part."""
        return self.pipeline_parallel_size if self.overlap else 1

    @cached_property
    def run_seed(self) -> int:
        """seed, or one of the system's."""
        return secrets.randbits(63) if self.seed is None else self.seed

    def share_of_memory(self, *, on_gpu: bool) -> float:
        """memory_fraction, or its default."""
        return self.memory_fraction or (0.95 if on_gpu else 0.25)

    def pass_limits(self, *, on_gpu: bool) -> PassLimits:
        """max_running_requests and chunked_prefill_size, or their defaults."""
        default = GPU_LIMITS if on_gpu else CPU_LIMITS
        return PassLimits(
            self.max_running_requests or default.max_running_requests,
            self.chunked_prefill_size or default.chunked_prefill_size,
        )


def config_as_json(config: RuntimeConfig) -> dict[str, Any]:
    """Keyword arguments of an equal RuntimeConfig, with the seed that it has drawn."""
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    values |= {"seed": config.run_seed, "schedule_policy": SchedulePolicy(config.schedule_policy).value}
    for name in ("model", "device", "dtype"):
        if values[name] is not None:
            values[name] = str(values[name]).removeprefix("torch.")
    if config.model is not None:
        place = os.path.expanduser(config.model)
        if not isinstance(config.model, str) or os.path.exists(place):
            values["model"] = str(Path(place).absolute())
    if config.chat_template_kwargs is not None:
        values["chat_template_kwargs"] = dict(config.chat_template_kwargs)
    return values
