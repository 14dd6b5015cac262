"""Conversions to and from e4m3 for Triton's interpreter, whose own round up without a carry and read NaN as 480.

To import this puts torch's in their place. A GPU's are compared with torch's in test_qk_norm_rope_store.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from triton.runtime import interpreter

DTYPES = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
}
INTEGERS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}

_own = interpreter._convert_float


def convert_float(values: NDArray[Any], source: Any, target: Any, rounding: Any) -> NDArray[Any]:
    """The bits of `values`, numbers of the Triton type `source`, as numbers of `target`."""
    if "fp8e4nv" not in (source.name, target.name):
        converted: NDArray[Any] = _own(values, source, target, rounding)
        return converted
    bits = torch.from_numpy(np.ascontiguousarray(values)).view(DTYPES[source.name])
    as_target = bits.to(DTYPES[target.name])
    return as_target.view(INTEGERS[as_target.itemsize]).numpy()


interpreter._convert_float = convert_float
