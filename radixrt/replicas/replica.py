"""One replica as its group sees it: what it was given, what it has said, and whether it is still there."""

# Tests: tests/replicas/test_group.py

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np

from radixrt.cache.cache_stats import CacheStats
from radixrt.engine.signals import deferred
from radixrt.errors import RadixrtError, ReplicaLostError
from radixrt.limits import RunLimits
from radixrt.output import FinishReason, RequestOutput
from radixrt.replicas.links import Link, Links
from radixrt.replicas.messages import ended_of, output_of, requests_message
from radixrt.sampling_params import SamplingParams
from radixrt.schedule.activity import Activity
from radixrt.schedule.request import Request
from radixrt.workers.channel import Message, error_of

_log = logging.getLogger(__name__)

MAX_RESTARTS = 3  # one after the other, of processes that end before they can answer
MAX_IN_VAIN = 12  # processes, one after the other, that end before they have answered any request
TRIAL = "trial"  # id of the request that shows that a process in another one's place can answer
START_SECONDS = 1800.0  # to load weights and compile
SENT_AT_ONCE = 256  # requests of a message: the first ones begin while the others come
_SIZES = {
    "capacity",
    "free",
    "evictable",
    "locked",
    "private",
    "pending",
    "arriving",
    "host_capacity",
    "host_free",
    "state_capacity",
    "state_free",
    "state_own",
    "state_kept",
    "state_pending",
    "state_ends",
    "state_unused",
    "state_on_host",
    "state_nodes",
}
_NO_STATS = CacheStats(*[0] * 11)


@dataclass(frozen=True)
class ReplicaFigures:
    """What a replica has done of a list.

    Attributes:
        device: its name.
        requests: that have ended there.
        prompt_tokens, cached_tokens, completion_tokens: of these.
        busy_seconds: its device's in passes.
        seconds: until it had ended the last of them, from the beginning of the list.
        restarts: how often it was lost and started again.
    """

    device: str
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    busy_seconds: float = 0.0
    seconds: float = 0.0
    restarts: int = 0

    def to_json(self) -> dict[str, Any]:
        return vars(self).copy()


class Replica:
    """A `Lane` of a group.

    Args:
        number: of the replica.
        links: starts it.
        hang_seconds: it counts as lost if it has requests and has ended no pass for so long.
        clock: seconds.

    Attributes:
        refusal: the error of a Runtime that could not be made.
        weights: the source of those that it was told to load, if not its model's; so is a process in its place.
        error: why it could not load them, and has those of before.
        ready: what the Runtime said of itself, once it was made.
        identity: of the Runtime's answers, once it was asked for.
        least: limits that a Runtime in its place must have.
        figures: of all its processes, since `begin_list`.
    """

    def __init__(
        self, number: int, links: Links, hang_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._number, self._links, self._hang_seconds, self._clock = number, links, hang_seconds, clock
        self.refusal: RadixrtError | None = None
        self.weights: str | None = None
        self.ready: dict[str, Any] = {}
        self.identity: dict[str, Any] | None = None
        self.least: RunLimits | None = None
        self.figures = ReplicaFigures("")
        self._unfinished: dict[int | str, Request] = {}
        self._waiting: dict[int | str, None] = {}  # those of them that have not begun
        self._activity_before, self._stats_before = Activity(), _NO_STATS  # of processes that were lost
        self._began, self._busy_before = 0.0, 0.0  # when the list began
        self._tokens_asked = 0  # by requests that have not ended, at most
        self._tokens_of_others = 0  # that were decoded for other requests
        self._losses = self._lost_unready = self._lost_in_vain = 0  # the last two: one after the other
        self.is_gone = False
        self._start()

    def _start(self) -> None:
        self.link: Link = self._links.start(self._number)
        self._has_told = self._is_tried = False  # of itself; that it can answer
        self._num_loads = self._num_loaded = 0  # of weights: that it was told of, and has ended
        self.error: RadixrtError | None = None
        self._is_asked = False  # for its identity
        self._has_answered = False
        self._heard = self._clock()
        self._activity, self._stats, self.num_running = Activity(), _NO_STATS, 0

    def begin_list(self) -> None:
        """Figures are those of a list that begins now, and it may be lost as often as allowed again."""
        self._lost_unready = self._lost_in_vain = 0
        self._began, self._busy_before = self._clock(), self.activity.busy_seconds
        self._tokens_of_others = self.activity.decoded_tokens
        self.figures = ReplicaFigures(self.figures.device)

    # -- a lane --------------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests that it has and has not begun."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether it has requests that have not ended."""
        return bool(self._unfinished)

    @property
    def progress(self) -> float:
        """How much is done of what it has and has not ended, 0 to 1: by tokens of answers, as it last said."""
        done = self.activity.decoded_tokens - self._tokens_of_others
        return min(1.0, max(0.0, done / self._tokens_asked)) if self._tokens_asked else 0.0

    @property
    def is_ready(self) -> bool:
        """Whether it can be given requests."""
        return self._has_told and self._is_tried and self._num_loaded == self._num_loads

    @property
    def is_idle(self) -> bool:
        """Whether it has no requests."""
        return not self._unfinished

    def submit(self, *requests: Request) -> None:
        """Send requests, which it serves in this order."""
        with deferred():  # half a message, or one that is sent twice, would spoil all that follow
            if not self._unfinished:
                self._heard = self._clock()  # it had nothing to say
            self._unfinished |= {request.id: request for request in requests}
            self._waiting |= dict.fromkeys(request.id for request in requests)
            self._tokens_asked += sum(map(_most_tokens, requests))
            for begin in range(0, len(requests), SENT_AT_ONCE):
                self.link.send(requests_message(requests[begin : begin + SENT_AT_ONCE]))

    def abort(self, *ids: int | str) -> None:
        """End requests at its next step, of those that it has."""
        if own := [request_id for request_id in ids if request_id in self._unfinished]:
            with deferred():
                self.link.send(Message({"abort": own}))

    def has_begun(self, request: Request) -> bool:
        """Whether it has computed some of a request, or has ended it, or never had it."""
        return request.id not in self._waiting

    def ask_identity(self) -> None:
        """Let it say its Runtime's identity."""
        self.link.send(Message({"identity": True}))
        self._is_asked, self._heard = True, self._clock()

    def load(self, source: str) -> None:
        """Let its Runtime load other weights, and forget all prefixes. It has no requests."""
        self.weights, self.error, self.identity = source, None, None
        if self._has_told:
            self._send_load()

    def _send_load(self) -> None:
        with deferred():
            self._num_loads += 1
            self.link.send(Message({"weights": self.weights, "load": self._num_loads}))
            self._heard = self._clock()

    # -- what it says --------------------------------------------------------------------------------------

    @property
    def activity(self) -> Activity:
        """Of all its processes."""
        before, now = astuple(self._activity_before), astuple(self._activity)
        return Activity(*map(sum, zip(before, now, strict=True)))

    @property
    def cache_stats(self) -> CacheStats:
        """Counters of all its processes, and sizes of the one that it has."""
        before, now = vars(self._stats_before), vars(self._stats)
        return CacheStats(**{name: now[name] + (0 if name in _SIZES else before[name]) for name in now})

    def receive(self) -> list[RequestOutput]:
        """Outputs that have come; if it was lost, those of all its requests, with a ReplicaLostError."""
        outputs: list[RequestOutput] = []
        for message in (link := self.link).receive():
            outputs += self._read(message)
            if self.refusal is not None or self.is_gone or self.link is not link:
                return outputs  # what it has said besides is of no use
        now, limit = self._clock(), self._hang_seconds if self._unfinished and self.is_ready else START_SECONDS
        if self.link.is_closed:
            outputs += self._lose("its process has ended")
        elif (self._unfinished or self._is_asked or not self.is_ready) and now - self._heard > limit:
            outputs += self._lose(f"it has said nothing for {limit:,.0f} seconds")
        return outputs

    def _read(self, message: Message) -> list[RequestOutput]:
        body, outputs = message.body, list[RequestOutput]()
        self._heard = self._clock()
        if "activity" in body:
            self._activity, self._stats = Activity(*body["activity"]), CacheStats(*body["stats"])
            self.num_running = body["running"]
        if "ready" in body:
            if self.least is not None and body["ready"]["limits"][0] < self.least.pool_tokens:
                return self._lose(f"its pool has {body['ready']['limits'][0]:,} tokens, fewer than before")
            self.ready, self._has_told, self._is_tried = body["ready"], True, not self._losses
            self.figures = replace(self.figures, device=self.ready["device"])
            if self.weights is not None:
                self._send_load()
            if not self._is_tried:
                self.link.send(requests_message([_trial()]))
        elif "ended" in body:
            for ended in ended_of(message):
                if ended.id == TRIAL:
                    if (failure := output_of(ended, _trial()).failure) is not None:
                        return self._lose(f"it cannot answer: {failure}")
                    self._is_tried = True
                # What is not there was ended already, or sent twice.
                if (request := self._unfinished.pop(ended.id, None)) is not None:
                    outputs.append(output_of(ended, request))
                    self._tokens_asked -= _most_tokens(request)
                    self._tokens_of_others += outputs[-1].usage.completion_tokens
                    self._has_answered = True
                self._waiting.pop(ended.id, None)
            for request_id in body["begun"]:
                self._waiting.pop(request_id, None)
            self._count(outputs)
        elif "identity" in body:
            self._is_asked = False
            if self._num_loaded == self._num_loads:  # not that of weights that it was to replace since
                self.identity = body["identity"]
        elif "load" in body:
            self._num_loaded = body["load"]
            if body["error"] is not None:
                self.error = error_of(body["error"])
                if not self._is_tried:  # it has its model's, and nobody may get answers of these
                    return self._lose(f"it cannot load other weights: {self.error}")
        elif "refused" in body:
            error = error_of(body["refused"])
            if self.ready:
                return self._lose(f"its Runtime cannot be made: {error}")
            self.refusal = error
        elif "lost" in body:
            return self._lose(body["lost"])
        return outputs

    def renew(self, reason: str) -> None:
        """End its process, and start another one in its place. It has no requests."""
        self.identity = None
        self._lose(reason)

    def give_up(self) -> None:
        """End its process, and forget its requests."""
        how = self.link.end()
        self._has_told, self.is_gone = False, True
        _log.warning("replica %d does not end its requests, and is ended (%s)", self._number, how)
        self._unfinished, self._waiting, self._tokens_asked = {}, {}, 0

    def _count(self, outputs: list[RequestOutput]) -> None:
        if not outputs:
            return
        whole = [each for each in outputs if each.finish_reason is not FinishReason.ABORT]
        self.figures = replace(
            self.figures,
            requests=self.figures.requests + len(whole),
            prompt_tokens=self.figures.prompt_tokens + sum(each.usage.prompt_tokens for each in whole),
            cached_tokens=self.figures.cached_tokens + sum(each.usage.cached_tokens for each in whole),
            completion_tokens=self.figures.completion_tokens + sum(each.usage.completion_tokens for each in whole),
            busy_seconds=self.activity.busy_seconds - self._busy_before,
            seconds=self._heard - self._began,
        )

    def _lose(self, reason: str) -> list[RequestOutput]:
        """End its process, start another one unless there were too many, and give its requests back."""
        how = self.link.end()
        self._activity_before, self._stats_before = self.activity, self.cache_stats
        self._activity, self._stats = Activity(), _NO_STATS
        lost, self._unfinished, self._waiting = self._unfinished, {}, {}
        self._tokens_asked, self._tokens_of_others = 0, self.activity.decoded_tokens
        self._losses += 1
        self._lost_unready = 1 if self.is_ready else self._lost_unready + 1
        self._lost_in_vain = 0 if self._has_answered else self._lost_in_vain + 1
        self._has_told, self.num_running = False, 0
        self.is_gone = self._lost_unready > MAX_RESTARTS or self._lost_in_vain > MAX_IN_VAIN
        outcome = "it stays away" if self.is_gone else "starting it again"
        told = f"replica {self._number} is lost: {reason} ({how})"
        _log.warning("%s; %d requests go to others or run again; %s", told, len(lost), outcome)
        if not self.is_gone:
            self.figures = replace(self.figures, restarts=self.figures.restarts + 1)
            try:
                self._start()
            except OSError as error:  # such as too little memory for a process
                self.is_gone = True
                _log.warning("replica %d cannot be started again: %s", self._number, error)
        cause = ReplicaLostError(told)
        return [
            replace(RequestOutput.refused(request.index, told, request.id), cause=cause)
            for request in lost.values()
        ]


def _most_tokens(request: Request) -> int:
    """That its answers may have."""
    return request.max_new_tokens * request.params.n


def _trial() -> Request:
    params = SamplingParams(max_new_tokens=1)
    return Request(-1, np.zeros(1, np.int32), params, max_new_tokens=1, seed=0, id=TRIAL)
