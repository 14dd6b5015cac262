"""`Session`: requests of one caller, who books them one by one, beside those of all others."""

# Tests: tests/engine/test_driver.py

from __future__ import annotations

from radixrt.engine.calls import OutputCall
from radixrt.engine.driver import Driver
from radixrt.output import RequestOutput
from radixrt.schedule.request import Request


class Session:
    """One thread uses it. `Runtime.session` opens it; in the end its requests that have not ended are aborted."""

    def __init__(self, driver: Driver, call: OutputCall) -> None:
        self._driver, self._call = driver, call

    @property
    def has_work(self) -> bool:
        """Whether one of its requests has not ended, or its output was not taken."""
        return not self._call.is_over

    def submit(self, *requests: Request, in_order: bool = False) -> None:
        """See `Runtime.submit`."""
        self._driver.submit(requests, self._call, in_order=in_order)

    def outputs(self, seconds: float) -> list[RequestOutput]:
        """Outputs of requests that have ended; waits for one, at most so many seconds and the pass that runs then.

        Raises DeviceLostError, SchedulerError or RadixrtError as `Runtime.check_whole` does.
        """
        return list(self._driver.news(self._call, seconds))
