"""Cases of sampling: our kernels and torch's operations, on a batch of logits.

torch draws other tokens: the comparison is of the share of rows whose token the filters allow, and for ours
the share of tokens that are the reference's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scripts.kernel_benchmarks.case import Call, Case, Contender, Expected, Source, seeded
from scripts.kernel_benchmarks.roofline import Work
from triton_ops.sampling.logit_threshold import reference_thresholds
from triton_ops.sampling.logprobs import token_logprobs
from triton_ops.sampling.sample import greedy, sample

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


def _inputs(
    num_rows: int, vocab_size: int, spread: float, filters: Sequence[str], dtype: torch.dtype, source: Source
) -> SamplingInputs:
    filled = partial(torch.full, (num_rows,), device=source.device)
    parameters = {
        "temperatures": filled(TEMPERATURE),
        "seeds": torch.arange(num_rows, device=source.device),
        "sample_indices": filled(0, dtype=torch.int32),
        "positions": filled(100, dtype=torch.int32),
    }
    if "top_ks" in filters:
        parameters["top_ks"] = filled(TOP_K, dtype=torch.int32)
    if "top_ps" in filters:
        parameters["top_ps"] = filled(TOP_P)
    return SamplingInputs(source.normal(num_rows, vocab_size, dtype=dtype).mul_(spread), parameters)


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


_NAMES = {(): "temperature", ("top_ps",): "top_p", ("top_ks", "top_ps"): "top_k top_p"}


def sampling_cases(
    num_rows: int = 512, vocab_size: int = 151_936, dtype: torch.dtype = torch.bfloat16
) -> Iterator[Case[SamplingInputs]]:
    """Draws from flat and from peaked logits, greedy choices and log-probabilities; Qwen's vocabulary."""

    def case(
        name: str,
        variant: str,
        contenders: tuple[Contender[SamplingInputs], ...],
        expected: Callable[[SamplingInputs], Expected] = _all_right,
        filters: Sequence[str] = (),
    ) -> Case[SamplingInputs]:
        spread, work = SPREADS[variant or "peaked"], Work(num_rows * vocab_size * dtype.itemsize)
        inputs = seeded(partial(_inputs, num_rows, vocab_size, spread, filters, dtype))
        return Case("sampling", f"{name} {num_rows}x{vocab_size}", variant, work, inputs, expected, contenders)

    for filters, name in _NAMES.items():
        by_torch = partial(_peer, torch_sorted if filters else torch_multinomial)
        for variant in SPREADS:
            contenders = Contender("radixrt", our_sample), Contender("torch", by_torch)
            yield case(name, variant, contenders, filters=filters)
    yield case("greedy", "", _both(_greedy))
    yield case("logprobs", "", _both(_logprobs), _expected_logprobs)


def _both(prepare: Callable[[Any, SamplingInputs], Call]) -> tuple[Contender[SamplingInputs], ...]:
    return Contender("radixrt", partial(prepare, "triton")), Contender("torch", partial(prepare, "torch"))


def _greedy(impl: Any, inputs: SamplingInputs) -> Call:
    reference = inputs.logits.argmax(-1)
    return Call(lambda: greedy(inputs.logits, impl=impl), lambda tokens: _share_equal(tokens, reference))


def _logprobs(impl: Any, inputs: SamplingInputs) -> Call:
    return Call(lambda: _call_logprobs(impl, inputs), _numbers)


def _call_logprobs(impl: Any, inputs: SamplingInputs) -> tuple[Tensor, ...]:
    """Log-probabilities of a token a row, its rank, and the most likely."""
    return token_logprobs(inputs.logits, inputs.parameters["seeds"].int(), NUM_TOP, impl=impl)


def _expected_logprobs(inputs: SamplingInputs) -> Expected:
    return Expected(_numbers(_call_logprobs("torch", inputs)))


def _numbers(results: Any) -> list[Tensor]:
    chosen, ranks, _, top = results
    return [chosen.unsqueeze(1), ranks.unsqueeze(1), top]


def sampling_sweep() -> Iterator[Case[SamplingInputs]]:
    """Smaller batches, and a smaller vocabulary."""
    for num_rows in (1, 8, 64):
        yield from sampling_cases(num_rows)
    yield from sampling_cases(512, 32_000)
