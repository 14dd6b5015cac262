"""How many characters two texts begin with alike.

The process that renders chat templates loads this file by itself: it imports nothing of radixrt.
"""

from __future__ import annotations


def common_length(one: str, other: str, guess: int = 0) -> int:
    """Characters that two texts begin with alike: slices are compared at the speed of memory, from `guess` on each
    twice as long as the one before, then by halves.
    """
    low, high = 0, min(len(one), len(other))
    if 0 < guess < high and other.startswith(one[:guess]):
        low = guess
    step = 16
    while low + step < high and one[low : low + step] == other[low : low + step]:
        low, step = low + step, 2 * step
    if low + step >= high and one[low:high] == other[low:high]:
        return high
    high = min(high, low + step)
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
