"""The keywords of a batch, for those who pass them on."""

from __future__ import annotations

from typing import TypedDict

from radixrt.batch.batch_run import Order
from radixrt.report.files import Paths
from radixrt.sampling_params import SamplingParams


class BatchOptions(TypedDict, total=False):
    """The keywords of `radixrt.batch.job.Batch`, which has their meaning and their defaults."""

    default_params: SamplingParams | None
    overwrite: bool
    restart: bool
    strict: bool
    order: Order
    keep_cache: bool
    progress: bool
    created: int | None
    max_error_rate: float | None
    drain_seconds: float
    report: Paths
    price_per_hour: float | None
