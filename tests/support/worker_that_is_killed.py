"""A replica's process around a Runtime that is killed once it has begun certain lines."""

from __future__ import annotations

import os
import signal
from typing import Any

from radixrt.output import RequestOutput
from radixrt.replicas.worker import main
from radixrt.runtime import Runtime
from radixrt.schedule.request import Request


class KilledRuntime(Runtime):
    """Lines in KILLING_LINES, by their index, kill its process with SIGKILL."""

    _killing: tuple[Request, ...] = ()

    def submit(self, *requests: Request, in_order: bool = False) -> None:
        killing = set(map(int, os.environ["KILLING_LINES"].split()))
        self._killing += tuple(each for each in requests if each.index in killing)
        super().submit(*requests, in_order=in_order)

    def step(self) -> list[RequestOutput]:
        outputs = super().step()
        if any(map(self.has_begun, self._killing)):
            os.kill(os.getpid(), signal.SIGKILL)
        return outputs


def made(options: dict[str, Any]) -> Runtime:
    return KilledRuntime(**options)


if __name__ == "__main__":
    main(made)
