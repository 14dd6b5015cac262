"""`RankGroup`: a process's place among ranks, and what they agree on."""

# Tests: tests/ranks/test_ranks.py

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from layers.ranks import ALONE as ALONE_IN_LAYERS
from layers.ranks import Ranks

_HOST = "127.0.0.1"
START_SECONDS = 1800  # that ranks wait for one another while they load


@dataclass(frozen=True)
class RankGroup:
    """A process's place among the ranks of a model; by itself it agrees with itself.

    Attributes:
        ranks: as layers see it.
        control: torch's process group for numbers on the host.
    """

    ranks: Ranks = ALONE_IN_LAYERS
    control: Any = None

    def least(self, number: int) -> int:
        """The least of the numbers that the ranks give."""
        if self.control is None:
            return number
        told = torch.tensor([number], dtype=torch.int64, device="cpu")
        options = c10d.AllreduceOptions()
        options.reduceOp = c10d.ReduceOp.MIN  # type: ignore[assignment]
        self.control.allreduce([told], options).wait()
        return int(told.item())

    def abort(self) -> None:
        """End what waits for ranks that have gone, from another thread."""
        group = self.ranks.group
        if group is not None and hasattr(group, "abort"):
            group.abort()


ALONE = RankGroup()


def waiting_store(size: int) -> Any:
    """Where ranks of this host find one another: a TCPStore; `port` tells where it is."""
    listening = socket.create_server((_HOST, 0), backlog=size + 8)  # by itself it would listen to the network, too
    port = listening.getsockname()[1]
    return _store(port, size, is_master=True, master_listen_fd=listening.detach(), use_libuv=True)


def store_at(port: int, size: int) -> Any:
    """The store that another rank has made."""
    return _store(port, size, is_master=False)


def _store(port: int, size: int, **options: Any) -> Any:
    timeout = timedelta(seconds=START_SECONDS)
    return torch.distributed.TCPStore(  # type: ignore[attr-defined]
        _HOST, port, size, timeout=timeout, wait_for_workers=False, **options
    )


def _gloo(store: Any, name: str, rank: int, size: int) -> Any:
    options: Any = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=_HOST)]
    options._timeout = timedelta(seconds=START_SECONDS)
    return c10d.ProcessGroupGloo(c10d.PrefixStore(name, store), rank, size, options)


def joined(store: Any, rank: int, size: int, device: torch.device) -> RankGroup:
    """The group of all ranks; waits for the others. No group of torch's own is made for the process: it may have
    several Runtimes.
    """
    control = _gloo(store, "control", rank, size)
    if device.type != "cuda":
        return RankGroup(Ranks(rank, size, _gloo(store, "layers", rank, size)), control)
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=START_SECONDS)
    ranks = Ranks(rank, size, c10d.ProcessGroupNCCL(c10d.PrefixStore("layers", store), rank, size, options))
    ranks.summed(torch.zeros(1, device=device))  # connections are made by the first sum
    torch.cuda.synchronize(device)
    return RankGroup(ranks, control)
