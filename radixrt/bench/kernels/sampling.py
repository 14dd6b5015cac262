"""Cases of sampling: our kernels, torch's operations and FlashInfer's, on a batch of logits.

Others draw other tokens: the comparison is of the share of rows whose token the filters allow, and for ours
the share of tokens that are the reference's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from radixrt.bench.kernels.case import Call, Case, Contender, Expected
from radixrt.bench.kernels.roofline import Work
from triton_ops.sampling.logit_threshold import reference_thresholds
from triton_ops.sampling.logprobs import token_logprobs
from triton_ops.sampling.sample import greedy, sample

DTYPE = torch.bfloat16
TEMPERATURE, TOP_K, TOP_P = 0.8, 50, 0.95
NUM_TOP = 5  # requested alternatives with log-probabilities
SPREADS = {"flat": 1.0, "peaked": 4.0}
"""Standard deviations of the logits: flatter than any language model's, and typical ones."""

Peer = Callable[["SamplingInputs"], Tensor]


@dataclass(frozen=True)
class SamplingInputs:
    """Logits `[R, vocab_size]`, and the other inputs of `sample`."""

    logits: Tensor
    parameters: Mapping[str, Tensor]

    @property
    def scaled(self) -> Tensor:
        """Float32, divided by the temperature."""
        return self.logits.float().div_(TEMPERATURE)


def sampling_inputs(
    num_rows: int, vocab_size: int, spread: float, filters: Sequence[str], device: torch.device, copies: int
) -> list[SamplingInputs]:
    generator = torch.Generator(device).manual_seed(0)
    filled = partial(torch.full, (num_rows,), device=device)
    parameters = {
        "temperatures": filled(TEMPERATURE),
        "seeds": torch.arange(num_rows, device=device),
        "sample_indices": filled(0, dtype=torch.int32),
        "positions": filled(100, dtype=torch.int32),
    }
    if "top_ks" in filters:
        parameters["top_ks"] = filled(TOP_K, dtype=torch.int32)
    if "top_ps" in filters:
        parameters["top_ps"] = filled(TOP_P)

    def logits() -> Tensor:
        values = torch.randn(num_rows, vocab_size, dtype=DTYPE, device=device, generator=generator)
        return values.mul_(spread)

    return [SamplingInputs(logits(), parameters) for _ in range(copies)]


def _all_right(inputs: SamplingInputs) -> Expected:
    return Expected([torch.ones(1, device=inputs.logits.device)])


def _share(right: Tensor) -> list[Tensor]:
    return [right.float().mean().view(1)]


def _share_equal(tokens: Any, reference: Tensor) -> list[Tensor]:
    return _share(torch.eq(tokens, reference))


def our_sample(inputs: SamplingInputs) -> Call:
    def run(impl: Any = "triton") -> Tensor:
        return sample(inputs.logits, **inputs.parameters, impl=impl)

    return Call(run, lambda tokens: _share_equal(tokens, run("torch")))


def _peer(draw: Peer, inputs: SamplingInputs) -> Call:
    """`draw` gives tokens `[R]` or `[R, 1]`."""

    def is_allowed(tokens: Any) -> list[Tensor]:
        logits = inputs.logits.float()
        filters = (inputs.parameters.get(name) for name in ("top_ks", "top_ps"))
        least = reference_thresholds(logits, inputs.parameters["temperatures"], *filters)
        return _share(logits.gather(1, tokens.view(-1, 1).long()).squeeze(1) >= least)

    draw(inputs)  # a missing package shows here
    return Call(lambda: draw(inputs), is_allowed)


def torch_multinomial(inputs: SamplingInputs) -> Tensor:
    """softmax, then multinomial."""
    return torch.multinomial(inputs.scaled.softmax(-1), 1)


def torch_sorted(inputs: SamplingInputs) -> Tensor:
    """A full sort, top-k and top-p on the sorted logits, multinomial, and back to token ids."""
    values, ids = inputs.scaled.sort(dim=-1, descending=True)
    if "top_ks" in inputs.parameters:
        values[:, TOP_K:] = -torch.inf
    probabilities = values.softmax(-1)
    if "top_ps" in inputs.parameters:
        before = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities.masked_fill_(before >= TOP_P, 0.0)
    return ids.gather(1, torch.multinomial(probabilities, 1))


def flash_infer(inputs: SamplingInputs) -> Tensor:
    """FlashInfer's sampler for these filters; it needs float32."""
    from flashinfer import sampling  # type: ignore[import-not-found]

    drawn: Tensor
    if "top_ks" in inputs.parameters:
        drawn = sampling.top_k_top_p_sampling_from_logits(
            inputs.scaled, TOP_K, TOP_P, filter_apply_order="top_k_first"
        )
    elif "top_ps" in inputs.parameters:
        drawn = sampling.top_p_sampling_from_probs(inputs.scaled.softmax(-1), TOP_P)
    else:
        drawn = sampling.sampling_from_logits(inputs.scaled)
    return drawn


_NAMES = {(): "temperature", ("top_ps",): "top_p", ("top_ks", "top_ps"): "top_k top_p"}


def sample_case(num_rows: int, vocab_size: int, filters: tuple[str, ...], variant: str) -> Case[SamplingInputs]:
    by_torch = torch_sorted if filters else torch_multinomial
    return Case(
        "sampling",
        f"{_NAMES[filters]} {num_rows}x{vocab_size}",
        variant,
        Work(num_rows * vocab_size * DTYPE.itemsize),
        partial(sampling_inputs, num_rows, vocab_size, SPREADS[variant], filters),
        _all_right,
        (
            Contender("radixrt", our_sample),
            Contender("torch", partial(_peer, by_torch)),
            Contender("FlashInfer", partial(_peer, flash_infer)),
        ),
    )


def greedy_case(num_rows: int, vocab_size: int) -> Case[SamplingInputs]:
    def prepare(impl: Any, inputs: SamplingInputs) -> Call:
        reference = inputs.logits.argmax(-1)
        return Call(lambda: greedy(inputs.logits, impl=impl), lambda tokens: _share_equal(tokens, reference))

    return Case(
        "sampling",
        f"greedy {num_rows}x{vocab_size}",
        "",
        Work(num_rows * vocab_size * DTYPE.itemsize),
        partial(sampling_inputs, num_rows, vocab_size, SPREADS["peaked"], ()),
        _all_right,
        (Contender("radixrt", partial(prepare, "triton")), Contender("torch", partial(prepare, "torch"))),
    )


def logprobs_case(num_rows: int, vocab_size: int) -> Case[SamplingInputs]:
    """Log-probabilities of a token a row, its rank, and the most likely."""

    def call(impl: Any, inputs: SamplingInputs) -> tuple[Tensor, ...]:
        tokens = inputs.parameters["seeds"].int()
        return token_logprobs(inputs.logits, tokens, NUM_TOP, impl=impl)

    def numbers(results: Any) -> list[Tensor]:
        chosen, ranks, _, top = results
        return [chosen.unsqueeze(1), ranks.unsqueeze(1), top]

    def prepare(impl: Any, inputs: SamplingInputs) -> Call:
        return Call(lambda: call(impl, inputs), numbers)

    return Case(
        "sampling",
        f"logprobs {num_rows}x{vocab_size}",
        "",
        Work(num_rows * vocab_size * DTYPE.itemsize),
        partial(sampling_inputs, num_rows, vocab_size, SPREADS["peaked"], ()),
        lambda inputs: Expected(numbers(call("torch", inputs))),
        (Contender("radixrt", partial(prepare, "triton")), Contender("torch", partial(prepare, "torch"))),
    )


def sampling_cases(num_rows: int = 512, vocab_size: int = 151_936) -> Iterator[Case[SamplingInputs]]:
    """Qwen's vocabulary at the goals' batch."""
    for filters in _NAMES:
        for variant in SPREADS:
            yield sample_case(num_rows, vocab_size, filters, variant)
    yield greedy_case(num_rows, vocab_size)
    yield logprobs_case(num_rows, vocab_size)


def sampling_sweep() -> Iterator[Case[SamplingInputs]]:
    """Smaller batches, and a smaller vocabulary."""
    for num_rows in (1, 8, 64):
        yield from sampling_cases(num_rows)
    yield from sampling_cases(512, 32_000)
