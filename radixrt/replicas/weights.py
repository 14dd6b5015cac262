"""Other weights for all replicas of a group."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from radixrt.engine.signals import deferred
from radixrt.errors import RadixrtError
from radixrt.replicas.replica import Replica

if TYPE_CHECKING:
    from torch import Tensor

    from radixrt.models.weight_files import WeightSource


class GroupWeights:
    """Which weights the replicas of a group have. Those in memory go to them in a file, which stays as long as a
    process in a lost one's place may need it.

    Attributes:
        are_loading: `settle` is to be called once all replicas are ready, or gone.
    """

    def __init__(self) -> None:
        self.are_loading = False
        self._source: str | None = None  # of those that all have; None: the model's
        self._next: str | None = None  # of those that they load
        self._folders: dict[str, TemporaryDirectory[str]] = {}  # by what is in them

    def load(self, source: WeightSource, lanes: Sequence[Replica]) -> None:
        """Let all replicas load weights. Raises ModelError where these are none, or OSError where tensors find no
        room in the folder for temporary files.
        """
        from radixrt.models.weight_files import check_source  # torch

        check_source(source)
        if isinstance(source, Mapping):
            self._next = self._written(source)
        else:
            self._next = str(Path(source).resolve() if os.path.exists(source) else source)
        with deferred():  # all are told, or none
            self.are_loading = True
            for lane in lanes:
                if not lane.is_gone:
                    lane.load(self._next)

    def settle(self, lanes: Sequence[Replica]) -> RadixrtError | None:
        """Let all have the same. Replicas that could not load what others have are started anew, and load it then.

        Returns the error if none could load them: they are as `Runtime.update_weights` leaves them.
        """
        present = [lane for lane in lanes if not lane.is_gone]
        failed = [(lane, lane.error) for lane in present if lane.error is not None]
        error = None
        with deferred():  # all have the same, or `settle` is to be called again
            self.are_loading = False
            if len(failed) < len(present):
                self._source = self._next
                for lane, own in failed:
                    lane.renew(f"it could not load other weights: {own}")
            elif failed:
                error = failed[0][1]
                for lane in present:
                    lane.weights, lane.error = self._source, None
            for path in self._folders.keys() - {self._source}:
                self._folders.pop(path).cleanup()
        return error

    def close(self) -> None:
        """Remove files."""
        while self._folders:
            self._folders.popitem()[1].cleanup()

    def _written(self, tensors: Mapping[str, Tensor]) -> str:
        from radixrt.models.weight_files import WeightTensors  # torch

        weights, folder = WeightTensors(tensors), TemporaryDirectory(prefix="radixrt-weights-")
        path = os.path.join(folder.name, "weights.safetensors")
        try:
            weights.write(Path(path))
        except BaseException:  # such as a full disk
            folder.cleanup()
            raise
        self._folders[path] = folder
        return path
