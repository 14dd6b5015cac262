"""What the first rank tells the others of a pass, as messages and back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memory_pool.kv_transfers import KVTransfer
from memory_pool.req_to_token_pool import RowChanges
from radixrt.arrays import Int32Array
from radixrt.schedule.passes import Features, Pass, SamplingInputs
from radixrt.workers.channel import Message

Array = NDArray[Any]

_CHANGES = tuple(field.name for field in fields(RowChanges))
_ARRAYS = tuple(field.name for field in fields(Pass) if field.type == "Int32Array")
_STATES = tuple(field.name for field in fields(Pass) if field.type == "Int32Array | None")  # there may be none
_NUMBERS = tuple(field.name for field in fields(Pass) if field.type == "int")


class PassWriter:
    """Writes passes: the rows of those that decode the same requests as one of the last `num_lanes` passes are
    sent once.
    """

    def __init__(self, num_lanes: int = 1) -> None:
        self._rows: deque[Int32Array] = deque(maxlen=num_lanes)  # of the last passes

    def message(self, pass_: Pass) -> Message:
        """A pass as it is sent."""
        sampling, own = pass_.sampling, pass_.req_pool_indices
        same = next((place for place, rows in enumerate(self._rows) if rows is own), None)
        self._rows.append(own)
        arrays: dict[str, Array] = {name: getattr(pass_, name) for name in _ARRAYS}
        if same is not None:
            del arrays["req_pool_indices"]
        arrays |= {name: array for name in _STATES if (array := getattr(pass_, name)) is not None}
        arrays |= {f"changes.{name}": getattr(pass_.row_changes, name) for name in _CHANGES}
        arrays |= {f"draws.{name}": array for name, array in sampling.arrays.items()}
        arrays["logits_rows"] = sampling.logits_rows
        if sampling.masked is not None:
            arrays["masked"] = sampling.masked
        body = {
            **{name: int(getattr(pass_, name)) for name in _NUMBERS},
            "features": astuple(sampling.features),
            "processed": None if sampling.processed is None else astuple(sampling.processed),
            "num_top": sampling.num_top,
            "same_rows": same,
        }
        return _with_arrays({"launch": body}, arrays)


class PassReader:
    """Reads what a PassWriter has written, in the same order."""

    def __init__(self, num_lanes: int = 1) -> None:
        self._rows: deque[Int32Array] = deque(maxlen=num_lanes)

    def pass_of(self, message: Message) -> Pass:
        """The pass; `req_pool_indices` is the same array where it was."""
        body, arrays = message.body["launch"], _arrays_of(message)
        if body["same_rows"] is not None:
            arrays["req_pool_indices"] = self._rows[body["same_rows"]]
        self._rows.append(arrays["req_pool_indices"])
        processed = body["processed"]
        own: dict[str, Any] = {name: arrays[name] for name in _ARRAYS} | {name: body[name] for name in _NUMBERS}
        own |= {name: arrays.get(name) for name in _STATES}
        return Pass(
            **own,
            row_changes=RowChanges(**_part(arrays, "changes.")),
            sampling=SamplingInputs(
                arrays["logits_rows"],
                Features(*body["features"]),
                None if processed is None else Features(*processed),
                body["num_top"],
                _part(arrays, "draws."),
                arrays.get("masked"),
            ),
        )


def transfers_message(transfers: Iterable[KVTransfer]) -> Message:
    """Transfers between the tiers, in order."""
    arrays: dict[str, Array] = {}
    kinds = []
    for nth, transfer in enumerate(transfers):
        kinds.append([transfer.to_host, transfer.of_states])
        arrays |= {f"source{nth}": transfer.sources, f"target{nth}": transfer.targets}
    return _with_arrays({"transfer": kinds}, arrays)


def transfers_of(message: Message) -> deque[KVTransfer]:
    """These transfers."""
    arrays, kinds = _arrays_of(message), message.body["transfer"]
    return deque(
        KVTransfer(to_host, arrays[f"source{nth}"], arrays[f"target{nth}"], of_states)
        for nth, (to_host, of_states) in enumerate(kinds)
    )


@dataclass(frozen=True)
class RankIdentity:
    """What a rank's part of the KV depends on.

    Attributes:
        checksums: by the names of parameters, as `rank_checksums` gives them.
        place: of the part in the KV: its first layer and the one after its last, and heads likewise.
        scales: float32, as `TokenToKVPool.scales`, of its layers and heads, if the KV has any.
    """

    checksums: dict[str, int]
    place: tuple[int, int, int, int]
    scales: Array | None


def identity_message(asked: int, identity: RankIdentity) -> Message:
    """The answer of a rank that is asked for it."""
    names, sums = list(identity.checksums), list(identity.checksums.values())
    arrays: dict[str, Array] = {"checksums": np.array(sums, np.int64)}
    if identity.scales is not None:
        arrays["scales"] = identity.scales
    return _with_arrays({"answers": asked, "parameters": names, "place": identity.place}, arrays)


def identity_of(message: Message) -> RankIdentity:
    """What the message says."""
    arrays, body = _arrays_of(message), message.body
    checksums = dict(zip(body["parameters"], arrays["checksums"].tolist(), strict=True))
    first_layer, end_layer, first_head, end_head = body["place"]
    return RankIdentity(checksums, (first_layer, end_layer, first_head, end_head), arrays.get("scales"))


def _with_arrays(body: dict[str, Any], arrays: Mapping[str, Array]) -> Message:
    """A message that has arrays of numbers of any kind, each in whole words."""
    told = [[name, array.dtype.str, *array.shape] for name, array in arrays.items()]
    return Message({**body, "arrays": told}, np.concatenate([_EMPTY, *map(_words, arrays.values())]))


_EMPTY = np.zeros(0, np.int32)


def _words(array: Array) -> Int32Array:
    whole = -(-array.nbytes // 4) * 4
    return np.frombuffer(array.tobytes().ljust(whole, b"\0"), np.int32)


def _arrays_of(message: Message) -> dict[str, Array]:
    return dict(_read(message.body["arrays"], message.numbers))


def _read(told: Sequence[Sequence[Any]], words: Int32Array) -> Iterator[tuple[str, Array]]:
    begin = 0
    for name, dtype, *shape in told:
        num_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        end = begin + -(-num_bytes // 4)
        # A copy: arrays of 8 bytes want their own alignment.
        yield name, words[begin:end].copy().view(np.uint8)[:num_bytes].view(dtype).reshape(shape)
        begin = end


def _part(arrays: Mapping[str, Array], prefix: str) -> dict[str, Array]:
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
