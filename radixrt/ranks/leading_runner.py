"""`LeadingRunner`: the first rank's runner, which tells the other ranks what it computes."""

# Tests: tests/ranks/test_ranks.py

from __future__ import annotations

import zlib
from collections import deque

from memory_pool.kv_transfers import KVTransfer
from radixrt.arrays import Int32Array
from radixrt.errors import DeviceLostError
from radixrt.execution.model_runner import ModelRunner
from radixrt.ranks.followers import Followers
from radixrt.ranks.messages import PassWriter, transfers_message
from radixrt.schedule.passes import Pass, PassResult
from radixrt.workers.channel import Message

COMPARE_EVERY = 64  # passes


class LeadingRunner:
    """A `Runner`. All ranks compute the same passes in the same order, each with its part of the weights, and draw
    the same tokens: nothing comes back from the others. Whatever fails on one of them ends all.
    """

    def __init__(self, own: ModelRunner, followers: Followers) -> None:
        self._own, self._followers = own, followers
        self._writer, self._num_launched = PassWriter(), 0

    def transfer(self, transfers: deque[KVTransfer]) -> None:
        """See `Runner`."""
        self._followers.send(transfers_message(transfers))
        self._own.transfer(transfers)

    def prepare(self, pass_: Pass) -> None:
        """See `Runner`."""
        self._own.prepare(pass_)

    def launch(self, pass_: Pass) -> object:
        """See `Runner`."""
        self._followers.send(self._writer.message(pass_))
        handle = self._own.launch(pass_)
        if self._num_launched % COMPARE_EVERY == 0:
            self._followers.compare(0, self._num_launched, digest_of(self._own))
        self._num_launched += 1
        return handle

    def mask_memory(self, num_masks: int, num_words: int) -> Int32Array:
        """See `Runner`."""
        return self._own.mask_memory(num_masks, num_words)

    def draw_masked(self, handle: object, masks: Int32Array) -> None:
        """See `Runner`."""
        self._followers.send(Message({"masks": masks.shape}, masks.reshape(-1)))
        self._own.draw_masked(handle, masks)

    def collect(self, handle: object) -> PassResult:
        """See `Runner`."""
        with self._followers.waited_for():
            result = self._own.collect(handle)
        self._followers.check()
        return result

    def check_device(self, error: Exception) -> None:
        """See `Runner`: the others have begun what has failed here, or the other way round."""
        raise DeviceLostError(self._followers.why_lost(error)) from error


def digest_of(runner: ModelRunner) -> int:
    """Of the words of the pass that was launched last."""
    return zlib.crc32(runner.launched_words.tobytes())
