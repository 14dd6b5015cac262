"""The served Runtime as a batch sees it: shared with clients that wait, who go first."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from radixrt.arrays import Int32Array
from radixrt.cache.cache_stats import CacheStats
from radixrt.engine.session import Session
from radixrt.limits import RunLimits
from radixrt.output import RequestOutput
from radixrt.runtime import Runtime
from radixrt.sampling_params import SamplingParams
from radixrt.schedule.activity import Activity
from radixrt.schedule.request import Request
from radixrt.text.chat import Chat
from radixrt.text.tokenizer import Tokenizer

PRIORITY = 1  # of lines; requests of clients have 0, and go first

_MOST_WAITING = 256  # lines of a batch that the scheduler has and has not begun: others' lines queue behind them
_AHEAD = 1.125  # times the places: answers that a batch hands on, so that some wait for the next place
_NEWS_SECONDS = 0.1  # after which a batch looks around, though none of its lines has ended
_LINES_A_PAUSE = 4  # read or prepared, before other threads have their turn


class Pauses:
    """Called for each line, it lets other threads have the interpreter now and then: they would wait 5 ms for it,
    several times a pass.
    """

    def __init__(self) -> None:
        self._calls = itertools.count(1)

    def __call__(self) -> None:
        if next(self._calls) % _LINES_A_PAUSE == 0:
            time.sleep(1e-5)


class Places:
    """Those of a Runtime for answers that run at once, which the batches of all tenants have in equal parts."""

    def __init__(self, most: int) -> None:
        self._most, self._sharers = most, 0

    @contextmanager
    def shared(self) -> Iterator[None]:
        """One more takes its part, inside."""
        self._sharers += 1
        try:
            yield
        finally:
            self._sharers -= 1

    @property
    def each(self) -> int:
        """How many one batch has now."""
        return self._most // max(1, self._sharers)


class BackgroundRuntime:
    """A `SingleRuntime` of one tenant's batch, over a Runtime that others use at the same time.

    Lines make way for requests of clients, whether they wait or run. They are handed on some at a time, so that no
    batch takes more than its part of the places. `step` waits for outputs of lines; whoever waits for anything
    steps the engine.

    Args:
        weights: `identity` of the Runtime, which would make all requests end to tell it.
        on_submit: is called before lines are handed on.
    """

    # So that a batch neither predicts its hits nor asks what is cached: others change that at any time.
    reuses_prefixes = False

    def __init__(
        self,
        runtime: Runtime,
        session: Session,
        places: Places,
        *,
        tenant: str | None,
        weights: Mapping[str, Any],
        on_submit: Callable[[], object] = lambda: None,
    ) -> None:
        self._runtime, self._session, self._places = runtime, session, places
        self._tenant, self._weights, self._on_submit = tenant, weights, on_submit
        self._held: dict[int | str, Request] = {}  # not handed on yet, by id, in order
        self._handed: dict[int | str, Request] = {}  # handed on, and not ended
        self._waiting: list[Request] = []  # of these, those that had not begun when they were last looked at
        self._pause = Pauses()

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._runtime.tokenizer

    @property
    def context_length(self) -> int:
        return self._runtime.context_length

    @property
    def default_params(self) -> SamplingParams:
        return self._runtime.default_params

    @property
    def seed(self) -> int:
        return self._runtime.seed

    @property
    def limits(self) -> RunLimits:
        return self._runtime.limits

    @property
    def products(self) -> Sequence[Any]:
        return self._runtime.products

    @property
    def has_work(self) -> bool:
        return bool(self._held) or self._session.has_work

    @property
    def num_waiting(self) -> int:
        return len(self._held) + len(self._waiting)

    @property
    def num_running(self) -> int:
        return sum(request.params.n for request in self._handed.values()) - len(self._waiting)

    def activity(self) -> Activity:
        """Of the Runtime, for all that it computes."""
        return self._runtime.activity()

    def cache_stats(self) -> CacheStats:
        """Of the Runtime, for all that it computes."""
        return self._runtime.cache_stats()

    def cached_len(self, prompt_ids: Int32Array) -> int:
        """0: nothing that is cached now is sure to be there when a line runs."""
        return 0

    def identity(self) -> Mapping[str, Any]:
        return self._weights

    def prepare(
        self,
        prompt: str | Sequence[int] | Int32Array | Sequence[Mapping[str, Any]] | Chat,
        sampling_params: SamplingParams | None = None,
        *,
        index: int = 0,
        keep: int | None = None,
    ) -> Request:
        self._pause()
        return prepared(self._runtime, self._tenant, prompt, sampling_params, index=index, keep=keep)

    def submit(self, *requests: Request, in_order: bool = False) -> None:
        """Take requests, to be served in this order."""
        self._held |= {request.id: request for request in requests}

    def step(self) -> list[RequestOutput]:
        """Hand on what there is room for, and wait a moment for outputs."""
        self._waiting = [request for request in self._waiting if not self._runtime.has_begun(request)]
        if begins := self._next():
            self._on_submit()
            self._waiting += begins
            self._handed |= {request.id: request for request in begins}
            self._session.submit(*begins, in_order=True)
        outputs = self._session.outputs(_NEWS_SECONDS)
        for output in outputs:
            self._handed.pop(output.id, None)
        return outputs

    def abort(self, request: Request) -> bool:
        """End a request now, or at the next step of the engine. False if it has ended."""
        return self._held.pop(request.id, None) is not None or self._runtime.abort(request)

    def has_begun(self, request: Request) -> bool:
        return request.id not in self._held and self._runtime.has_begun(request)

    def _next(self) -> list[Request]:
        """Take what may be handed on now: one at least if nothing else is."""
        taken: list[Request] = []
        places = _AHEAD * self._places.each - sum(request.params.n for request in self._handed.values())
        room = _MOST_WAITING - len(self._waiting)
        while self._held and len(taken) < room:
            request = next(iter(self._held.values()))
            places -= request.params.n
            if places < 0 and (self._handed or taken):
                break
            taken.append(self._held.pop(request.id))
        return taken


def prepared(runtime: Runtime, tenant: str | None, *arguments: Any, **options: Any) -> Request:
    """`Runtime.prepare` for a line of a tenant's."""
    return runtime.prepare(*arguments, tenant=tenant, priority=PRIORITY, yields=True, **options)
