"""How many processors this process may use."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def usable_cpus(root: Path = Path("/")) -> int:
    """Those of its affinity, at most the quotas of its control groups, at least 1. `root` is for tests."""
    has_affinity = hasattr(os, "sched_getaffinity")  # on Linux
    count = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, min([count, *map(math.ceil, _quotas(root))]))


def _quotas(root: Path) -> Iterator[float]:
    """Processors that each control group of this process may use, where it has a quota: of versions 1 and 2."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:  # another system
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        own = PurePosixPath(path)
        for place in (own, *own.parents):
            folder = root / "sys/fs/cgroup" / ("cpu" if controllers else "") / place.relative_to("/")
            # No file: the group is not seen from here, or has no quota.
            with contextlib.suppress(OSError, ValueError):  # ValueError: "max", without a quota
                if controllers:
                    quota, period = (
                        int((folder / f"cpu.cfs_{name}_us").read_text(encoding="ascii"))
                        for name in ("quota", "period")
                    )
                else:
                    quota, period = map(int, (folder / "cpu.max").read_text(encoding="ascii").split())
                if quota > 0:
                    yield quota / period
