"""`RankGroup`: a process's place among ranks, and what they agree on."""

# Tests: tests/ranks/test_ranks.py, tests/ranks/test_stages.py

from __future__ import annotations

import logging
import socket
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from layers.ranks import ALONE as ALONE_IN_LAYERS
from layers.ranks import Ranks
from layers.stages import WHOLE, Link, Stage, TokenReceiver, TokenSender
from radixrt.ranks.shared_memory import reaches_all, shared_memory
from triton_ops.implementation import Impl, runs_triton
from triton_ops.ranks.peer_sum import TWO_SHOTS_ABOVE, PeerMemory, PeerSum

_HOST = "127.0.0.1"
ABORT_SECONDS = 10.0
START_SECONDS = 1800  # that ranks wait for one another while they load
_CHECK_PATIENCE = 10_000_000  # attempts, of about a microsecond

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shape:
    """`size` ranks in `num_stages` stages of equally many. They are counted from the last stage on: so rank 0,
    which plans, is in that one, draws, and needs to be told nothing.
    """

    size: int = 1
    num_stages: int = 1

    @property
    def stage_size(self) -> int:
        return self.size // self.num_stages

    def stage_of(self, rank: int) -> int:
        return self.num_stages - 1 - rank // self.stage_size


@dataclass(frozen=True)
class RankGroup:
    """A process's place among the ranks of a model; by itself it agrees with itself.

    Attributes:
        ranks: those that hold its stage together, as layers see them.
        stage: as the executor sees it.
        shape: of all ranks.
        control: torch's process group of all ranks, for numbers on the host.
        groups: all of torch's process groups on the device.
    """

    ranks: Ranks = ALONE_IN_LAYERS
    stage: Stage = WHOLE
    shape: Shape = Shape()
    control: Any = None
    groups: tuple[Any, ...] = ()

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
        """End what waits for ranks that have gone, from another thread. All groups at once: one that is aborted
        waits for the device, and what runs there may wait for another group, or for parts of ranks that have gone.
        """
        if self.ranks.peers is not None:
            try:
                self.ranks.peers.release()
            except RuntimeError as error:  # the device is lost, and with it all that waits there
                _log.info("sums that wait cannot be released: %s", error)
        threads = [
            threading.Thread(target=group.abort, name="radixrt-abort", daemon=True)
            for group in self.groups
            if hasattr(group, "abort")
        ]
        for thread in threads:
            thread.start()
        ends = time.monotonic() + ABORT_SECONDS
        for thread in threads:
            thread.join(max(0.0, ends - time.monotonic()))


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


def joined(store: Any, rank: int, shape: Shape, device: torch.device, impl: Impl = "auto") -> RankGroup:
    """The group of all ranks; waits for the others. Sums are by a kernel where `impl` runs kernels. No group of
    torch's own is made for the process: it may have several Runtimes.
    """
    control = _gloo(store, "control", rank, shape.size)
    make = _nccl if device.type == "cuda" else _gloo
    groups: list[Any] = []

    def group(name: str, own: int, size: int) -> Any:
        groups.append(make(store, name, own, size))
        return groups[-1]

    stage, place = shape.stage_of(rank), rank % shape.stage_size
    ranks = ALONE_IN_LAYERS
    if shape.num_stages == 1 or shape.stage_size > 1:
        ranks = Ranks(place, shape.stage_size, group(f"layers {stage}", place, shape.stage_size))
    own = _stage(group, stage, place, shape.num_stages)
    if device.type == "cuda":
        _connect(ranks, own, device)
    group_of_all = RankGroup(ranks, own, shape, control, tuple(groups))
    if device.type != "cuda" or not runs_triton(impl, device):
        return group_of_all
    return _with_peers(group_of_all, store, device)


def _with_peers(group: RankGroup, store: Any, device: torch.device) -> RankGroup:
    """The group, with sums by a kernel of ours if all ranks reach the memory of those in their stage, and what it
    adds there is right.
    """
    ranks = group.ranks
    reaches = reaches_all(ranks.rank, ranks.size, device)
    if not group.least(int(reaches)) or ranks.is_alone:
        return group
    own = c10d.PrefixStore(f"stage {group.stage.index}", store)
    memory = shared_memory(own, ranks.rank, ranks.size, device)
    _adds(memory, 1.0, patience=0)  # loads the kernels, which takes each rank another time
    memory.counters[2] = 0
    group.least(1)  # all have
    adds = [_adds(memory, value, _CHECK_PATIENCE) for value in (1.0, 2.0)]
    if not group.least(int(all(adds))):
        _log.warning("the cards reach each other's memory, but sums there are wrong: NCCL makes them")
        return group
    return replace(group, ranks=replace(ranks, peers=PeerSum(memory)))


def _adds(memory: PeerMemory, value: float, patience: int) -> bool:
    """Whether sums in one shot and in two, of the largest parts, are right, where those of rank r are
    `(r + 1) * value`. Two sums: without patience a rank may write no more before the others begin.
    """
    peers, size = PeerSum(memory, patience, traps=False), len(memory.data)
    are_right = True
    for num_bytes in (min(TWO_SHOTS_ABOVE, peers.num_bytes), peers.num_bytes):
        part = torch.full((num_bytes // 4,), (memory.rank + 1) * value, device=memory.counters.device)
        are_right &= bool((peers(part) == value * size * (size + 1) / 2).all())
    return are_right and not peers.has_given_up


def _nccl(store: Any, name: str, rank: int, size: int) -> Any:
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=START_SECONDS)
    return c10d.ProcessGroupNCCL(c10d.PrefixStore(name, store), rank, size, options)


def _stage(group: Callable[[str, int, int], Any], index: int, place: int, count: int) -> Stage:
    """A rank's links to those of the same place in other stages. Each is a group of its own, and on a GPU has a
    stream of its own: tokens that go back must not wait for hidden states, some of which wait for them.
    """
    if count == 1:
        return WHOLE
    before = after = sender = receiver = None
    depth = 2 * count + 2  # more passes than are ever in flight
    if index > 0:
        before = Link(group(f"hidden {index - 1} {place}", 1, 2))
    if index < count - 1:
        after = Link(group(f"hidden {index} {place}", 0, 2))
    if index == count - 1:
        sender = TokenSender(Link(group(f"tokens {place}", 0, 2)), depth)
    if index == 0:
        receiver = TokenReceiver(Link(group(f"tokens {place}", 1, 2)), depth)
    return Stage(index, count, before, after, sender, receiver)


def _connect(ranks: Ranks, stage: Stage, device: torch.device) -> None:
    """Let connections be made, by the first sum and by what is sent first, before passes wait for one another."""
    number = torch.zeros(1, device=device)
    ranks.summed(number)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*unbatched P2P")  # each group is of two ranks, one way
        if stage.before is not None:
            stage.before.receive(number)
        if stage.after is not None:
            stage.after.send(number)
        if stage.sender is not None:
            stage.sender.send(number)
        if stage.receiver is not None:
            stage.receiver.take(stage.receiver.expect(number), number)
    torch.cuda.synchronize(device)
