"""A replica's process around a simulated Runtime, without torch: slow, so that it can be killed in its work."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from radixrt.replicas.worker import main
from radixrt.runtime import Runtime
from radixrt.schedule.booking import Booking
from tests.support.runtimes import simulated_runtime


def made(options: dict[str, Any]) -> Runtime:
    runtime = simulated_runtime()
    seconds = float(os.environ.get("STEP_SECONDS", "0"))
    runtime.hooks.on_step = lambda: time.sleep(seconds)
    killing = set(map(int, os.environ.get("KILLING_LINES", "").split()))

    def kill(booking: Booking) -> None:
        if any(answer.request.index in killing for answer in booking.answers):
            os.kill(os.getpid(), signal.SIGKILL)

    runtime.hooks.launch_fault = kill
    return runtime


if __name__ == "__main__":
    main(made)
