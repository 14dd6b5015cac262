"""What is said of a batch that was stopped."""

from __future__ import annotations

from radixrt.engine.signals import Interrupted
from radixrt.report.batch_report import BatchReport


class BatchInterrupted(Interrupted):
    """A batch was stopped by Ctrl-C or SIGTERM.

    Attributes:
        report: the figures up to then.
        signal_number: the signal.
    """

    def __init__(self, report: BatchReport, signal_number: int) -> None:
        super().__init__(f"stopped: {what_is_kept(report)}", signal_number)
        self.report = report


def what_is_kept(report: BatchReport, who: str = "the same command") -> str:
    """How many records there are and where, after a batch that was stopped, and who goes on with them."""
    count = f"{report.written:,} of {report.requests:,} records are"
    if not report.requests:
        return "nothing has run in this call"
    if report.output_path is None:
        return f"{count} in standard output, in input order"
    return f"{count} kept in {report.output_path}; {who} goes on from there"
