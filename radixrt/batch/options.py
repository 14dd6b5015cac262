"""Options of a batch."""

# Tests: tests/batch/test_run.py

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict

from radixrt.batch.formats.source import MAX_LINE
from radixrt.checks import check_float, check_int
from radixrt.engine.signals import DRAIN_SECONDS
from radixrt.errors import ParameterError
from radixrt.frontend.arguments import Params
from radixrt.report.files import Paths
from radixrt.sampling_params import MAX_NEW_TOKENS

Order = Literal["planned", "file"]


class BatchOptions(TypedDict, total=False):
    """Keyword arguments of a batch; `BatchConfig` has their meaning and defaults."""

    default_params: Params
    chat_max_tokens: int | None
    overwrite: bool
    restart: bool
    strict: bool
    strict_form: bool
    order: Order
    keep_cache: bool
    progress: bool
    created: int | None
    max_error_rate: float | None
    drain_seconds: float
    max_line_bytes: int
    report: Paths
    price_per_hour: float | None


@dataclass(frozen=True)
class BatchConfig:
    """Options of a batch, validated.

    Attributes:
        default_params: parameters of lines that give none, also as a dict; None: those of `SamplingParams()`.
        chat_max_tokens: max_tokens of chats in OpenAI's format that give none; None: that of `default_params`, or
            all that the context leaves if these do not give it.
        overwrite: replace an existing output.
        restart: discard the records of an earlier run, of whatever input.
        strict: run nothing if a line is bad.
        strict_form: an answer that was to have a form, and ended by its length before that was complete, becomes
            an error record.
        order: in which prompts run. "planned": prompts with a common prefix follow one another, those with the
            longest answers first. "file": first come, first served, while later lines are read; for comparison.
        keep_cache: keep prefixes cached after the batch, as far as the pool has room. Otherwise, if the pool is
            too small for all of them, a prefix leaves the cache once no later prompt begins with it.
        progress: show bars on stderr; where that is not a terminal, they move every 30 seconds.
        created: Unix time in seconds that records in OpenAI's format bear; None: each that of its answer.
        max_error_rate: stop once more than this share of all lines, 0 to 1, have error records; None: go on.
        drain_seconds: time that started requests have to finish after the first signal.
        max_line_bytes: bytes of the longest line that is read; a longer one gets an error record.
        report: files for the report, written also if a signal, a lost device or too many errors stopped the batch.
            .html is a page with plots; .json has the figures (`BatchReport.to_json`).
            Existing files are replaced.
        price_per_hour: of the machine, in any currency, for the report.

    Raises:
        ParameterError: an option is outside its bounds, or of another type.
    """

    default_params: Params = None
    chat_max_tokens: int | None = None
    overwrite: bool = False
    restart: bool = False
    strict: bool = False
    strict_form: bool = False
    order: Order = "planned"
    keep_cache: bool = False
    progress: bool = False
    created: int | None = None
    max_error_rate: float | None = None
    drain_seconds: float = DRAIN_SECONDS
    max_line_bytes: int = MAX_LINE
    report: Paths = ()
    price_per_hour: float | None = None

    def __post_init__(self) -> None:
        for name in ("overwrite", "restart", "strict", "strict_form", "keep_cache", "progress"):
            if not isinstance(given := getattr(self, name), bool):
                raise ParameterError(f"{name} is {given!r}; it must be True or False")
        if self.order not in ("planned", "file"):
            raise ParameterError(f"order is {self.order!r}; it must be 'planned' or 'file'")
        if self.max_error_rate is not None:
            check_float("max_error_rate", self.max_error_rate, 0.0, 1.0)
        if self.chat_max_tokens is not None:
            check_int("chat_max_tokens", self.chat_max_tokens, 1, MAX_NEW_TOKENS)
        if self.created is not None:
            check_int("created", self.created, 0, 2**63 - 1)
        check_float("drain_seconds", self.drain_seconds, 0.0, 1e6)
        object.__setattr__(self, "max_line_bytes", check_int("max_line_bytes", self.max_line_bytes, 1, 2**40))
        if self.price_per_hour is not None:
            check_float("price_per_hour", self.price_per_hour, 0.0, 1e9)
