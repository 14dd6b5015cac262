"""Schedule, launch, collect: the one loop, which alone knows both scheduler and runner."""

from __future__ import annotations

import ctypes
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from threading import Event

from radixrt.arrays import Int32Array
from radixrt.errors import DeviceLostError, SchedulerError
from radixrt.schedule.activity import Activity, ActivityMeter
from radixrt.schedule.answer import Answer
from radixrt.schedule.booking import Booking
from radixrt.schedule.masks import PassForms
from radixrt.schedule.passes import Runner
from radixrt.schedule.scheduler import Scheduler

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _InFlight:
    booking: Booking
    handle: object = None
    error: Exception | None = None  # what `launch` raised; it is booked when its turn comes


class Engine:
    """Drives a scheduler and a runner. The calling thread does all the work, but many masks are filled in another,
    and `clock` gives its seconds.

    `max_in_flight` passes may be in flight while the next one is planned; with 0 the device waits for the host.
    """

    # Masked draws of a pass. With more, nearly each pass has one that is forced, and an extend makes it longer:
    # nothing is gained by that, and masks are filled while the next pass is planned instead.
    max_forced_rows = 4

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        max_in_flight: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.submit_all = scheduler.submit_all
        self._max_in_flight = max_in_flight
        self._in_flight: deque[_InFlight] = deque()
        self._filling: tuple[Int32Array, Future[None]] | None = None  # masks of the one pass in flight
        self._meter = ActivityMeter(clock)
        self.is_cut = False  # a step has ended in its middle
        self.is_lost = False  # because the device was lost

    @property
    def has_work(self) -> bool:
        """Whether requests have not ended, or passes are in flight."""
        return self.scheduler.has_work or bool(self._in_flight)

    @property
    def activity(self) -> Activity:
        """Work and time up to the end of the last step; from any thread."""
        return self._meter.activity

    def check_whole(self) -> None:
        """Raise SchedulerError if a step has been cut in two, DeviceLostError if the device was lost in it."""
        if self.is_lost:
            raise DeviceLostError("the device was lost in an earlier step; go on in a new process")
        if self.is_cut:
            raise SchedulerError("an earlier step was cut in two; close this Runtime and make another one")

    def make_transfers(self) -> None:
        """Start the booked transfers between the tiers; needed before slots are read or written without a pass."""
        booked = self.scheduler.cache.transfers
        transfers = booked.take()
        try:
            if transfers:
                self.runner.transfer(transfers)
        finally:
            booked.give_back(transfers)  # those that could not be started

    def step(self, aborts: Iterable[Answer] = (), launched: Callable[[], None] = lambda: None) -> list[Answer]:
        """End `aborts` and the other answers to their prompts, launch the next pass, call `launched`, and book the
        one `max_in_flight` before it. Returns the answers that ended.

        A pass that raises ends its own answers with FinishReason.ERROR, and all others go on. But DeviceLostError
        is raised, and no request has ended, if then the device works no more; SchedulerError if requests wait and
        nothing can run, or if an earlier step was cut in two (by a third Ctrl-C): what memory holds is unknown.
        """
        self.check_whole()
        self.is_cut = True
        self._meter.begin_step()
        ended: list[Answer] = []
        for aborted in aborts:
            ended += [answer for answer in aborted.family if self.scheduler.abort(answer)]
        booking = self.scheduler.next_pass()
        if booking is not None and self._filling is not None:
            self._prepare(booking)
        self.start_draws()
        if booking is not None:
            self._in_flight.append(self._launch(booking))
        launched()
        if booking is not None and booking.forms is not None:  # it waits for the tokens of all passes before
            while len(self._in_flight) > 1:
                ended += self._collect(self._in_flight.popleft())
            ended += self._begin_draws()
        if self._in_flight and (booking is None or len(self._in_flight) > self._max_in_flight):
            ended += self._collect(self._in_flight.popleft())
        self._meter.end_step()
        self.is_cut = False
        return ended

    def _prepare(self, booking: Booking) -> None:
        """Do what can be done of a pass while the masks of the one before are filled."""
        self._meter.in_runner(self.runner.prepare, booking.pass_)
        if booking.forms is not None:
            with suppress(Exception):  # it is raised again where masks are to be filled
                booking.forms.join()

    def _launch(self, booking: Booking) -> _InFlight:
        self.scheduler.cache.pass_launched()
        try:
            self.make_transfers()
            return _InFlight(booking, handle=self._meter.in_runner(self.runner.launch, booking.pass_))
        except Exception as error:
            # The device may not have got the changes, and some concern rows of other requests: send them again.
            self.scheduler.cache.rows.give_back(booking.pass_.row_changes)
            self._check_device(error, booking, "could not be launched")
            return _InFlight(booking, error=error)

    def _begin_draws(self) -> list[Answer]:
        """Fill the masks of the one pass in flight and start its draws; or let another thread fill them while the
        next pass is planned. Returns the answers that ended by what their forms force.
        """
        (flight,) = self._in_flight
        if flight.error is not None or self._filling is not None:
            return []
        forms = flight.booking.forms
        assert forms is not None
        try:
            masks = self._mask_memory(forms)
            if self._is_filled_beside(forms):
                begun = Event()
                self._filling = masks, self._beside.submit(_fill, forms, masks, begun)
                begun.wait()  # or the other thread would only run when this one waits for it
                return []
            forms.fill(masks)
            self._draw(masks)
        except Exception as error:
            self._fail_draws(error)
            return []
        return self.scheduler.take_forced(forms.forced(masks))

    def _push(self, forms: PassForms, token_ids: Int32Array) -> dict[int, Exception | None]:
        """See `PassForms.push`. Where the masks of the one pass in flight wait for nothing else, the thread that
        pushes fills them at once, while this one books the tokens.
        """
        flight = self._in_flight[0] if len(self._in_flight) == 1 else None
        following = None if flight is None or flight.error is not None else flight.booking.forms
        if following is None or not self._is_filled_beside(following) or not forms.suffice(token_ids):
            return forms.push(token_ids)
        try:
            masks = self._mask_memory(following)
        except Exception:  # it is raised again where masks are to be filled
            return forms.push(token_ids)
        pushed: Future[dict[int, Exception | None]] = Future()
        self._filling = masks, self._beside.submit(_push_and_fill, forms, token_ids, pushed, following, masks)
        return pushed.result()

    def _is_filled_beside(self, forms: PassForms) -> bool:
        """Whether another thread fills the masks."""
        return forms.masks_shape[0] > self.max_forced_rows and self._max_in_flight > 0

    def _mask_memory(self, forms: PassForms) -> Int32Array:
        forms.join()  # here: two threads that make matchers would make some twice
        return self.runner.mask_memory(*forms.masks_shape)

    @cached_property
    def _beside(self) -> ThreadPoolExecutor:
        """The thread that fills masks."""
        return ThreadPoolExecutor(1, thread_name_prefix="radixrt-masks")

    def start_draws(self) -> None:
        """Start the draws for which another thread fills masks, if there are any: then nothing is read any more of
        the places of the last pass but what has been launched.
        """
        if self._filling is not None:
            (masks, filled), self._filling = self._filling, None
            try:
                filled.result()
                self._draw(masks)
            except Exception as error:
                self._fail_draws(error)

    def _draw(self, masks: Int32Array) -> None:
        self._meter.in_runner(partial(self.runner.draw_masked, self._in_flight[0].handle), masks)

    def _fail_draws(self, error: Exception) -> None:
        booking = self._in_flight[0].booking
        self._check_device(error, booking, "could not be drawn from")
        self._in_flight[0] = _InFlight(booking, error=error)

    def _collect(self, flight: _InFlight) -> list[Answer]:
        error = flight.error
        if error is None:
            try:
                result = self._meter.in_runner(self.runner.collect, flight.handle)
                self._meter.count(flight.booking.pass_, result)
            except Exception as raised:
                self._check_device(raised, flight.booking, "failed")
                error = raised
        rows = flight.booking.pass_.req_pool_indices
        self.scheduler.cache.pass_ended(rows if error is not None else rows[~result.finite])
        if error is not None:
            return self.scheduler.fail(flight.booking, error)
        return self.scheduler.process(flight.booking, result, self._push)

    def _check_device(self, error: Exception, booking: Booking, failure: str) -> None:
        """Make the device ready after a pass that raised, or raise DeviceLostError."""
        _log.exception("a pass of %d answers %s", len(booking.answers), failure)
        try:
            self.runner.check_device(error)
        except DeviceLostError:
            self.is_lost = True
            for kept in (self, error):  # with the passes in flight, and what the one that raised had made
                # For good: freeing page-locked memory records an event on the lost device, which would raise in a
                # C++ destructor and end the process.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
            raise


def _fill(forms: PassForms, masks: Int32Array, begun: Event) -> None:
    begun.set()
    forms.fill(masks)


def _push_and_fill(
    forms: PassForms,
    token_ids: Int32Array,
    pushed: Future[dict[int, Exception | None]],
    following: PassForms,
    masks: Int32Array,
) -> None:
    try:
        ended = forms.push(token_ids)
    except BaseException as error:
        pushed.set_exception(error)
        raise
    pushed.set_result(ended)
    following.fill(masks, [forms.answers[row] for row in ended])
