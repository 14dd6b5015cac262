"""A tenant's batches: each on disk as it is, one after the other in a thread of their own."""

from __future__ import annotations

import logging
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from radixrt.batch.job import Batch, BatchInterrupted, ScannedBatch
from radixrt.batch.journal.run_folder import RunFolder, aside_path, has_run, run_path
from radixrt.batch.tally import Tally
from radixrt.errors import BatchFileError, DeviceLostError, JournalError, RadixrtError, SchedulerError
from radixrt.server.batches.outcome import (
    Outcome,
    kept_records,
    records_in,
    with_unanswered,
    write_outcome,
)
from radixrt.server.batches.record import BatchRecord, Counts, Problem, Status
from radixrt.server.batches.work import BatchFailed, Ending, Work
from radixrt.server.files.folder import TenantFolder
from radixrt.server.files.record import FileRecord
from radixrt.server.files.store import FileStore
from radixrt.server.limits import Limits
from radixrt.server.record_folder import RecordFolder
from radixrt.server.refusal import Refusal

_PREFIX = "batch_"
_RETRY_SECONDS = 30.0  # after the disk has refused
_EXPIRED = "This request could not be executed before the completion window expired."  # OpenAI's words

_log = logging.getLogger(__name__)


@dataclass
class _Running:
    """The batch that runs, and its lines once they are read."""

    batch_id: str
    ending: Ending
    scanned: ScannedBatch | None = None


class BatchQueue:
    """Batches of one tenant, in the order in which they came. What a client asks for may come from any thread.

    What is told is on disk before; whatever ends the process, the next one goes on from there.
    """

    def __init__(
        self,
        tenant: str | None,
        folder: TenantFolder,
        files: FileStore,
        work: Work,
        limits: Limits,
        clock: Callable[[], float],
    ) -> None:
        """Raises BatchFileError or OSError where the folder cannot be read. `clock` tells Unix time in seconds."""
        self._tenant, self._runs, self._files, self._work = tenant, folder.runs, files, work
        self._limits, self._clock = limits, clock
        self._records = RecordFolder(folder.batches, _PREFIX, BatchRecord.from_json)
        self._changed = threading.Condition()  # guards the records' changes, and what follows
        self._running: _Running | None = None
        self._is_started = self._is_over = False
        self._thread: threading.Thread | None = None
        for path in self._runs.iterdir():  # of batches whose files are there
            if (record := self._records.get(path.name.partition(".")[0])) is None or record.status.has_ended:
                _remove(path)

    # -- what clients ask for ------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[BatchRecord]:
        """The oldest first, as they are now."""
        return map(self._now, self._records)

    def get(self, batch_id: str) -> BatchRecord:
        """A batch as it is now. Raises Refusal where there is none of that id."""
        if (record := self._records.get(batch_id)) is None:
            raise Refusal(404, "there is no such batch", "batch_not_found")
        return self._now(record)

    def create(self, file: FileRecord, **asked: Any) -> BatchRecord:
        """Add a batch of a file, which runs after those before it. Raises Refusal or OSError.

        Args:
            asked: fields of its record that a client gives; `expires_at` in seconds from now.
        """
        with self._changed:
            if len(self._records) >= self._limits.batches:
                ended = next((record for record in self._records if record.status.has_ended), None)
                if ended is None:
                    told = f"{self._limits.batches:,} batches have not ended, and no more may wait; come again"
                    raise Refusal(429, told, "too_many_batches", {"Retry-After": "60"})
                self._records.remove(ended.id)
            now = int(self._clock())
            record = BatchRecord(
                id=self._records.new_id(),
                number=self._records.next_number(),
                input_file_id=file.id,
                created_at=now,
                **{**asked, "expires_at": now + asked["expires_at"]},
            )
            self._records.put(record)
            self._changed.notify_all()
            self._begin_thread()
        return record

    def cancel(self, batch_id: str) -> BatchRecord:
        """Begin no more lines of a batch. Raises Refusal where it has ended, or OSError."""
        with self._changed:
            record, running = self.get(batch_id), self._running
            if record.status is Status.CANCELLING:
                return record
            if record.status.has_ended or record.status is Status.FINALIZING:
                raise Refusal(409, f"the batch is {record.status.value} already", "batch_ended")
            record = self._become(batch_id, Status.CANCELLING)
            if running is not None and running.batch_id == batch_id:
                running.ending.set()
            elif not has_run(self._output(batch_id)):  # nothing of it has run
                record = self._become(batch_id, Status.CANCELLED)
        return record

    def user_of(self, file_id: str) -> str | None:
        """The batch that has not ended and needs a file."""
        return next((each.id for each in self._records if _needs(each, file_id)), None)

    def _now(self, record: BatchRecord) -> BatchRecord:
        """A record with what has been answered up to now."""
        running = self._running
        if running is None or running.batch_id != record.id or running.scanned is None:
            return record
        before, counts = record.counts, _counts(running.scanned)
        is_behind = counts.completed + counts.failed < before.completed + before.failed  # it has just been resumed
        return record if record.status.has_ended or is_behind else replace(record, counts=counts)

    # -- the thread ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Run what waits, and what comes."""
        with self._changed:
            self._is_started = True
            if any(not record.status.has_ended for record in self._records):
                self._begin_thread()

    def _begin_thread(self) -> None:
        if self._is_started and self._thread is None:
            self._thread = threading.Thread(target=self._run_all, name=f"radixrt-batches-{self._tenant or ''}")
            self._thread.start()

    def stop(self, *, at_once: bool = False) -> None:
        """Begin no more lines: batches that have not ended go on in another process."""
        with self._changed:
            self._is_over = True
            if self._running is not None:
                self._running.ending.set(signal.SIGTERM, at_once=at_once)
            self._changed.notify_all()

    def join(self) -> None:
        """Wait until nothing runs, after `stop`."""
        if self._thread is not None:
            self._thread.join()

    def _run_all(self) -> None:
        while (running := self._next()) is not None:
            record = self._records.get(running.batch_id)
            assert record is not None
            try:
                self._run(record, running)
            except BatchInterrupted:
                pass  # by `stop`
            except (JournalError, OSError) as error:
                _log.error("%s goes on in %g s: %s", record.id, _RETRY_SECONDS, error, exc_info=error)
                with self._changed:
                    self._changed.wait_for(lambda: self._is_over, _RETRY_SECONDS)
            except RadixrtError as error:  # the engine is lost
                _log.error("%s stays as it is until the server is started anew: %s", record.id, error)
                return
            finally:
                self._running = None

    def _next(self) -> _Running | None:
        """Wait for a batch that has not ended; None once it is over."""
        with self._changed:
            while not self._is_over:
                record = next((each for each in self._records if not each.status.has_ended), None)
                if record is not None:
                    self._running = _Running(record.id, Ending(clock=self._clock))
                    if record.status is Status.CANCELLING:
                        self._running.ending.set(at_once=True)
                    return self._running
                self._changed.wait()
        return None

    def _run(self, record: BatchRecord, running: _Running) -> None:
        """Bring a batch to its end, from where it is. Raises where it is to go on later."""
        output = self._output(record.id)
        try:
            if output.exists() and not has_run(output):  # a process before had all answers
                self._finish(record, Status.COMPLETED, records_in(output))
            else:
                content = self._files.content(self._files.get(record.input_file_id))
                with self._work.opened(content, output) as batch:
                    is_whole = self._answer(record, batch, running)
                if is_whole:
                    self._finish(record, Status.COMPLETED, records_in(output))
        except (DeviceLostError, SchedulerError, JournalError, OSError):
            raise  # it goes on later
        except BatchFailed as error:
            self._fail(record, *error.problems)
        except (Refusal, BatchFileError) as error:  # such as records of another model
            self._fail(record, Problem("batch_failed", str(error)))
        except Exception:
            self._work.check_whole()  # raises where the engine is the reason
            _log.exception("%s has failed", record.id)
            self._fail(record, Problem("failed", "the server has failed at this batch; its log has more"))
        _remove(output)
        _remove(run_path(output))
        _remove(aside_path(output))

    def _answer(self, record: BatchRecord, batch: Batch, running: _Running) -> bool:
        """Answer the lines of a batch; False if it has ended before. Raises BatchInterrupted by `stop`."""
        assert batch.folder is not None
        try:
            scanned = running.scanned = self._work.scan(
                batch, record.endpoint, record.model, self._tenant, running.ending
            )
            with self._changed:
                self._change(record.id, counts=replace(record.counts, total=len(scanned.lines)))
                if self._is(record.id, Status.VALIDATING):
                    self._become(record.id, Status.IN_PROGRESS)
            running.ending.expires_at = record.expires_at
            self._work.run(scanned, self._tenant, running.ending)
        except BatchInterrupted:
            if self._is(record.id, Status.CANCELLING):
                self._finish(record, Status.CANCELLED, kept_records(batch.folder))
                return False
            if running.scanned is not None:
                with self._changed:
                    self._change(record.id, counts=_counts(running.scanned))
            if self._is_over or running.scanned is None:
                raise
            expired = with_unanswered(batch.folder, running.scanned.lines, "batch_expired", _EXPIRED)
            self._finish(record, Status.EXPIRED, expired)
            return False
        return True

    def _finish(self, record: BatchRecord, status: Status, records: Iterable[bytes]) -> None:
        """Make the files of a batch, then let it end: if it is being cancelled, as cancelled."""
        if status is Status.COMPLETED:
            with self._changed:
                if not self._is(record.id, Status.CANCELLING):
                    self._become(record.id, Status.FINALIZING)
        outcome = write_outcome(self._files, record.id, records)
        with self._changed:
            is_cancelled = self._is(record.id, Status.CANCELLING)
            self._become(record.id, Status.CANCELLED if is_cancelled else status, **self._told(record.id, outcome))

    def _fail(self, record: BatchRecord, *problems: Problem) -> None:
        """Let a batch fail; what an earlier process has answered is kept all the same."""
        output, told = self._output(record.id), dict[str, Any]()
        if has_run(output):
            try:
                with RunFolder(output) as folder:
                    told = self._told(record.id, write_outcome(self._files, record.id, kept_records(folder)))
            except JournalError:
                raise
            except BatchFileError as error:
                _log.error("what %s has answered cannot be read: %s", record.id, error)
        with self._changed:
            self._become(record.id, Status.FAILED, problems=problems, **told)

    def _told(self, batch_id: str, outcome: Outcome) -> dict[str, Any]:
        """What the record of a batch tells of its outcome."""
        record, tally = self._records.get(batch_id), outcome.tally
        assert record is not None
        total = max(record.counts.total, tally.records)
        return {
            "output_file_id": outcome.output_file_id,
            "error_file_id": outcome.error_file_id,
            "usage": outcome.usage(),
            "counts": Counts(total, tally.records - tally.errors, tally.errors),
        }

    # -- changes, each with the lock held ------------------------------------------------------------------

    def _is(self, batch_id: str, status: Status) -> bool:
        record = self._records.get(batch_id)
        return record is not None and record.status is status

    def _become(self, batch_id: str, status: Status, **more: Any) -> BatchRecord:
        """Give a batch another status, from now on."""
        record = self._records.get(batch_id)
        assert record is not None
        moments = {**record.moments, status.value: int(self._clock())}
        return self._change(batch_id, status=status, moments=moments, **more)

    def _change(self, batch_id: str, **changes: Any) -> BatchRecord:
        record = self._records.get(batch_id)
        assert record is not None
        changed = replace(record, **changes)
        self._records.put(changed)
        return changed

    def _output(self, batch_id: str) -> Path:
        """Where the records of a batch are put together."""
        return self._runs / f"{batch_id}.jsonl"


def _needs(record: BatchRecord, file_id: str) -> bool:
    return record.input_file_id == file_id and not record.status.has_ended


def _counts(scanned: ScannedBatch) -> Counts:
    tally: Tally = scanned.tally
    return Counts(len(scanned.lines), tally.records - tally.errors, tally.errors)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
