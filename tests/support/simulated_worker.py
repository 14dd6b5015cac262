"""A replica's process around a simulated Runtime, without torch: slow, so that it can be killed in its work."""

from __future__ import annotations

import os
import time
from typing import Any

from radixrt.replicas.worker import main
from radixrt.runtime import Runtime
from tests.support.runtimes import simulated_runtime


def made(options: dict[str, Any]) -> Runtime:
    runtime = simulated_runtime()
    seconds = float(os.environ.get("STEP_SECONDS", "0"))
    runtime.hooks.on_step = lambda: time.sleep(seconds)
    return runtime


if __name__ == "__main__":
    main(made)
