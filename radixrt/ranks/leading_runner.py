"""`LeadingRunner`: the first rank's runner, which tells the other ranks what it computes."""

# Tests: tests/ranks/test_ranks.py, tests/ranks/test_stages.py

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass

from memory_pool.kv_transfers import KVTransfer
from memory_pool.req_to_token_pool import ReqToTokenPool
from radixrt.arrays import Int32Array
from radixrt.errors import DeviceLostError
from radixrt.execution.model_runner import ModelRunner
from radixrt.ranks.followers import Followers
from radixrt.ranks.messages import PassWriter, transfers_message
from radixrt.schedule.passes import Pass, PassResult
from radixrt.workers.channel import Message

COMPARE_EVERY = 64  # passes


@dataclass(eq=False)
class _Launch:
    """A pass that the others have been told of, and this rank's handle of it once it has launched its part."""

    pass_: Pass
    handle: object = None


class LeadingRunner:
    """A `Runner`. All ranks compute the same passes in the same order, each with its part of the weights, and
    those of the last stage, which the first rank is in, draw the same tokens: nothing comes back from the others.
    Whatever fails on one of them ends all.

    On a CPU, where launching computes, the first rank does its part of a pass when the pass is collected, or masks
    come for it: the stages before work on the passes after it by then. `own_rows` is the table that it computes
    with then, as far as these passes have come; None: the scheduler's, on a GPU and where there are no stages.
    """

    def __init__(self, own: ModelRunner, followers: Followers, own_rows: ReqToTokenPool | None = None) -> None:
        self._own, self._followers, self._own_rows = own, followers, own_rows
        self._writer, self._num_launched = PassWriter(own.model.stage.count), 0
        self._waiting: deque[_Launch] = deque()  # for this rank's part

    def transfer(self, transfers: deque[KVTransfer]) -> None:
        """See `Runner`; but one that fails here ends all: others have made it, and nobody may do so twice."""
        self._tell(transfers_message(transfers))
        try:
            self._own.transfer(transfers)
        except Exception as error:
            raise DeviceLostError(self._followers.why_lost(error)) from error

    def prepare(self, pass_: Pass) -> None:
        """See `Runner`."""
        if self._own_rows is None:
            self._own.prepare(pass_)

    def launch(self, pass_: Pass) -> object:
        """See `Runner`."""
        self._tell(self._writer.message(pass_))
        launch = _Launch(pass_)
        self._waiting.append(launch)
        if self._own_rows is None:
            self._compute_until(launch)
        return launch

    def _tell(self, message: Message) -> None:
        """A rank that reads nothing more may wait for tokens of passes that wait here."""
        self._followers.send(message, meanwhile=self._compute_next)

    def _compute_until(self, last: _Launch) -> None:
        """Launch this rank's part of all that waits, up to `last`."""
        while last.handle is None:
            self._compute_next()

    def _compute_next(self) -> bool:
        """Launch this rank's part of the next pass that waits, if one does."""
        if not self._waiting:
            return False
        launch = self._waiting.popleft()
        changes = launch.pass_.row_changes
        if self._own_rows is not None:
            self._own_rows.req_to_token[changes.rows, changes.positions] = changes.slots
        launch.handle = self._own.launch(launch.pass_)
        if self._num_launched % COMPARE_EVERY == 0:
            self._followers.compare(0, self._num_launched, digest_of(self._own))
        self._num_launched += 1
        return True

    def mask_memory(self, num_masks: int, num_words: int) -> Int32Array:
        """See `Runner`."""
        return self._own.mask_memory(num_masks, num_words)

    def draw_masked(self, handle: object, masks: Int32Array) -> None:
        """See `Runner`."""
        assert isinstance(handle, _Launch)
        self._followers.send(Message({"masks": masks.shape}, masks.reshape(-1)), draws=True)
        self._compute_until(handle)
        self._own.draw_masked(handle.handle, masks)

    def collect(self, handle: object) -> PassResult:
        """See `Runner`."""
        assert isinstance(handle, _Launch)
        with self._followers.waited_for():
            self._compute_until(handle)
            result = self._own.collect(handle.handle)
        self._followers.check()
        return result

    def check_device(self, error: Exception) -> None:
        """See `Runner`: the others have begun what has failed here, or the other way round."""
        raise DeviceLostError(self._followers.why_lost(error)) from error


def digest_of(runner: ModelRunner) -> int:
    """Of the words of the pass that was launched last."""
    return zlib.crc32(runner.launched_words.tobytes())
