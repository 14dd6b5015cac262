"""The command `radixrt`, with passes that never end, and less patience with these."""

from __future__ import annotations

import sys
import threading
from typing import Any

from radixrt.cli import main
from radixrt.engine.engine import Engine
from radixrt.server import run


def hang(*_: Any) -> None:
    threading.Event().wait()


if __name__ == "__main__":
    Engine.step = hang  # type: ignore[method-assign, assignment]
    run.HANG_SECONDS = 1
    sys.exit(main())
