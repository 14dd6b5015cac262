"""What the sampler is told about the requests of a pass, and the draw itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from radixrt.schedule.request import Request
from triton_ops.sampling import greedy, sample


def sampling_arrays(requests: Sequence[Request], seq_lens: NDArray[np.int32]) -> dict[str, NDArray[Any]]:
    """The sampler's arrays for S requests that sample, each `[S]`.

    Only what some request asks for is there: nothing if all are greedy, no filter that none uses. So a pass pays
    for the features of its own requests alone, and the host need not ask the device which they are.

    Args:
        seq_lens: `[S]`, the position of the token to be sampled.
    """
    count = len(requests)
    params = [request.params for request in requests]
    temperatures = np.fromiter((p.temperature for p in params), np.float32, count)
    if not temperatures.any():
        return {}
    arrays: dict[str, NDArray[Any]] = {
        "temperatures": temperatures,
        "seeds": np.fromiter((request.seed for request in requests), np.int64, count),
        "sample_indices": np.zeros(count, dtype=np.int32),
        "draw_positions": seq_lens.astype(np.int32),
    }
    top_ks = np.fromiter((p.top_k for p in params), np.int32, count)
    top_ps = np.fromiter((p.top_p for p in params), np.float32, count)
    min_ps = np.fromiter((p.min_p for p in params), np.float32, count)
    if top_ks.any() or (top_ps < 1).any():
        arrays |= {"top_ks": top_ks, "top_ps": top_ps}
    if min_ps.any():
        arrays["min_ps"] = min_ps
    return arrays


def draw(logits: Tensor, arrays: Mapping[str, Tensor]) -> Tensor:
    """Token ids `[S]` int32 for `logits` `[S, vocab_size]`, given what `sampling_arrays` made, on the device."""
    if "temperatures" not in arrays:
        return greedy(logits)
    return sample(
        logits,
        temperatures=arrays["temperatures"],
        seeds=arrays["seeds"],
        sample_indices=arrays["sample_indices"],
        positions=arrays["draw_positions"],
        top_ks=arrays.get("top_ks"),
        top_ps=arrays.get("top_ps"),
        min_ps=arrays.get("min_ps"),
    )
