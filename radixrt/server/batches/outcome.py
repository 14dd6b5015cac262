"""The records of a batch, as OpenAI has them: answers in one file, errors in another one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from radixrt.batch.formats.line_format import record_tally
from radixrt.batch.formats.openai_batch import openai_unanswered
from radixrt.batch.formats.strict_json import dump_line
from radixrt.batch.journal.journal import Journal
from radixrt.batch.journal.run_folder import RunFolder
from radixrt.batch.known_lines import SoundLine
from radixrt.batch.scan import Scan
from radixrt.batch.tally import Tally
from radixrt.server.files.record import OUTPUT
from radixrt.server.files.store import Draft, FileStore

_WRITTEN_AT_ONCE = 2**20  # bytes


@dataclass(frozen=True)
class Outcome:
    """What has become of a batch; a file without lines is not there.

    Attributes:
        tally: of all records.
    """

    output_file_id: str | None
    error_file_id: str | None
    tally: Tally

    def usage(self) -> dict[str, Any]:
        """The tokens of all answers, in OpenAI's form."""
        tally = self.tally
        return {
            "input_tokens": tally.prompt_tokens,
            "input_tokens_details": {"cached_tokens": tally.cached_tokens},
            "output_tokens": tally.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": tally.prompt_tokens + tally.completion_tokens,
        }


def write_outcome(files: FileStore, batch_id: str, records: Iterable[bytes]) -> Outcome:
    """Keep the records of a batch in files whose ids follow from its own: again, it replaces them.

    Raises OSError where the disk refuses, and what `records` raise.
    """
    tally, kept = Tally(), dict[str, str]()
    with ExitStack() as opened:
        drafts = {
            kind: opened.enter_context(_Lines(files.draft(_file_id(batch_id, kind), bounded=False)))
            for kind in ("output", "error")
        }
        for record in records:
            value = json.loads(record)
            tally += record_tally(value)
            drafts["output" if value["error"] is None else "error"].write(record)
        for kind, lines in drafts.items():
            if lines.has_any:
                kept[kind] = lines.keep(f"{batch_id}_{kind}.jsonl")
    return Outcome(kept.get("output"), kept.get("error"), tally)


def records_in(path: Path) -> Iterator[bytes]:
    """Those of a whole output."""
    with path.open("rb") as lines:
        yield from lines


def kept_records(folder: RunFolder) -> Iterator[bytes]:
    """Those of a run that is not whole, in order; none if it has not begun. Raises BatchFileError."""
    journal = _journal(folder)
    if journal is not None:
        yield from journal.records()


def with_unanswered(folder: RunFolder, scan: Scan, code: str, message: str) -> Iterator[bytes]:
    """`kept_records`, and after them one for each sound line without a record. Raises BatchFileError."""
    yield from kept_records(folder)
    journal = _journal(folder)
    missing = np.ones(len(scan), np.bool_) if journal is None else ~journal.finished
    positions = np.flatnonzero(missing & ~scan.is_bad).tolist()
    for position, line in zip(positions, scan.read(positions), strict=True):
        assert isinstance(line, SoundLine)
        yield dump_line(openai_unanswered(int(scan.lines[position]), line.reply, code, message))


def _journal(folder: RunFolder) -> Journal | None:
    """That of a run, by the manifest with which it was begun."""
    if folder.journal is None and (kept := folder.kept()) is not None:
        return folder.begin(kept.manifest)
    return folder.journal


def _file_id(batch_id: str, kind: str) -> str:
    return f"file-{hashlib.blake2b(f'{batch_id}/{kind}'.encode(), digest_size=16).hexdigest()}"


class _Lines:
    """A draft that is written to in large pieces."""

    def __init__(self, draft: Draft) -> None:
        self._draft, self._rest = draft, bytearray()

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *error: Any) -> None:
        self._draft.__exit__(*error)

    @property
    def has_any(self) -> bool:
        return bool(self._rest or self._draft.size)

    def write(self, line: bytes) -> None:
        self._rest += line
        if len(self._rest) >= _WRITTEN_AT_ONCE:
            self._write_rest()

    def keep(self, filename: str) -> str:
        """Returns its id."""
        self._write_rest()
        return self._draft.keep(filename, OUTPUT).id

    def _write_rest(self) -> None:
        self._draft.write(bytes(self._rest))
        self._rest.clear()
