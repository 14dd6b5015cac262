"""Figures of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from radixrt.hit_rate import CountsHits
from radixrt.report.figures import seconds as duration
from radixrt.report.outline import counted
from radixrt.report.timeline import Sample, columns

MILLION = 1_000_000


@dataclass(frozen=True)
class RunFigures(CountsHits):
    """Figures of one process's work on a batch. Only requests that ended without an error count tokens.

    Attributes:
        started: Unix time in seconds.
        answered: requests that ended, with or without an error.
        prompt_tokens: tokens of the prompts.
        cached_tokens: prompt tokens found in the cache.
        completion_tokens: generated tokens.
        recomputed_tokens: tokens computed once more, after a retraction or for one of several answers; no hit rate
            counts them.
        stateless_tokens: tokens whose KV was cached, and which were computed again since no state was kept there;
            None of a model without states.
        best_hit_rate: the highest hit rate possible on the prompts of this run, with what the cache had at first;
            None if there were none.
        predicted_hit_rate: the hit rate that the plan expected; None if the plan was not followed, the cache had a
            second tier, or so much at first that some of it could be evicted.
        seconds: from the first submission to the last output, without loading weights and reading the input.
        prefill_seconds: of these, the device's in passes that compute prompt tokens.
        decode_seconds: of these, the device's in passes that only decode.
        scheduling_seconds: the host's, for planning and booking passes; the device may compute meanwhile.
        passes: of the model.
        most_running: the most requests that ran at once.
        products: of a deterministic run, `ProductTable.to_json` of each shape of weights.
        replicas: of a run on several, what each has done (`ReplicaFigures.to_json`).
        repeated_tokens: of a run on several, prompt tokens that the plan has two of them compute, where it cuts;
            None without a plan or a cache.
    """

    started: float = 0.0
    answered: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    recomputed_tokens: int = 0
    stateless_tokens: int | None = None
    best_hit_rate: float | None = None
    predicted_hit_rate: float | None = None
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    scheduling_seconds: float = 0.0
    passes: int = 0
    most_running: int = 0
    products: tuple[Mapping[str, Any], ...] = ()
    replicas: tuple[Mapping[str, Any], ...] = ()
    repeated_tokens: int | None = None

    @property
    def idle_seconds(self) -> float:
        """Seconds in which the device computed nothing; failed passes count as idle."""
        return max(0.0, self.device_seconds - self.prefill_seconds - self.decode_seconds)

    @property
    def device_seconds(self) -> float:
        """Seconds of the run for each device."""
        return self.seconds * max(1, len(self.replicas))

    @property
    def balance(self) -> float:
        """When replicas had ended their last request on average, as a share of the latest."""
        ends = [replica["seconds"] for replica in self.replicas]
        return _ratio(sum(ends), len(ends) * max(ends, default=0.0))

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens a second."""
        return _ratio(self.completion_tokens, self.seconds)


@dataclass(frozen=True)
class Cost:
    """Cost of a run's `seconds`, in the currency of the price.

    Attributes:
        price_per_hour: of the machine.
        run: of the whole run.
        per_million_generated: of 1,000,000 generated tokens; None if there are none.
        per_million_tokens: of 1,000,000 tokens, prompt and generated; None if there are none.
    """

    price_per_hour: float
    run: float
    per_million_generated: float | None
    per_million_tokens: float | None


@dataclass(frozen=True)
class BatchReport(CountsHits):
    """Figures of one batch. Only requests that ended without an error count tokens.

    Attributes:
        output_path: the file with the records; the run's folder if the batch was interrupted; None for
            standard output, and if no records are kept.
        requests: input lines that are not blank, as far as they were read.
        written: number of records: `requests`, unless the batch was interrupted. Records that are not kept do not
            count, nor do their errors and tokens; `run` has them.
        errors: records with an error, at least in one of several answers.
        prompt_tokens: tokens of the prompts.
        cached_tokens: prompt tokens found in the cache.
        completion_tokens: generated tokens.
        kept: records of earlier runs.
        run: figures of this run alone.
        price_per_hour: of the machine, in any currency; None if unknown.
        timeline: of this run.
        is_complete: whether each line has its record.
        is_read: whether the input was read to its end.
    """

    output_path: Path | None
    requests: int
    written: int
    errors: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    kept: int = 0
    run: RunFigures = field(default_factory=RunFigures)
    price_per_hour: float | None = None
    timeline: tuple[Sample, ...] = ()
    is_complete: bool = True
    is_read: bool = True

    @classmethod
    def of_nothing(cls) -> BatchReport:
        """The report of a batch that has not begun to run."""
        return cls(None, 0, 0, 0, 0, 0, 0, is_complete=False)

    @property
    def records(self) -> str:
        """How many there are, and of how many lines, in words."""
        if self.is_read:
            return f"{self.written:,} of {self.requests:,} records"
        return f"{self.written:,} records of {self.requests:,} lines read so far"

    @property
    def best_hit_rate(self) -> float | None:
        """The highest hit rate possible on the prompts of this run, to compare `run.hit_rate` with."""
        return self.run.best_hit_rate

    @property
    def predicted_hit_rate(self) -> float | None:
        """The hit rate that the plan of this run expected; None if it was not followed, or could not be."""
        return self.run.predicted_hit_rate

    @property
    def seconds(self) -> float:
        """Seconds of this run."""
        return self.run.seconds

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens a second in this run."""
        return self.run.tokens_per_second

    @property
    def cost(self) -> Cost | None:
        """Cost of this run; None without a price."""
        if self.price_per_hour is None:
            return None
        run, generated = self.price_per_hour * self.run.seconds / 3600, self.run.completion_tokens
        tokens = self.run.prompt_tokens + generated
        return Cost(
            price_per_hour=self.price_per_hour,
            run=run,
            per_million_generated=run * MILLION / generated if generated else None,
            per_million_tokens=run * MILLION / tokens if tokens else None,
        )

    def to_json(self) -> dict[str, Any]:
        """The figures as JSON values; later versions only add keys.

        Besides attributes by their names there are `output` (a path; null where `output_path` is None),
        `complete`, `read` and `hit_rate`, of the whole file. `run` holds the attributes and properties of
        `RunFigures`, `started` as a date of ISO 8601. `cost` is null, or holds the attributes of `Cost`.
        `timeline` has a list for each attribute of `Sample`, all of the same length; those of states only where
        the model keeps some.
        """
        run, cost = self.run, self.cost
        return {
            "output": None if self.output_path is None else str(self.output_path),
            "complete": self.is_complete,
            "read": self.is_read,
            "requests": self.requests,
            "written": self.written,
            "kept": self.kept,
            "errors": self.errors,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "hit_rate": self.hit_rate,
            "run": {
                **vars(run),
                "started": datetime.fromtimestamp(run.started, timezone.utc).isoformat(timespec="seconds"),
                "hit_rate": run.hit_rate,
                "idle_seconds": run.idle_seconds,
                "tokens_per_second": run.tokens_per_second,
                "products": [*run.products],
                "replicas": [*run.replicas],
                "balance": run.balance if run.replicas else None,
            },
            "cost": None if cost is None else dict(vars(cost)),
            "timeline": columns(self.timeline),
        }


def file_figures(report: BatchReport) -> dict[str, str]:
    """Names and values of the whole file's figures, in reading order."""
    kept = f" ({report.kept:,} from earlier runs)" if report.kept else ""
    written = "" if report.is_complete else f"{report.written:,} of "
    so_far = "" if report.is_read else " read so far"
    return {
        "requests": f"{written}{report.requests:,}{so_far}{kept}",
        "errors": f"{report.errors:,}",
        "prompt tokens": f"{report.prompt_tokens:,}",
        "cached tokens": f"{report.cached_tokens:,}",
        "hit rate": f"{report.hit_rate:.2%}" + ("" if report.kept else _bounds(report.run)),
        **({} if report.kept else _computed_again(report.run)),
        "generated tokens": f"{report.completion_tokens:,}",
    }


def run_figures(run: RunFigures) -> dict[str, str]:
    """Names and values of this run's figures."""
    return {
        "answered": f"{run.answered:,} requests",
        "prompt tokens": f"{run.prompt_tokens:,}",
        "cached tokens": f"{run.cached_tokens:,}",
        "hit rate": f"{run.hit_rate:.2%}{_bounds(run)}",
        **_computed_again(run),
        "generated tokens": f"{run.completion_tokens:,}",
    }


def time_figures(report: BatchReport) -> dict[str, str]:
    """Names and values of this run's time and cost."""
    run, cost = report.run, report.cost
    parts = ", ".join(f"{name} {duration(value)}" for name, value in seconds_by_activity(run).items())
    passes = f"{run.passes:,} passes of at most {counted(run.most_running, 'request')}"
    seconds = f"{run.seconds:.1f} s" if run.seconds >= 1 else duration(run.seconds)
    figures = {
        "time": f"{seconds} ({passes}, {run.tokens_per_second:,.0f} generated tokens/s)",
        "time spent": f"{parts}; {duration(run.scheduling_seconds)} of the host's in scheduling",
    }
    if run.replicas:
        figures["replicas"] = f"{len(run.replicas)}, which end at {run.balance:.1%} of the last one on average"
        if run.repeated_tokens is not None:
            figures["replicas"] += f"; {counted(run.repeated_tokens, 'token')} planned to be computed twice"
    for number, replica in enumerate(run.replicas):
        figures[f"replica {number}"] = _replica(replica)
    if run.products:
        figures["products"] = _products(run)
    if cost is not None:
        figures["cost"] = f"{money(cost.run)} at {money(cost.price_per_hour)} an hour"
        if cost.per_million_tokens is not None:
            figures["per 1M tokens"] = money(cost.per_million_tokens)
        if cost.per_million_generated is not None:
            figures["per 1M generated"] = money(cost.per_million_generated)
    return figures


def seconds_by_activity(run: RunFigures) -> dict[str, float]:
    """Seconds of a run by the device's activity."""
    return {"prefill": run.prefill_seconds, "decode": run.decode_seconds, "idle": run.idle_seconds}


def money(amount: float) -> str:
    """An amount with two decimals, or with two significant digits if it is small."""
    return f"{amount:,.2f}" if amount >= 0.1 or not amount else f"{amount:.2g}"


def print_report(report: BatchReport, console: Console, **more: str) -> None:
    """Print the figures as a small table, followed by those of `more`."""
    rows = file_figures(report)
    if report.kept and report.run.answered:
        own = run_figures(report.run)
        rows["this run"] = (
            f"{own['answered']}, {own['prompt tokens']} prompt tokens, {own['generated tokens']} generated tokens"
        )
        rows["its hit rate"] = own["hit rate"]
        rows |= _computed_again(report.run)
    rows |= time_figures(report) | {name.replace("_", " "): text for name, text in more.items()}
    for name, text in rows.items():
        console.print(Text.assemble((f"{name:<18}", "dim"), text), soft_wrap=True)


def bounds(run: RunFigures) -> str:
    """The best possible and the predicted hit rate of a run in words; "" without prompts."""
    if run.best_hit_rate is None:
        return ""
    predicted = "" if run.predicted_hit_rate is None else f", predicted {run.predicted_hit_rate:.2%}"
    return f"best possible {run.best_hit_rate:.2%}{predicted}"


def _bounds(run: RunFigures) -> str:
    text = bounds(run)
    return f" ({text})" if text else ""


def _computed_again(run: RunFigures) -> dict[str, str]:
    """What retractions and a lack of states cost; nothing if there were none."""
    counts = {
        "computed again": (run.recomputed_tokens, "for lack of memory"),
        "lacked a state": (run.stateless_tokens or 0, "computed again though their KV was cached"),
    }
    return {
        name: f"{count:,} tokens ({_ratio(count, run.prompt_tokens):.2%} of the prompts'), {why}"
        for name, (count, why) in counts.items()
        if count
    }


def _products(run: RunFigures) -> str:
    replaced = sum(bool(table["ordered"]) for table in run.products)
    where = f"replaced at some of them in {replaced}" if replaced else "kept in all"
    return f"the same bits at all sizes of a pass; torch's own are {where} of {len(run.products)} shapes"


def _replica(figures: Mapping[str, Any]) -> str:
    hits = _ratio(figures["cached_tokens"], figures["prompt_tokens"])
    restarts = f", started again {counted(figures['restarts'], 'time')}" if figures["restarts"] else ""
    seconds = f"{figures['seconds']:.1f} s ({duration(figures['busy_seconds'])} in passes)"
    requests = counted(figures["requests"], "request")
    return f"{requests} in {seconds}, hit rate {hits:.2%}, {figures['device']}{restarts}"


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
