"""Many callers, one engine: one waiting caller steps it, the others sleep until there is news of their calls."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, TypeVar

from radixrt.engine.calls import N, PendingCall, StreamCall
from radixrt.engine.engine import Engine
from radixrt.engine.gc_control import old_objects_left_alone
from radixrt.engine.signals import deferred
from radixrt.engine.wakers import NewsListener, Sleeper, Waker, wake_soon
from radixrt.errors import ParameterError, RadixrtError
from radixrt.output import RequestOutput
from radixrt.pauses import with_pauses
from radixrt.schedule.answer import Answer
from radixrt.schedule.request import LazyRequests, Request

LATE_SECONDS = 0.02  # that a step waits for late requests, while no other call has its turn

T = TypeVar("T")
C = TypeVar("C", bound=PendingCall[Any])
Call = PendingCall[Any]

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Submitted:
    """Requests for steps to submit to the engine."""

    requests: Sequence[Request]
    call: Call
    in_order: bool
    at: float  # seconds of time.perf_counter
    done: int = 0  # so many of them are submitted
    arrival: int | None = None  # of late ones the first one's, once a step has looked at them


class Driver:
    """Steps the engine for callers in any thread and hands each the news of its own requests.

    It has no thread of its own. A caller that waits takes the turn and steps for all, until there is news of its
    call; then it passes the turn on to another that waits. Tasks of event loops sleep in futures, or have a
    function called for their news, and one thread of each loop's executor, the proxy, waits in their place: a loop
    that ends waits for its own, and that for no other loop's tasks. Others get their news when the next pass has
    been launched: they have the interpreter while the device works, and do not delay its plan. An exception of a
    step is raised to the caller that took it, from a proxy to all tasks of its loop; the others go on.

    `_mutex` guards who has the turn, who sleeps and which requests have not ended. It is never held during a pass.
    """

    def __init__(self, engine: Engine, output_of: Callable[[Answer], RequestOutput]) -> None:
        self._open: Engine | None = engine  # None once it is closed
        self._process = os.getpid()  # a forked one has its memory, but neither its threads nor its device
        self._output_of = output_of
        self._mutex = threading.RLock()
        self._owner: int | None = None  # the thread that has the turn
        self._is_stepping = False
        self._guests: dict[object, threading.Condition] = {}  # that want it for something else than waiting: first
        self._inside: dict[int, FrameType] = {}  # threads that are in here, by way of this frame of theirs
        self._asleep: dict[object, threading.Condition] = {}  # by call, threads that wait
        self._tasks: dict[Call, Sleeper] = {}  # by call, tasks that wait
        self._listeners: dict[Call, NewsListener] = {}  # by call, functions that are called for its news
        self._proxies: set[asyncio.AbstractEventLoop] = set()  # loops that have one
        self._calls: dict[int | str, Call] = {}  # by the id of each request that has not ended
        self._streams: dict[int | str, StreamCall] = {}  # those of them that get news of every pass
        self._inbox: deque[_Submitted] = deque()  # for the next step to submit, or of late requests for later ones
        self._aborts: deque[int | str] = deque()  # ids of requests for the next step to end
        self._ended: deque[Answer] = deque()  # first answers to what may have ended, which is yet to be told
        self._told: list[Call] = []  # that have news of the last step, and may wait for it

    @property
    def has_work(self) -> bool:
        """Whether requests have not ended, or passes are in flight, and there can be a next step."""
        engine = self.check_open()
        has_work = bool(self._inbox or self._ended) or engine.has_work
        with self._mutex:  # nobody takes or gives back the turn meanwhile
            if self._owner not in (None, threading.get_ident()):
                return has_work or self._is_stepping  # the last step may have ended all and not told it yet
            return has_work and not engine.is_cut

    @property
    def num_waiting(self) -> int:
        return len(self.check_open().scheduler.waiting) + sum(
            len(each.requests) - each.done for each in tuple(self._inbox)
        )

    @property
    def is_forked(self) -> bool:
        """Whether this process is not the one that made it, but a fork."""
        return os.getpid() != self._process

    def check_open(self) -> Engine:
        """The engine. Raises RadixrtError if the driver is closed, or another process has made it."""
        engine = self._open
        if self.is_forked:
            raise RadixrtError(
                "this Runtime was made before the process was forked, and works in its parent alone: make one in "
                "the process that uses it, and start that by multiprocessing's 'spawn' if it uses a GPU"
            )
        if engine is None:
            raise RadixrtError("the runtime is closed")
        return engine

    def check_whole(self) -> None:
        """Raise as `Engine.check_whole`, and RadixrtError if it is closed. A step that is on its way is no cut."""
        with self._mutex:
            engine = self.check_open()
            if self._owner is None:
                engine.check_whole()

    # -- requests ------------------------------------------------------------------------------------------

    def submit(self, requests: Iterable[Request], call: Call, *, in_order: bool = False) -> None:
        """Hand requests to the next step, without waiting for this one: all, or none if one is refused.

        With `in_order` they are served in this order, not in that of the policy; late ones come in either. Raises
        ParameterError if the id of one is taken, ValueError if one can never run, or is there twice.
        """
        late = requests if isinstance(requests, LazyRequests) else None
        listed = list(requests) if late is None else late
        ids: dict[int | str, Answer | None]
        ids = dict.fromkeys(late.ids if late is not None else (request.id for request in listed))
        with self._entered(), self._mutex:
            scheduler = self.check_open().scheduler
            if len(ids) < len(listed):
                raise ValueError("a request is submitted twice")
            if taken := ids.keys() & self._calls.keys():
                raise ParameterError(f"request id {taken.pop()!r} is that of another request that has not ended")
            if late is None:  # these are known to be sound
                scheduler.check(listed)
            call.requests |= ids
            self._calls |= dict.fromkeys(ids, call)
            if isinstance(call, StreamCall):
                self._streams |= dict.fromkeys(ids, call)
            if listed:
                self._inbox.append(_Submitted(listed, call, in_order, time.perf_counter()))

    def abort(self, request_id: int | str) -> bool:
        """See `Runtime.abort`."""
        if request_id not in self._calls or self._open is None:
            return False
        self._aborts.append(request_id)
        return True

    def abort_all(self) -> int:
        """See `Runtime.abort_all`."""
        if self._open is None:
            return 0
        with self._mutex:
            ids = tuple(self._calls)
        self._aborts += ids
        return len(ids)

    def has_begun(self, request_id: int | str) -> bool:
        """See `Runtime.has_begun`."""
        call = self._calls.get(request_id)
        answer = None if call is None else call.requests.get(request_id)
        has_ended = request_id not in self._calls  # asked last: another thread may end it meanwhile
        return has_ended or (answer is not None and answer.log.launched_at is not None)

    # -- waiting -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def opened(self, call: C, *, by_task: bool = False) -> Iterator[C]:
        """Keep a call open: in the end its requests that have not ended are abandoned. Meanwhile the garbage
        collector leaves old objects alone, as its pauses would be those of all calls.
        """
        self.check_open()
        with old_objects_left_alone():
            try:
                yield call
            finally:
                (self.abandon_soon if by_task else self.abandon)(call)

    def news(self, call: PendingCall[N], seconds: float | None = None) -> Iterator[N]:
        """Wait for news of a call, at most so many seconds and the pass that runs then, and take it; nothing if
        there is none, or the call is over.
        """
        self.check_open()
        end = math.inf if seconds is None else time.monotonic() + seconds
        self._wait(lambda: not call.waits or time.monotonic() >= end, call, seconds)
        return call.take()

    async def async_news(self, call: PendingCall[N]) -> Iterator[N]:
        """`news` for a task: its event loop never waits for a pass."""
        loop = asyncio.get_running_loop()
        with self._mutex:
            self.check_open()
            if not call.waits:
                return call.take()
            self._start_proxy(loop)
            self._tasks[call] = sleeper = Sleeper(loop)
        try:
            if (error := await sleeper.told) is not None:
                raise error
        finally:
            with self._mutex:
                self._tasks.pop(call, None)
        return call.take()

    async def listen(self, call: Call, on_news: Callable[[], bool]) -> None:
        """Have `on_news` called in the event loop when there is news of a call: see `NewsListener`."""
        loop = asyncio.get_running_loop()
        with self._mutex:
            self.check_open()
            self._start_proxy(loop)
            self._listeners[call] = listener = NewsListener(loop, call, on_news)
        try:
            listener.wake()  # for what has come before
            if (error := await listener.told) is not None:
                raise error
        finally:
            with self._mutex:
                self._listeners.pop(call, None)

    def remind(self, call: Call) -> None:
        """Call the `on_news` of a call, if there is one; in its loop's thread."""
        if (listener := self._listeners.get(call)) is not None:
            listener.wake()

    def _start_proxy(self, loop: asyncio.AbstractEventLoop) -> None:
        if loop not in self._proxies:
            loop.run_in_executor(None, self._wait_for_tasks, loop)
            self._proxies.add(loop)

    def abandon(self, call: Call) -> None:
        """End a call's requests, and step until they and, unless others step, the passes in flight have ended."""
        self._leave(call)
        if not self._is_inside():  # as the garbage collector may end a forgotten stream
            self._wait(lambda: self._is_gone(call), call)

    def abandon_soon(self, call: Call) -> None:
        """`abandon` for a task, without waiting: a thread of its loop's executor does it."""
        self._leave(call)
        with self._mutex, contextlib.suppress(RuntimeError):  # there is no loop any more: steps to come see to it
            if not self._is_gone(call):
                asyncio.get_running_loop().run_in_executor(None, self.abandon, call)

    def _leave(self, call: Call) -> None:
        call.is_left = True
        self._aborts += tuple(call.requests)

    def _is_gone(self, call: Call) -> bool:
        return self._open is None or not self.has_work or (not call.requests and bool(self._calls))

    def _wait(self, done: Callable[[], bool], key: object, seconds: float | None = None) -> None:
        """Step, or sleep while others do, until `done`. What changes `done` wakes `key`; time does by itself, if
        it is looked at after some `seconds`.
        """
        with self._entered():
            while self._gets_turn(done, key, seconds):
                self._step()

    def _gets_turn(
        self, done: Callable[[], bool], key: object, seconds: float | None = None, *, as_guest: bool = False
    ) -> bool:
        """Sleep until this thread has the turn, or is `done`: False."""
        me, queue = threading.get_ident(), self._guests if as_guest else self._asleep
        with self._mutex:
            while not done():
                if self._guests and not as_guest:
                    self._pass_on()
                elif self._owner in (None, me):
                    self._owner = me
                    return True
                queue[key] = woken = threading.Condition(self._mutex)
                try:
                    woken.wait(seconds)
                finally:
                    queue.pop(key, None)
        return False

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        """Keep this thread from calling in here once more meanwhile, and pass on the turn in the end."""
        if self.is_forked:
            self.check_open()  # raises: locks may be held by threads that are not here
        me = threading.get_ident()
        if self._is_inside():
            raise RadixrtError("a runtime is called in the middle of its own work, as by a signal's handler")
        try:
            self._inside[me] = sys._getframe(2)  # of the caller, after the context manager's own
            yield
        finally:
            self._inside.pop(me, None)
            self._pass_on()

    def _is_inside(self) -> bool:
        """Whether this thread is in here. A Ctrl-C just as it leaves may keep a frame of it that has ended."""
        entered = self._inside.get(threading.get_ident())
        frame: FrameType | None = None if entered is None else sys._getframe()
        while frame is not None and frame is not entered:
            frame = frame.f_back
        return frame is not None

    def _take_turn(self) -> None:
        """Have the turn once the current pass has ended; until `_entered` is left."""
        self._gets_turn(lambda: False, object(), as_guest=True)

    def _pass_on(self) -> None:
        """Give back the turn, if this thread has it; if it is free, wake a thread to take it."""
        with self._mutex:
            if self._owner == threading.get_ident():
                self._owner = None
                self._tell()
            waiting = self._guests or self._asleep
            if self._owner is None and waiting:
                next(iter(waiting.values())).notify()

    def _wait_for_tasks(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            self._wait(partial(self._no_task_waits, loop), loop)
        except BaseException as error:  # also a panic of the tokenizer's: else nobody steps for the loop any more
            with self._mutex:
                self._proxies.discard(loop)
                waiting = [call for call, sleeper in self._tasks.items() if sleeper.loop is loop]
                waiting += [call for call, each in self._listeners.items() if each.loop is loop and call.requests]
            self._wake(waiting, error)

    def _no_task_waits(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether a loop's proxy may go; with the mutex held, so that the next task starts another one."""
        if self._needs_proxy(loop):
            return False
        self._proxies.discard(loop)
        return True

    def _needs_proxy(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether a task of the loop waits, or a listener for requests that have not ended. With the mutex."""
        return any(sleeper.loop is loop for sleeper in self._tasks.values()) or any(
            each.loop is loop and call.requests for call, each in self._listeners.items()
        )

    def _wake(self, keys: Sequence[Any], error: BaseException | None = None) -> None:
        """Wake the threads, tasks and listeners of these calls; all but threads raise `error`, if there is one."""
        with self._mutex:
            wakers: list[Waker] = [self._tasks.pop(key) for key in keys if key in self._tasks]
            listeners = [self._listeners[key] for key in keys if key in self._listeners]
            wakers += [each for each in listeners if each.becomes_due() or error is not None]
            for key in (*keys, *(loop for loop in self._proxies if not self._needs_proxy(loop))):
                if key in self._asleep:
                    self._asleep[key].notify()
        wake_soon(wakers, error)

    # -- between passes ------------------------------------------------------------------------------------

    def step(self) -> None:
        """Advance all requests by one pass."""
        self.between_passes(self._step)

    def between_passes(self, action: Callable[[], T]) -> T:
        """Return what `action` does, while no step runs."""
        with self._entered():
            self._take_turn()
            self.check_open()
            return action()

    def while_idle(self, action: Callable[[], T]) -> T:
        """Run all requests to their end, start all transfers, and return what `action` does then."""
        with self._entered():
            self._take_turn()
            engine = self.check_open()
            lists = [each.requests for each in tuple(self._inbox) if isinstance(each.requests, LazyRequests)]
            while not all(each.is_over for each in lists):
                self._step()
            self._submit_inbox(engine, late=False)
            while engine.has_work:
                self._step(admit=False)
            self._tell()
            engine.check_whole()
            with deferred():
                engine.make_transfers()
            return action()

    def close(self) -> None:
        """End all requests and release the engine; see `Runtime.close`."""
        with self._entered():
            self._take_turn()
            while self._open is not None:
                self._aborts += tuple(self._calls)
                if self.has_work:
                    self._step()
                with self._mutex:
                    if not self.has_work:
                        self._open = None  # and with it go the model and its memory
                        self._wake((*self._asleep, *self._tasks), RadixrtError("the runtime is closed"))

    def _submit_inbox(self, engine: Engine, *, late: bool = True) -> None:
        """Submit what is in the inbox. Of late requests, as many as may be looked at in the next pass, unless some
        that are not made yet are to be ended; with `late=False` all. Those of a call that was left are never made,
        nor the rest of a list of which some cannot be.
        """
        for each in tuple(self._inbox):
            part, is_late = each.requests, isinstance(each.requests, LazyRequests)
            arrival: int | None = None
            if isinstance(each.requests, LazyRequests):
                if each.arrival is None:
                    each.arrival = engine.scheduler.new_arrivals(len(part))  # later ones come after all of these
                arrival, end = each.arrival + each.done, len(part)
                if late and not self._ends_unmade(each.call):
                    room = engine.scheduler.room((each.requests.priority, arrival))
                    end = min(end, each.done + room)
                if not each.call.is_left:
                    end = min(end, each.requests.known())
                if each.call.is_left or each.requests.failure is not None:
                    self._give_up(each)
                    continue
                part = part[each.done : end]
            answers = engine.submit_all(
                part, in_order=each.in_order, is_sorted=is_late, submitted_at=each.at, arrival=arrival
            )
            for answer in answers:
                each.call.requests[answer.request.id] = answer
            each.done += len(part)
            if each.done == len(each.requests):
                self._inbox.remove(each)
        if late and not engine.has_work:
            self._wait_for_late()

    def _wait_for_late(self) -> None:
        """Where nothing else is to be done, wait for more late requests, but not so long that others notice."""
        waiting = tuple(self._inbox)
        lists = [(each.requests, each.done) for each in waiting if isinstance(each.requests, LazyRequests)]
        if lists and len(lists) == len(waiting) and not self._aborts:
            requests, done = lists[0]
            requests.known(done, LATE_SECONDS)

    def _give_up(self, each: _Submitted) -> None:
        """Make no more of late requests, whose call was left or cannot be answered whole."""
        assert isinstance(each.requests, LazyRequests)
        each.requests.stop()
        if each.requests.failure is not None:
            each.call.fail(each.requests.failure)
        self._forget(each.call, each.requests.ids[each.done :])
        self._inbox.remove(each)

    def _forget(self, call: Call, ids: Iterable[int | str]) -> None:
        """Forget requests of a call that the engine does not have."""
        with self._mutex:
            for name in ids:
                del call.requests[name], self._calls[name]
                self._streams.pop(name, None)
        self._told.append(call)

    def _ends_unmade(self, call: Call) -> bool:
        """Whether requests of a call are to be ended that the engine does not have yet."""
        return any(self._calls.get(name) is call and call.requests[name] is None for name in tuple(self._aborts))

    def _aborted(self) -> list[Answer]:
        """Take the answers to end. Aborts of requests that the engine does not have yet stay."""
        ids = [self._aborts.popleft() for _ in range(len(self._aborts))]
        found = {name: call.requests.get(name) for name in ids if (call := self._calls.get(name)) is not None}
        self._aborts += [name for name, answer in found.items() if answer is None]
        return [answer for answer in found.values() if answer is not None]

    def _step(self, *, admit: bool = True) -> None:
        """Make a step and deliver its news. Ctrl-C is raised after it."""
        engine = self.check_open()
        with deferred(), self._stepping():  # booking included: an output that is not delivered now never is
            if admit:
                self._submit_inbox(engine)
            engine.scheduler.pace(paced := with_pauses if self._paces() else iter)
            try:
                # Others go on once the device has its next work, and this thread waits: not while it plans.
                ended = engine.step(self._aborted(), self._tell)
                self._ended += dict.fromkeys(answer.parent or answer for answer in ended)  # each prompt once
                for _ in paced(range(len(self._ended))):
                    self._end(self._ended[0])
                    self._ended.popleft()
                streams = paced(tuple(self._streams.items()))
                self._told += [call for request_id, call in streams if call.catch_up(request_id)]
            except BaseException:
                self._tell()
                raise
            if not engine.has_work:
                self._tell()

    @contextlib.contextmanager
    def _stepping(self) -> Iterator[None]:
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping = False

    def _paces(self) -> bool:
        """Whether event loops wait long for the interpreter while this thread works: 5 ms is Python's default."""
        return bool(self._tasks or self._listeners) and sys.getswitchinterval() > 1e-3

    def _tell(self) -> None:
        """Wake who waits for news of the last step."""
        if self._told:
            told, self._told = self._told, []
            self._wake(told)

    def _end(self, first: Answer) -> None:
        """Deliver the output of a request if its answers have all ended."""
        request = first.request
        call = self._calls.get(request.id)
        # It may have been told before a panic, and the id be another's now.
        if call is None or call.requests.get(request.id) is not first:
            return
        # The last ones mostly end last: to begin with the first would look at all of them each time.
        others = first.children
        if not first.finished or (others and not all(child.finished for child in reversed(others))):
            return
        cut: BaseException | None = None
        try:
            output = self._output_of(first)
        except BaseException as error:  # one request's text must not cost the others theirs
            _log.exception("no output can be made of request %s", request.id)
            output = RequestOutput.refused(request.index, f"no output can be made: {error}", request.id)
            cut = None if isinstance(error, Exception) else error
        call.end(first, output)
        self._calls.pop(request.id)
        self._streams.pop(request.id, None)
        self._told.append(call)
        if cut is not None:  # such as a panic of the tokenizer's, or a third Ctrl-C
            raise cut
