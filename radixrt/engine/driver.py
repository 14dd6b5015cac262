"""Many calls, one engine: whoever waits for an output advances everybody's requests by a pass."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from radixrt.engine.engine import Engine
from radixrt.engine.signals import uninterrupted
from radixrt.errors import DeviceLostError, ParameterError, RadixrtError
from radixrt.output import RequestOutput
from radixrt.schedule.answer import Answer
from radixrt.schedule.request import Request

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Call:
    """Requests that were submitted together, and their outputs as they come.

    Attributes:
        answers: by the request's id, the first answers of those whose outputs have not come.
        names: the caller's own ids, by the place of the prompt; those of prompts without one are numbers.
        ready: outputs that nobody has taken.
    """

    def __init__(self, names: Mapping[int, str] | None = None) -> None:
        self.answers: dict[int, Answer] = {}
        self.names = names or {}
        self.ready: deque[RequestOutput] = deque()

    def id_of(self, request: Request) -> int | str:
        """What users know a request by."""
        return self.names.get(request.index, request.id)


class Driver:
    """Steps the engine for callers in any thread and hands each the outputs of its own requests.

    No thread of its own: a caller that waits takes the lock and steps for all. An exception that ends the step
    ends that caller's wait; the others go on.

    Args:
        engine: nobody else steps it.
        make_output: turns the first answer to a prompt, when all have ended, into the request's output.

    Attributes:
        device_lost: a step has lost the device; nothing may be asked of it any more.
    """

    def __init__(self, engine: Engine, make_output: Callable[[Answer], RequestOutput]) -> None:
        self._open: Engine | None = engine  # None once it is closed
        self._make_output = make_output
        # A thread that holds it may come here again: the garbage collector ends a forgotten stream anywhere.
        self._lock = threading.RLock()
        self._working = False  # whoever holds the lock is in the middle of something
        self._calls: dict[int, Call] = {}  # by the id of each request that has not ended
        self._named: dict[str, Answer] = {}  # those of them that have an id of the caller's
        self.device_lost = False

    @property
    def has_work(self) -> bool:
        """Whether requests have not ended, or passes are in flight, and there can be a next step."""
        return self._engine.has_work and not self._engine.is_cut

    @property
    def _engine(self) -> Engine:
        return self.check_open()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock, the driver being open."""
        with self._lock:
            if self._working:
                raise RadixrtError("a runtime is called in the middle of its own work, as by a signal's handler")
            self.check_open()
            self._working = True
            try:
                yield
            finally:
                self._working = False

    def submit(self, requests: Iterable[Request], call: Call, *, in_order: bool = False) -> list[Answer]:
        """Queue requests as part of a call, `in_order` or as the policy says. Returns the first answer of each.

        Raises:
            ParameterError: one of its names is taken.
            ValueError: a request has been submitted and has not ended, or can never run.
        """
        requests = list(requests)
        with self._alone(), uninterrupted():
            for name in {call.names.get(request.index) for request in requests} & self._named.keys():
                raise ParameterError(f"request id {name!r} is that of another request that has not ended")
            if len({request.id for request in requests}) < len(requests):
                raise ValueError("a request is submitted twice")
            for request in requests:
                if request.id in self._calls:
                    raise ValueError(f"request {request.index} was submitted before")
            answers = self._engine.submit_all(requests, in_order=in_order)
            for answer in answers:
                request = answer.request
                call.answers[request.id] = answer
                self._calls[request.id] = call
                if request.index in call.names:
                    self._named[call.names[request.index]] = answer
            return answers

    def advance(self, call: Call) -> None:
        """Advance all requests by one pass, unless `call` has an output to take or nothing to wait for."""
        with self._alone():
            if not call.ready and call.answers:
                self._step()

    def look(self, look: Callable[[], T]) -> T:
        """What `look` returns while no pass is being booked. Raises RadixrtError if the driver is closed."""
        with self._alone():
            return look()

    def step(self) -> None:
        """Advance all requests by one pass."""
        with self._alone():
            self._step()

    def abort(self, request_id: int | str) -> bool:
        """End a request at the next step; from any thread. False if it has ended, or never was."""
        answer = self._named.get(request_id) if isinstance(request_id, str) else self._answer(request_id)
        engine = self._open
        if answer is None or engine is None:
            return False
        engine.abort(answer)
        return True

    def has_begun(self, request_id: int) -> bool:
        """Whether a pass has computed some of a submitted request; True if it has ended."""
        answer = self._answer(request_id)
        return answer is None or answer.log.launched_at is not None

    def _answer(self, request_id: int) -> Answer | None:
        call = self._calls.get(request_id)
        return None if call is None else call.answers.get(request_id)

    def abandon(self, call: Call) -> None:
        """End what is left of a call and run until it is gone, so that nothing of it stays behind."""
        with self._lock:
            if self._open is None:
                return
            for answer in list(call.answers.values()):
                self._open.abort(answer)
            if self._working:  # a stream forgotten in the middle of a step, say: the steps to come see to it
                return
            with self._alone():
                # The last pass in flight too, unless others will step: nothing is left to do behind an answer.
                while self.has_work and (call.answers or not self._calls):
                    self._step()

    def while_idle(self, action: Callable[[], T]) -> T:
        """Run everything to its end, then `action`, before anything else is let in. Returns what `action` does.

        What is booked between the tiers has been started by then.
        """
        with self._alone():
            while self._engine.has_work:
                self._step()
            self._engine.check_whole()
            with uninterrupted():
                self._engine.make_transfers()
            return action()

    def close(self) -> None:
        """End all requests and let go of the engine, from any thread.

        Callers that wait get a RadixrtError, or outputs that end with "abort".
        """
        with self._lock:
            if self._open is None:
                return
            with self._alone():
                for call in list(self._calls.values()):
                    for answer in call.answers.values():
                        self._engine.abort(answer)
                while self.has_work:
                    self._step()
                self._open = None  # and with it go the model and its memory

    def check_open(self) -> Engine:
        """The engine. Raises RadixrtError if the driver is closed."""
        engine = self._open
        if engine is None:
            raise RadixrtError("the runtime is closed")
        return engine

    def _step(self) -> None:
        with uninterrupted():  # booking included: an output that is not delivered now never is
            try:
                ended = self._engine.step()
            except DeviceLostError:
                self.device_lost = True
                raise
            for first in (answer.family[0] for answer in ended):
                request = first.request
                if request.id in self._calls and all(answer.finished for answer in first.family):
                    call = self._calls.pop(request.id)
                    del call.answers[request.id]
                    request_id = call.id_of(request)
                    if isinstance(request_id, str):
                        del self._named[request_id]
                    output = self._output(first)
                    call.ready.append(output if output.id == request_id else replace(output, id=request_id))

    def _output(self, first: Answer) -> RequestOutput:
        try:
            return self._make_output(first)
        except Exception as error:  # one request's text must not cost the others theirs
            _log.exception("no output can be made of request %d", first.request.id)
            return RequestOutput.refused(first.request.index, f"no output can be made: {error}")
