"""Triton's interpreter, where it can run."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from triton_ops.implementation import triton


def require_interpreter() -> None:
    """Skip a test of kernels on the CPU where they do not run there."""
    if not triton.__version__:
        pytest.skip("there is no Triton for this platform")
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled in this process, not interpreted: there is a GPU")
    if triton.__version__ < "3.7" and np.lib.NumpyVersion(np.__version__) >= "2.5.0":
        pytest.skip(f"Triton {triton.__version__}'s interpreter does not know NumPy {np.__version__}")
