"""How many characters two texts begin with alike.

The process that renders chat templates loads this file by itself: it imports nothing of radixrt.
"""

from __future__ import annotations


def common_length(one: str, other: str) -> int:
    """Characters that two texts begin with alike, by halves: slices are compared at the speed of memory."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
