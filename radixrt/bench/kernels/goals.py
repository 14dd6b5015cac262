"""Goals of the kernels, and published times of others, on an NVIDIA H200 in bf16."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from radixrt.bench.kernels.roofline import Machine, Work

CARD = "NVIDIA H200"
"""Goals in seconds and published times hold for cards whose name begins with this."""


@dataclass(frozen=True)
class Goal:
    """Limits that a time has to meet together.

    Attributes:
        bandwidth_share: of a copy's bandwidth, 0 to 1, at least; on any card.
        link_share: of the link's bandwidth, likewise, for what crosses it.
        seconds: at most.
        floor_seconds: at most, if the goal is missed.
        stretch_seconds: what would be better still.
    """

    bandwidth_share: float | None = None
    link_share: float | None = None
    seconds: float | None = None
    floor_seconds: float | None = None
    stretch_seconds: float | None = None

    def limit(self, work: Work, machine: Machine) -> float | None:
        """The goal in seconds; None if it does not apply to this card."""
        limits = []
        if self.bandwidth_share is not None:
            limits.append(work.bytes / (self.bandwidth_share * machine.bandwidth))
        if self.link_share is not None and work.link_seconds(machine) > 0:
            limits.append(work.link_seconds(machine) / self.link_share)
        if self.seconds is not None and machine.name.startswith(CARD):
            limits.append(self.seconds)
        return min(limits, default=None)

    def verdict(self, seconds: float, work: Work, machine: Machine) -> str:
        """ "stretch", "yes", "floor" or "no"; "" where `limit` is None."""
        limit = self.limit(work, machine)
        if limit is None:
            return ""
        on_card = machine.name.startswith(CARD)
        if seconds <= limit:
            stretch = self.stretch_seconds
            return "stretch" if on_card and stretch is not None and seconds <= stretch else "yes"
        floor = self.floor_seconds
        return "floor" if on_card and floor is not None and seconds <= floor else "no"


_FLASHINFER = "FlashInfer 0.6.18"
_FA2, _FA3 = f"{_FLASHINFER} FA2", f"{_FLASHINFER} FA3"
_FLAT, _CASCADE = f"{_FLASHINFER} flat", f"{_FLASHINFER} cascade"
_SDPA_FA2, _SDPA_CUDNN = "SDPA FlashAttention-2", "SDPA cuDNN"

PUBLISHED = {
    ("decode", "B=1 L=8192"): {_FLASHINFER: 24.4e-6},
    ("decode", "B=64 L=2048"): {_FLASHINFER: 144e-6},
    ("decode", "B=256 L=1024"): {_FLASHINFER: 283e-6},
    ("decode", "B=256 L=8192"): {_FLASHINFER: 1975e-6},
    ("tree", "B=256 8192+128"): {_FLAT: 1083e-6, _CASCADE: 432e-6},
    ("tree", "B=256 2048+128"): {_FLAT: 310e-6, _CASCADE: 347e-6},
    ("tree", "B=256 32768+256"): {_FLAT: 4396e-6, _CASCADE: 869e-6},
    ("tree", "B=64 8192+128"): {_FLAT: 277e-6, _CASCADE: 214e-6},
    ("extend", "B=1 0+8192"): {_FA2: 1.81e-3, _FA3: 1.08e-3},
    ("extend", "B=8 0+2048"): {_FA2: 0.96e-3, _FA3: 0.67e-3},
    ("extend", "B=32 1024+128"): {_FA2: 0.266e-3, _FA3: 0.184e-3},
    ("extend", "B=8 4096+512"): {_FA2: 0.917e-3, _FA3: 0.614e-3},
    ("extend", "B=4 0+4096 H=48/48 D=32"): {_SDPA_FA2: 1.054e-3, _SDPA_CUDNN: 0.933e-3},
    ("extend", "B=4 0+4096 H=48/48 D=64"): {_SDPA_FA2: 1.419e-3, _SDPA_CUDNN: 0.965e-3},
    ("extend", "B=4 0+4096 H=32/32"): {_SDPA_FA2: 1.718e-3, _SDPA_CUDNN: 1.036e-3},
    ("extend", "B=1 0+16384 H=32/32"): {_SDPA_FA2: 6.59e-3, _SDPA_CUDNN: 3.83e-3},
}
"""Seconds of other implementations by `triton.testing.do_bench`, eager, with L2 flushed: by the group and shape of
a case, and by name."""


def _decode(shape: str, share: float | None = 0.9, seconds: float | None = None) -> Goal:
    """Never slower than FlashInfer; the floor is 1.15 times its time."""
    theirs = PUBLISHED["decode", shape][_FLASHINFER]
    return Goal(bandwidth_share=share, seconds=seconds or theirs, floor_seconds=1.15 * theirs)


def _tree(shape: str, seconds: float) -> Goal:
    """The floor is the better of FlashInfer's times."""
    return Goal(seconds=seconds, floor_seconds=min(PUBLISHED["tree", shape].values()))


def _extend(shape: str) -> Goal:
    """85 % of FlashAttention-3's speed."""
    theirs = PUBLISHED["extend", shape]
    return Goal(seconds=theirs[_FA3] / 0.85, floor_seconds=theirs[_FA2], stretch_seconds=theirs[_FA3])


GOALS = {
    ("decode", "B=1 L=8192"): _decode("B=1 L=8192", share=None, seconds=22e-6),
    **{("decode", shape): _decode(shape) for shape in ("B=64 L=2048", "B=256 L=1024", "B=256 L=8192")},
    **{
        ("tree", shape): _tree(shape, seconds)
        for shape, seconds in (
            ("B=256 8192+128", 125e-6),
            ("B=256 2048+128", 75e-6),
            ("B=256 32768+256", 380e-6),
            ("B=64 8192+128", 40e-6),
        )
    },
    **{
        ("extend", shape): _extend(shape)
        for shape in ("B=1 0+8192", "B=8 0+2048", "B=32 1024+128", "B=8 4096+512")
    },
    ("extend", "B=4 0+4096 H=48/48 D=32"): Goal(seconds=1.054e-3),
    # Times of reading the logits once.
    ("sampling", "temperature 512x151936"): Goal(bandwidth_share=1 / 1.3),
    ("sampling", "top_k top_p 512x151936"): Goal(bandwidth_share=1 / 3),
}
# For shapes without a goal of their own.
GROUP_GOALS = {
    # 1.6 times the speed of bf16 KV at 0.9 of a copy's bandwidth, which reads twice the bytes.
    "decode-fp8": Goal(bandwidth_share=0.72),
    "short-extend": Goal(bandwidth_share=0.6),
    "elementwise": Goal(bandwidth_share=0.9),
    "kv_copy": Goal(link_share=0.8),
}


def goal_of(group: str, shape: str) -> Goal | None:
    """The goal of a shape, or else of its group, or None."""
    return GOALS.get((group, shape), GROUP_GOALS.get(group))


def published_times(group: str, shape: str, machine: Machine) -> Mapping[str, float]:
    """The published times of a shape by their names, in seconds, if they were measured on this card."""
    return PUBLISHED.get((group, shape), {}) if machine.name.startswith(CARD) else {}
