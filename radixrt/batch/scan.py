"""Scans the lines of a batch before it runs: parses, tokenises and checks each, and puts the result on disk.

Only some numbers of each line stay in memory: a million lines of 1,000 tokens take 4 GB of tokens on disk, and
about 40 MB of memory, with as much again for the hashes of their custom_ids while they are read.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from radixrt.arrays import BoolArray, Int32Array, Int64Array
from radixrt.batch.formats.line_format import LineParser
from radixrt.batch.formats.record import (
    FORM_ENGINE,
    InputRecord,
    LineError,
    LineErrorType,
    type_of_prompt_error,
)
from radixrt.batch.formats.source import BadLine
from radixrt.batch.known_lines import MAX_REMEMBERED, ROW, KnownLines, SoundLine, read_entries
from radixrt.errors import ParameterError, PromptError
from radixrt.files.disk import file_error, new_file
from radixrt.limits import EXPECTED_TOKENS
from radixrt.planning.demands import Demands
from radixrt.planning.token_store import TokenStore, TokenWriter
from radixrt.sampling_params import MAX_NEW_TOKENS, SamplingParams
from radixrt.text.chat import Chat
from radixrt.text.prompts import encode_prompts
from radixrt.text.tokenizer import Tokenizer

MAX_NAMED = 20  # problems that a scan keeps with their messages
_V = TypeVar("_V")
_CHECKED = "line", "new_tokens", "num_answers", "match_limit", "is_bad", "is_open"
BLOCK_LINES, BLOCK_BYTES = 1024, 4 * 2**20  # encoded together, while the next are parsed
_DEFAULTS = SamplingParams()


class Checked(Protocol):
    """A prompt that can run."""

    @property
    def prompt_ids(self) -> Int32Array: ...

    @property
    def max_new_tokens(self) -> int: ...

    @property
    def stop_ids(self) -> frozenset[int]: ...

    @property
    def late_ids(self) -> frozenset[int]: ...


_Records = list[tuple[int, "InputRecord | LineError"]]  # by their lines
_Block = tuple[_Records, "Future[list[Int32Array | PromptError | None]]"]

Check = Callable[[Int32Array | str | Sequence[Any] | Chat, SamplingParams, int], Checked]
"""Checks whether a model can run a prompt with its parameters; the number is its line. For example
`RequestBuilder.build`. Raises PromptError or ParameterError."""


@dataclass(frozen=True)
class Problem:
    """Why a line has an error record.

    Attributes:
        line: its number in the file, from 1.
    """

    line: int
    type: LineErrorType
    message: str


@dataclass(frozen=True)
class Scan:
    """The N lines of a file that are not blank. Positions count these lines, from 0.

    Attributes:
        lines: `[N]`, the place of each in the file, from 0.
        tokens: their prompts; bad lines have none.
        new_tokens: `[N]`, maximum length of each answer in tokens; 0 for bad lines.
        is_open: `[N]`, whether that is what the context leaves.
        num_answers: `[N]`, answers to each prompt.
        match_limits: `[N]`, leading tokens of each prompt that may come from the cache: see `Demands`.
        is_bad: `[N]`, whether a line cannot run.
        input_hash: hash of all these lines.
        tokens_hash: hash of all prompts' tokens, which depend on the tokenizer and its chat template; an empty
            text has none in it.
        cuts_hash: hash of how long answers may be where the context ends them before their own maximum; None if
            it ends none.
        end_ids: the tokens that end answers though no line names them, sorted: the model's.
        problems: the first MAX_NAMED bad lines.
        num_problems: bad lines of each kind.
    """

    lines: Int64Array
    tokens: TokenStore
    new_tokens: Int32Array
    is_open: BoolArray
    num_answers: Int32Array
    match_limits: Int32Array
    is_bad: BoolArray
    input_hash: str
    tokens_hash: str
    cuts_hash: str | None
    end_ids: tuple[int, ...]
    problems: tuple[Problem, ...]
    num_problems: dict[LineErrorType, int]
    _entries: Path
    _entry_ends: Int64Array  # in their file

    def __len__(self) -> int:
        return len(self.lines)

    @property
    def is_whole(self) -> bool:
        """Yes: see `Lines`."""
        return True

    def wait(self, known: int, seconds: float) -> None:
        """There is nothing to wait for: see `Lines`."""

    def whole(self) -> Scan:
        """This: see `Lines`."""
        return self

    def prompt(self, position: int) -> Int32Array:
        """The tokens of a line, `[n]`."""
        return self.tokens[position]

    def demands(self, pool_tokens: int = MAX_NEW_TOKENS) -> Demands:
        """What each line asks for, if each answer has its maximum of tokens. An open one is expected to have some,
        as far as the pool has room.
        """
        lengths = self.tokens.lengths
        expected = np.minimum(EXPECTED_TOKENS, (pool_tokens - lengths + 1).clip(min=1))
        new_tokens = np.where(self.is_open, np.minimum(self.new_tokens, expected), self.new_tokens)
        return Demands.of(lengths, new_tokens, self.num_answers, self.match_limits)

    def too_long(self, positions: Int64Array, pool_tokens: int) -> BoolArray:
        """Whether an answer to each of these lines may need more than so many slots of a KV pool; an open one ends
        with it.
        """
        new_tokens = np.where(self.is_open[positions], 1, self.new_tokens[positions])
        needed = self.tokens.lengths[positions] + np.maximum(1, new_tokens) - 1
        too_long: BoolArray = needed > pool_tokens
        return too_long

    def summary(self) -> str:
        """How many lines are bad, and the first of them with their problems; "" if there are none."""
        count = sum(self.num_problems.values())
        if not count:
            return ""
        kinds = ", ".join(f"{number:,} {kind.value}" for kind, number in sorted(self.num_problems.items()))
        shown = [f"  line {p.line}: {p.type.value}: {p.message}" for p in self.problems]
        if count > len(shown):
            shown.append(f"  ... and {count - len(shown):,} more")
        if self.num_problems.get(LineErrorType.INVALID_LINE) == len(self):  # such as a list of plain texts
            shown.append('  a line is a JSON object, such as {"prompt": "..."}')
        are = "line is" if len(self) == 1 else "lines is" if count == 1 else "lines are"
        return "\n".join([f"{count:,} of {len(self):,} {are} bad ({kinds}):", *shown])

    def read(self, positions: Iterable[int]) -> Iterator[SoundLine | LineError]:
        """The lines at some positions, in the given order.

        Raises BatchFileError if the file of entries has gone, JournalError if the disk fails.
        """
        return read_entries(self._entries, self._entry_ends, positions)


def scan_lines(
    lines: Iterable[tuple[int, bytes | BadLine]],
    folder: Path,
    *,
    parser: LineParser,
    tokenizer: Tokenizer | None,
    check: Check,
    context_length: int | None = None,
    known: KnownLines | None = None,
) -> Scan:
    """Scan all lines. A line with the custom_id of an earlier sound line is bad.

    Args:
        lines: from `read_lines`.
        folder: an existing folder for the files of the scan; files of an earlier one are replaced.
        parser: of the lines.
        tokenizer: encodes text, a block of lines at a time on its threads.
        check: whether a model can run a line.
        context_length: of the model, so that texts that are far longer are not encoded; None: all are.
        known: gets the lines as they are checked, for who does not wait for all.

    Raises:
        BatchFileError: the input cannot be read, or the files cannot be made.
        JournalError: the disk refuses.
    """
    if known is None:
        opened: AbstractContextManager[KnownLines] = closing(KnownLines(folder))
    else:
        opened = nullcontext(known)
    with opened as found, _encoding_thread() as thread, _Writer(folder, check, found) as writer:
        before: _Block | None = None
        for block in _blocks(lines):
            records = writer.parsed(block, parser)
            encoding = thread.submit(_encoded, [record for _, record in records], tokenizer, context_length)
            if before is not None:  # it was encoded while this one was parsed
                writer.write(*before)
            before = records, encoding
        if before is not None:
            writer.write(*before)
        return writer.finish()


@contextmanager
def _encoding_thread() -> Iterator[ThreadPoolExecutor]:
    """A thread that encodes. After an error nobody waits for its block."""
    thread = ThreadPoolExecutor(1, "radixrt-encoding")
    try:
        yield thread
    finally:
        thread.shutdown(wait=False, cancel_futures=True)


class _ByParams(Generic[_V]):
    """Something of each of the latest parameters. The same object is found without a hash of all its values."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[SamplingParams, _V]] = {}  # by identity, as long as the object is here
        self._known: dict[SamplingParams, _V] = {}

    def get(self, params: SamplingParams) -> _V | None:
        if (found := self._found.get(id(params))) is not None:
            return found[1]
        value = self._known.get(params)
        if value is not None:
            self._find(params, value)
        return value

    def put(self, params: SamplingParams, value: _V) -> None:
        if len(self._known) >= MAX_REMEMBERED:
            self._known.clear()
        self._known[params] = value
        self._find(params, value)

    def _find(self, params: SamplingParams, value: _V) -> None:
        if len(self._found) >= MAX_REMEMBERED:
            self._found.clear()
        self._found[id(params)] = params, value


class _Checks:
    """Checks of prompts: of those with the same parameters, what a longer one may do the others may, too."""

    def __init__(self, check: Check) -> None:
        self._check = check
        self._known: _ByParams[Checked] = _ByParams()  # the longest one of each
        self._greatest = -1  # of the token ids that were checked

    def of(self, record: InputRecord, ids: Int32Array | None, line: int) -> tuple[Int32Array, Checked]:
        """The tokens of a sound record, and what holds for it. Raises PromptError or ParameterError."""
        params = record.sampling_params
        model = self._known.get(params)
        if model is not None and ids is not None and self._covers(model, ids):
            return ids, model
        checked = self._check(record.prompt if ids is None else ids, params, line)
        own = checked.prompt_ids
        # Otherwise it depends on the length of a prompt what its answer may be, or whether it is cut.
        depends = params.prompt_logprobs is not None or params.truncate_prompt_tokens is not None
        if not depends and checked.max_new_tokens == params.max_new_tokens:
            if model is None or len(own) > len(model.prompt_ids):
                self._known.put(params, checked)
            self._greatest = max(self._greatest, int(own.max()))
        return own, checked

    def _covers(self, model: Checked, ids: Int32Array) -> bool:
        return 0 < len(ids) <= len(model.prompt_ids) and int(ids.max()) <= self._greatest


class _Writer:
    def __init__(self, folder: Path, check: Check, known: KnownLines) -> None:
        self._known = known
        self._checks = _Checks(check)
        self._params_json: _ByParams[str] = _ByParams()
        self._path = known.entries_path
        self._tokens = TokenWriter(folder)
        self._hash, self._tokens_hash = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)
        self._cuts_hash, self._has_cuts = hashlib.blake2b(digest_size=16), False
        self._end_ids: set[int] = set()
        self._ids: set[bytes] = set()  # hashes of the sound lines' custom_ids
        # Of the block: line, new tokens, answers, match limit, bad, open.
        self._columns: list[tuple[int, int, int, int, bool, bool]] = []
        self._end = 0  # of the entries
        self._problems: list[Problem] = []
        self._counts: Counter[LineErrorType] = Counter()
        with self._refusals():
            self._file = new_file(self._path)

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):  # after an error the buffered rest is not needed
            self._file.close()
        self._tokens.__exit__(*error)

    def parsed(self, block: Sequence[tuple[int, bytes | BadLine]], parser: LineParser) -> _Records:
        """Parse the next lines."""
        hashed: list[bytes] = []
        for line, text in block:
            told = text.message.encode() if isinstance(text, BadLine) else text
            hashed += b"%d %d\n" % (line, len(told)), told
        self._hash.update(b"".join(hashed))  # at once: without the interpreter's lock
        return [(line, _parsed(text, parser)) for line, text in block]

    def write(self, block: _Records, encoding: Future[list[Int32Array | PromptError | None]]) -> None:
        """Check and write a block of lines whose prompts are encoded."""
        prompts, entries = [], []
        for (line, record), ids in zip(block, encoding.result(), strict=True):
            prompt, entry = self._checked(line, record, ids)
            prompts.append(prompt)
            entries.append(entry.encode() + b"\n")
        hashed: list[bytes | memoryview] = []
        for (_, record), prompt in zip(block, prompts, strict=True):
            # An empty text was a bad line once: runs that were begun then go on.
            own = prompt[:0] if isinstance(record, InputRecord) and record.prompt == "" else prompt
            hashed += len(own).to_bytes(8, sys.byteorder), np.ascontiguousarray(own, "<i4").data
        self._tokens_hash.update(b"".join(hashed))
        end = self._tokens.num_tokens
        self._tokens.append(prompts)
        self._tokens.flush()
        with self._refusals():
            self._file.write(b"".join(entries))
            self._file.flush()
        rows = np.zeros(len(block), ROW)
        for name, values in zip(_CHECKED, zip(*self._columns, strict=True), strict=True):
            rows[name] = values
        rows["tokens_end"] = end + np.cumsum([len(prompt) for prompt in prompts], dtype=np.int64)
        rows["entry_end"] = self._end + np.cumsum([len(entry) for entry in entries], dtype=np.int64)
        self._end, self._columns = int(rows["entry_end"][-1]), []
        self._known.add(rows)

    def finish(self) -> Scan:
        with self._refusals():
            self._file.close()
        rows = self._known.rows
        return Scan(
            lines=rows["line"].copy(),
            tokens=self._tokens.finish(),
            new_tokens=rows["new_tokens"].copy(),
            num_answers=rows["num_answers"].copy(),
            match_limits=rows["match_limit"].copy(),
            is_bad=rows["is_bad"].copy(),
            is_open=rows["is_open"].copy(),
            input_hash=self._hash.hexdigest(),
            tokens_hash=self._tokens_hash.hexdigest(),
            cuts_hash=self._cuts_hash.hexdigest() if self._has_cuts else None,
            end_ids=tuple(sorted(self._end_ids)),
            problems=tuple(self._problems),
            num_problems=dict(self._counts),
            _entries=self._path,
            _entry_ends=rows["entry_end"].copy(),
        )

    def _checked(
        self, line: int, record: InputRecord | LineError, ids: Int32Array | PromptError | None
    ) -> tuple[Int32Array, str]:
        """The tokens of a line and its entry."""
        try:
            if isinstance(record, LineError):
                raise record
            try:
                if isinstance(ids, PromptError):
                    raise ids
                prompt, checked = self._checks.of(record, ids, line)
            except PromptError as error:
                raise LineError(type_of_prompt_error(error), f"the prompt {error}", record.reply) from error
            except ParameterError as error:
                raise LineError(LineErrorType.INVALID_PARAMETERS, str(error), record.reply) from error
            self._take_custom_id(record)  # last: a bad line must not take the id from a sound one
        except LineError as error:
            self._counts[error.type] += 1
            if len(self._problems) < MAX_NAMED:
                self._problems.append(Problem(line + 1, error.type, error.message))
            self._columns.append((line, 0, 1, 0, True, False))
            entry = {"error": error.type.value, "message": error.message, "reply": error.reply}
            return np.zeros(0, np.int32), _dumped(entry)
        params = record.sampling_params
        limit = params.match_limit(len(prompt))
        self._columns.append((line, checked.max_new_tokens, params.n, limit, False, params.is_open))
        self._end_ids.update(checked.stop_ids.difference(params.stop_token_ids), checked.late_ids)
        if checked.max_new_tokens < params.max_new_tokens:
            self._cuts_hash.update(b"%d %d\n" % (line, checked.max_new_tokens))
            self._has_cuts = True
        reply = record.reply
        if params.form is not None:  # `line_format` tells what has compiled it
            reply = {**reply, FORM_ENGINE: getattr(getattr(checked, "form", None), "engine", None)}
        if (spelled := self._params_json.get(params)) is None:
            self._params_json.put(params, spelled := _dumped(parameters_as_json(params)))
        return prompt, f'{{"params":{spelled},"reply":{_dumped(reply)}}}'

    def _take_custom_id(self, record: InputRecord) -> None:
        if record.custom_id is None:
            return
        own = hashlib.blake2b(record.custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if own in self._ids:
            message = "a line before this one has the same custom_id"
            raise LineError(LineErrorType.DUPLICATE_CUSTOM_ID, message, record.reply)
        self._ids.add(own)

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise file_error(f"cannot write {self._path}", error) from error


def _parsed(text: bytes | BadLine, parser: LineParser) -> InputRecord | LineError:
    try:
        return parser.parse(text)
    except LineError as error:
        return error


_dumped = json.JSONEncoder(separators=(",", ":")).encode


def _blocks(lines: Iterable[tuple[int, bytes | BadLine]]) -> Iterator[list[tuple[int, bytes | BadLine]]]:
    block: list[tuple[int, bytes | BadLine]] = []
    size = 0
    for line, text in lines:
        block.append((line, text))
        size += 0 if isinstance(text, BadLine) else len(text)
        if len(block) == BLOCK_LINES or size >= BLOCK_BYTES:
            yield block
            block, size = [], 0
    if block:
        yield block


def _encoded(
    records: Sequence[InputRecord | LineError], tokenizer: Tokenizer | None, context_length: int | None
) -> list[Int32Array | PromptError | None]:
    """The token ids of each record that is text or chat messages, if there is a tokenizer; None for others."""
    prompts: dict[int, str | Chat] = {}
    limits: list[int | None] = []  # in tokens, of those that must not be too long
    for place, record in enumerate(records if tokenizer is not None else ()):
        if isinstance(record, InputRecord) and isinstance(record.prompt, (str, Chat)):
            prompts[place] = record.prompt
            is_cut = record.sampling_params.truncate_prompt_tokens is not None
            limits.append(None if is_cut else context_length)
    out: list[Int32Array | PromptError | None] = [None] * len(records)
    if tokenizer is not None:
        for place, ids in zip(prompts, encode_prompts(tokenizer, [*prompts.values()], limits), strict=True):
            out[place] = ids
    return out


def parameters_as_json(params: SamplingParams) -> dict[str, Any]:
    """The parameters that differ from the defaults, as arguments of `SamplingParams`."""
    values = {field.name: getattr(params, field.name) for field in fields(params)}
    given = {name: value for name, value in values.items() if value != getattr(_DEFAULTS, name)}
    if "logit_bias" in given:
        given["logit_bias"] = {str(token): bias for token, bias in params.logit_bias}
    return given
