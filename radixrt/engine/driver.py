"""Many callers, one engine: one waiting caller steps it, the others sleep until there is news of their calls."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from radixrt.engine.calls import N, OutputCall, PendingCall, StreamCall
from radixrt.engine.engine import Engine
from radixrt.engine.signals import deferred
from radixrt.engine.tasks import wake_soon
from radixrt.errors import DeviceLostError, ParameterError, RadixrtError
from radixrt.output import RequestOutput
from radixrt.schedule.answer import Answer
from radixrt.schedule.request import Request

T = TypeVar("T")
Call = PendingCall[Any]

_log = logging.getLogger(__name__)


class Driver:
    """Steps the engine for callers in any thread and hands each the news of its own requests.

    It has no thread of its own. A caller that waits takes the turn and steps for all, until there is news of its
    call; then it passes the turn on to another that waits. Tasks of event loops sleep in futures, and one thread
    of the loop's executor waits in their place. An exception of a step is raised to the caller that took it; the
    others go on.

    `_mutex` guards who has the turn, who sleeps and which requests have not ended. It is never held during a pass.

    Attributes:
        device_lost: a step has lost the device, which must not be used any more.
    """

    def __init__(self, engine: Engine, output_of: Callable[[Answer], RequestOutput]) -> None:
        self._open: Engine | None = engine  # None once it is closed
        self._output_of = output_of
        self._mutex = threading.RLock()
        self._turn_is_free = threading.Condition(self._mutex)
        self._owner: int | None = None  # the thread that has the turn
        self._guests = 0  # threads that want the turn for something else than waiting: they go first
        self._inside: set[int] = set()  # threads that are in here
        self._asleep: dict[object, threading.Condition] = {}  # by call, threads that wait; the oldest first
        self._tasks: dict[Call, asyncio.Future[None]] = {}  # by call, tasks that wait
        self._has_proxy = False  # a thread waits in place of the tasks, or is about to
        self._orphans: set[Call] = set()  # that tasks have abandoned
        self._calls: dict[int | str, Call] = {}  # by the id of each request that has not ended
        self._streams: dict[StreamCall, None] = {}  # the calls that get news of every pass, in order
        self._inbox: deque[list[Request]] = deque()  # for the next step to submit
        self._aborts: deque[int | str] = deque()  # ids of requests for the next step to end
        self.device_lost = False

    @property
    def has_work(self) -> bool:
        """Whether requests have not ended, or passes are in flight, and there can be a next step."""
        engine = self.check_open()
        is_cut = engine.is_cut and self._owner is None  # else a step is on its way
        return (bool(self._inbox) or engine.has_work) and not is_cut

    @property
    def num_waiting(self) -> int:
        return len(self.check_open().scheduler.waiting) + sum(map(len, tuple(self._inbox)))

    def check_open(self) -> Engine:
        """The engine. Raises RadixrtError if the driver is closed."""
        engine = self._open
        if engine is None:
            raise RadixrtError("the runtime is closed")
        return engine

    # -- requests ------------------------------------------------------------------------------------------

    def submit(self, requests: Iterable[Request], call: Call) -> None:
        """Hand requests of the builder to the next step, without waiting for this one.

        Raises:
            ParameterError: the id of one is taken.
        """
        requests = list(requests)
        with self._entered(), self._mutex:
            self.check_open()
            if taken := [request.id for request in requests if request.id in self._calls]:
                raise ParameterError(f"request id {taken[0]!r} is that of another request that has not ended")
            self._register(requests, call)
            call.requests |= dict.fromkeys(request.id for request in requests)
            if requests:
                self._inbox.append(requests)

    def submit_now(self, requests: Iterable[Request], call: OutputCall, *, in_order: bool) -> None:
        """Queue requests after the current pass, to be served `in_order`, or as the policy says.

        Raises:
            ValueError: one can never run, or was submitted before; none of them is queued then.
        """
        requests = list(requests)
        with self._turn(), deferred():
            if len({request.id for request in requests}) < len(requests):
                raise ValueError("a request is submitted twice")
            if known := [request.index for request in requests if request.id in self._calls]:
                raise ValueError(f"request {known[0]} was submitted before")
            answers = self.check_open().submit_all(requests, in_order=in_order)
            with self._mutex:
                self._register(requests, call)
                call.requests |= {answer.request.id: answer for answer in answers}

    def abort(self, request_id: int | str) -> bool:
        """See `Runtime.abort`."""
        if request_id not in self._calls or self._open is None:
            return False
        self._aborts.append(request_id)
        return True

    def has_begun(self, request_id: int | str) -> bool:
        """See `Runtime.has_begun`."""
        call = self._calls.get(request_id)
        if call is None or request_id not in call.requests:
            return True
        answer = call.requests[request_id]
        return answer is not None and answer.log.launched_at is not None

    def _register(self, requests: Iterable[Request], call: Call) -> None:
        self._calls |= {request.id: call for request in requests}
        if isinstance(call, StreamCall):
            self._streams[call] = None

    # -- waiting -------------------------------------------------------------------------------------------

    def news(self, call: PendingCall[N]) -> list[N]:
        """Wait for news of a call and take it; nothing if the call is over."""
        with self._entered():
            self.check_open()
            self._wait(lambda: call.has_news or not call.requests, call)
        return call.take()

    async def async_news(self, call: PendingCall[N]) -> list[N]:
        """`news` for a task: its event loop never waits for a pass."""
        self.check_open()
        loop = asyncio.get_running_loop()
        self._tasks[call] = told = loop.create_future()  # first: news that come from now on find it
        try:
            if call.requests and not call.has_news:
                self._start_proxy(loop)
                await told
        finally:
            self._tasks.pop(call, None)
        return call.take()

    def abandon(self, call: Call) -> None:
        """End a call's requests, and step until they and, unless others step, the passes in flight have ended."""

        def is_gone() -> bool:
            return self._open is None or not self.has_work or (not call.requests and bool(self._calls))

        if self._abort_all(call):
            with self._entered():
                self._wait(is_gone, call)

    def abandon_soon(self, call: Call) -> None:
        """`abandon` for a task, without waiting: the requests end at the next steps."""
        if call.requests and self._abort_all(call):
            with self._mutex:
                self._orphans.add(call)
            with contextlib.suppress(RuntimeError):  # there is no loop any more: steps to come see to it
                self._start_proxy(asyncio.get_running_loop())

    def _abort_all(self, call: Call) -> bool:
        """Abort the requests of a call. Returns whether this thread may step: not where the garbage collector
        ends a forgotten stream in the middle of something here.
        """
        if self._open is None:
            return False
        self._aborts += tuple(call.requests)
        return threading.get_ident() not in self._inside

    def _wait(self, done: Callable[[], bool], key: object) -> None:
        """Step, or sleep while others do, until `done`. What changes `done` wakes `key`."""
        try:
            while not done():
                self.check_open()
                if not self._stepped_until(done):
                    self._sleep(done, key)
        finally:
            with self._mutex:
                self._pass_on()

    def _stepped_until(self, done: Callable[[], bool]) -> bool:
        """Step until `done`, or until a guest waits. False if it is not this thread's turn."""
        me = threading.get_ident()
        try:
            with self._mutex:
                if self._owner is not None or self._guests:
                    return False
                self._owner = me
            self._step()
            while not done() and not self._guests:
                self._step()
            return True
        finally:
            self._give_back(me)

    def _sleep(self, done: Callable[[], bool], key: object) -> None:
        with self._mutex:
            if not done() and (self._owner is not None or self._guests):
                self._asleep[key] = woken = threading.Condition(self._mutex)
                try:
                    woken.wait()
                finally:
                    self._asleep.pop(key, None)

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        me = threading.get_ident()
        if me in self._inside:
            raise RadixrtError("a runtime is called in the middle of its own work, as by a signal's handler")
        try:
            self._inside.add(me)
            yield
        finally:
            self._inside.discard(me)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Have the turn once the current pass has ended."""
        me = threading.get_ident()
        with self._entered():
            try:
                with self._mutex:
                    self._guests += 1
                    try:
                        while self._owner is not None:
                            self._turn_is_free.wait()
                        self._owner = me
                    finally:
                        self._guests -= 1
                yield
            finally:
                self._give_back(me)

    def _give_back(self, me: int) -> None:
        with self._mutex:
            if self._owner == me:
                self._owner = None
            self._pass_on()

    def _pass_on(self) -> None:
        """Wake a thread to take the turn, if it is free."""
        if self._owner is not None:
            return
        if self._guests:
            self._turn_is_free.notify()
        elif self._asleep:
            self._asleep.pop(next(iter(self._asleep))).notify()

    # -- tasks ---------------------------------------------------------------------------------------------

    def _start_proxy(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let a thread of the loop's executor wait in place of the tasks, unless one does."""
        if self._has_proxy:
            return
        try:
            self._has_proxy = True
            loop.run_in_executor(None, self._wait_for_tasks)
        except BaseException:
            self._has_proxy = False
            raise

    def _wait_for_tasks(self) -> None:
        try:
            with self._entered():
                self._wait(self._proxy_is_done, self)
        except Exception as error:  # as a caller in a thread gets it
            self._has_proxy = False
            self._wake(tuple(self._tasks), error)

    def _proxy_is_done(self) -> bool:
        # First: a task that comes after this look starts another proxy, and one that came before it is seen.
        self._has_proxy = False
        with self._mutex:
            self._orphans = {call for call in self._orphans if call.requests}
            nobody_else_steps = bool(self._orphans) or not self._calls
            is_needed = bool(self._tasks) or (nobody_else_steps and self._open is not None and self.has_work)
        self._has_proxy = is_needed
        return not is_needed

    def _wake(self, keys: Iterable[Any], error: Exception | None = None) -> None:
        """Wake the threads and tasks that wait for these calls; tasks raise `error`, if there is one."""
        with self._mutex:
            keys = list(keys)
            for key in keys:
                if key in self._asleep:
                    self._asleep.pop(key).notify()
            futures = [self._tasks.pop(key) for key in keys if key in self._tasks]
            if not self._tasks and self in self._asleep:  # the proxy
                self._asleep.pop(self).notify()
        wake_soon(futures, error)

    # -- between passes ------------------------------------------------------------------------------------

    def step(self) -> None:
        """Advance all requests by one pass."""
        with self._turn():
            self._step()

    def between_passes(self, action: Callable[[], T]) -> T:
        """Return what `action` does, while no step runs."""
        with self._turn():
            self.check_open()
            return action()

    def while_idle(self, action: Callable[[], T]) -> T:
        """Run all requests to their end, start all transfers, and return what `action` does then."""
        with self._turn():
            engine = self.check_open()
            self._submit_inbox(engine)
            while engine.has_work:
                self._step(admit=False)
            engine.check_whole()
            with deferred():
                engine.make_transfers()
            return action()

    def close(self) -> None:
        """End all requests and release the engine; see `Runtime.close`."""
        if self._open is None:
            return
        with self._turn():
            while (engine := self._open) is not None:
                for call in tuple(self._calls.values()):
                    self._abort_all(call)
                while (self._inbox or engine.has_work) and not engine.is_cut:
                    self._step()
                with self._mutex:
                    if not self._inbox or engine.is_cut:
                        self._open = None  # and with it go the model and its memory
            with self._mutex:
                self._wake((*self._asleep, *self._tasks), RadixrtError("the runtime is closed"))

    def _submit_inbox(self, engine: Engine) -> None:
        while self._inbox:
            for answer in engine.submit_all(self._inbox.popleft()):
                self._calls[answer.request.id].requests[answer.request.id] = answer

    def _abort(self, engine: Engine) -> None:
        """Pass aborts on to the engine, and keep those of requests that it does not have yet."""
        for request_id in [self._aborts.popleft() for _ in range(len(self._aborts))]:
            call = self._calls.get(request_id)
            if call is not None and (answer := call.requests.get(request_id)) is not None:
                engine.abort(answer)
            elif call is not None:
                self._aborts.append(request_id)

    def _step(self, *, admit: bool = True) -> None:
        engine = self.check_open()
        with deferred():  # booking included: an output that is not delivered now never is
            if admit:
                self._submit_inbox(engine)
            self._abort(engine)
            try:
                ended = engine.step()
            except DeviceLostError:
                self.device_lost = True
                raise
            told = [call for answer in ended if (call := self._end(answer.family[0])) is not None]
            told += [call for call in tuple(self._streams) if call.catch_up()]
            if told:
                self._wake(told)

    def _end(self, first: Answer) -> Call | None:
        """Deliver the output of a request if its answers have all ended. Returns its call then."""
        call = self._calls.get(first.request.id)
        if call is None or not all(answer.finished for answer in first.family):
            return None
        call.end(first, self._output(first))
        del self._calls[first.request.id]
        if isinstance(call, StreamCall):
            del self._streams[call]
        return call

    def _output(self, first: Answer) -> RequestOutput:
        try:
            return self._output_of(first)
        except Exception as error:  # one request's text must not cost the others theirs
            request = first.request
            _log.exception("no output can be made of request %s", request.id)
            return RequestOutput.refused(request.index, f"no output can be made: {error}", request.id)
