"""The command `radixrt`, with passes that never end."""

from __future__ import annotations

import sys
import threading
from typing import Any

from radixrt.cli import main
from radixrt.engine.engine import Engine


def hang(*_: Any) -> None:
    threading.Event().wait()


if __name__ == "__main__":
    Engine.step = hang  # type: ignore[method-assign, assignment]
    sys.exit(main())
