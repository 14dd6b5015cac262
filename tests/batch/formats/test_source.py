"""The lines of a batch's input: plain, compressed, from standard input, parquet; whole, cut short, damaged."""

from __future__ import annotations

import datetime
import gzip
import io
import json
import os
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radixrt.batch.formats.line_format import LineParser
from radixrt.batch.formats.source import BadLine, is_plain, read_lines, zstd_module
from radixrt.errors import BatchFileError
from radixrt.files.standard import STANDARD
from radixrt.sampling_params import SamplingParams
from radixrt.text.chat import Chat

try:
    ZSTD = zstd_module("the tests")
except BatchFileError:
    ZSTD = None
needs_zstd = pytest.mark.skipif(ZSTD is None, reason="neither Python's own zstd nor backports.zstd is there")


def zstd(data: bytes) -> bytes:
    checked: bytes = ZSTD.compress(data, options={ZSTD.CompressionParameter.checksum_flag: 1})
    return checked


def halves(compress: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    return lambda data: compress(data[: len(data) // 2]) + compress(data[len(data) // 2 :])


NOTES = b"\x50\x2a\x4d\x18\x03\x00\x00\x00abc"  # a skippable frame of zstd, such as pzstd writes first

KINDS: dict[str, Callable[[bytes], bytes]] = {
    "plain": bytes,
    "gzip": gzip.compress,
    "gzip in two members": halves(gzip.compress),
    "zstd": zstd,
    "zstd in two frames": halves(zstd),
    "zstd after a metadata frame": lambda data: NOTES + zstd(data),
}
kinds = pytest.mark.parametrize(
    "compress", [pytest.param(c, id=k, marks=[needs_zstd] if "zstd" in k else []) for k, c in KINDS.items()]
)
COMPRESSED = [
    pytest.param(".gz", gzip.compress, id="gzip"),
    pytest.param(".zst", zstd, id="zstd", marks=needs_zstd),
]


def expected(data: bytes, max_line: int = 2**20) -> list[tuple[int, bytes | int]]:
    """The expected lines; for too long ones, their lengths."""
    lines = data.split(b"\n")
    out: list[tuple[int, bytes | int]] = []
    for index, line in enumerate(lines):
        ended = index < len(lines) - 1
        text = line.removeprefix(b"\xef\xbb\xbf").strip(b" \t\r\n")
        if len(line) > max_line:
            out.append((index, len(line) + ended))
        elif text:
            out.append((index, text))
    return out


def found(path: str | Path, **more: Any) -> list[tuple[int, bytes | int]]:
    return [
        (index, int(line.message.split()[3].replace(",", "")) if isinstance(line, BadLine) else line)
        for index, line in read_lines(path, **more)
    ]


@kinds
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n",
        b"a",
        b"a\n",
        b"a\r\nb\r\n",
        b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n",
        b"\xef\xbb\xbf\n",
        b"\0\n\0\0",
        b"  a \n\t\n\r\n b",
        b"\xff\xfe\n\x1f\x8b\n",
        b"a\x0bb\x0cc\x85d\xe2\x80\xa8e\n\x0b\n",  # JSON has one line end
        b"\n" * 5000 + b"a",
        b"".join(b"%d\n" % n for n in range(50_000)),
    ],
)
def test_lines(tmp_path: Path, compress: Callable[[bytes], bytes], data: bytes) -> None:
    (tmp_path / "in").write_bytes(compress(data))
    assert found(tmp_path / "in") == found(str(tmp_path / "in")) == expected(data)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(
    data=st.binary(max_size=40) | st.lists(st.sampled_from(list(b" a\r\n\n\n\0")), max_size=40).map(bytes),
    max_line=st.integers(1, 12),
    kind=st.sampled_from(["plain", "gzip", *(["zstd"] if ZSTD else [])]),
)
def test_any_bytes_are_lines(tmp_path: Path, data: bytes, max_line: int, kind: str) -> None:
    (tmp_path / "in").write_bytes(KINDS[kind](data))
    assert found(tmp_path / "in", max_line=max_line) == expected(data, max_line)


@kinds
def test_a_line_of_30_mb_is_left_out_in_little_memory(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    size = 30_000_000
    (tmp_path / "in").write_bytes(compress(b'{"prompt": "a"}\n"' + b"x" * size + b'"\n{"prompt": "b"}\n'))
    tracemalloc.start()
    lines = list(read_lines(tmp_path / "in", max_line=2**20))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert lines == [
        (0, b'{"prompt": "a"}'),
        (1, BadLine("the line has 30,000,003 bytes; at most 1,048,576 are read")),
        (2, b'{"prompt": "b"}'),
    ]
    assert peak < 8 * 2**20


def test_by_default_a_line_may_have_64_mib(tmp_path: Path) -> None:
    with open(tmp_path / "in", "wb") as file:
        for length in (2**26, 2**26 + 1):
            file.seek(length, os.SEEK_CUR)  # NUL bytes that take no room on the disk
            file.write(b"\n")
    tracemalloc.start()
    lines = [len(line) if isinstance(line, bytes) else line.message for _, line in read_lines(tmp_path / "in")]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert lines == [2**26, "the line has 67,108,866 bytes; at most 67,108,864 are read"]
    assert peak < 3.5 * 2**26  # pieces, the line that they make, and the line before


def test_lines_come_before_the_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(gzip.compress(b"a\n" + b"b" * 10**7)[:-100])
    assert next(read_lines(tmp_path / "in")) == (0, b"a")


# -- files that cannot be used -----------------------------------------------------------------------------


@pytest.mark.parametrize(("ending", "compress"), COMPRESSED)
def test_a_file_that_is_cut_short_is_never_taken_for_whole(
    tmp_path: Path, ending: str, compress: Callable[[bytes], bytes]
) -> None:
    data = b"".join(b'{"prompt": "%d"}\n' % (n * n) for n in range(300))
    whole, path = compress(data), tmp_path / f"in.jsonl{ending}"
    counts = []
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        lines: list[tuple[int, bytes | BadLine]] = []
        with pytest.raises(BatchFileError, match=rf"in\.jsonl{ending}.* is cut short") as caught:
            lines += read_lines(path)  # extends with what comes before the error
        assert "copy it anew" in str(caught.value)
        if length >= 4:
            size = sum(len(line) + 1 for _, line in lines if isinstance(line, bytes))
            assert f"after line {len(lines):,} ({size:,} bytes)" in str(caught.value)
        assert lines == expected(data)[: len(lines)]
        counts.append(len(lines))
    assert counts == sorted(counts)
    assert counts[-1] == 300


@pytest.mark.parametrize(("ending", "compress"), COMPRESSED)
def test_a_damaged_file_is_never_taken_for_sound(
    tmp_path: Path, ending: str, compress: Callable[[bytes], bytes]
) -> None:
    data = b"".join(b'{"prompt": "%d"}\n' % (n * n) for n in range(100))
    whole, path = compress(data), tmp_path / f"in.jsonl{ending}"
    damaged = 0
    for position in range(4, len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x55]) + whole[position + 1 :])
        try:
            lines = found(path)
        except BatchFileError:
            damaged += 1
        else:
            assert lines == expected(data)  # of a time of day, for instance
    assert damaged > 0.9 * len(whole)
    path.write_bytes(whole + b"and something else")
    with pytest.raises(BatchFileError, match=r"is damaged \(.*\) after line 100 "):
        list(read_lines(path))


@needs_zstd
@pytest.mark.parametrize("frames_before", [0, 1])
def test_a_window_of_zstd_that_is_too_large_is_no_damage(tmp_path: Path, frames_before: int) -> None:
    """As of `zstd --long=30`; one of 2^27 is read."""

    def compressed(window_log: int) -> bytes:
        own = ZSTD.ZstdCompressor(options={ZSTD.CompressionParameter.window_log: window_log})
        return bytes(own.compress(b"a\n") + own.flush())

    (tmp_path / "in").write_bytes(zstd(b"b\n") * frames_before + compressed(30))
    told = (
        f"with a window of more than 128 MiB, which is not read .after line {frames_before}.: decompress it first"
    )
    with pytest.raises(BatchFileError, match=told):
        list(read_lines(tmp_path / "in"))
    (tmp_path / "in").write_bytes(compressed(27))
    assert found(tmp_path / "in") == [(0, b"a")]


def test_a_compressed_name_does_not_make_a_compressed_file(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl.gz").write_bytes(b'{"prompt": "a"}\n')
    assert found(tmp_path / "in.jsonl.gz") == [(0, b'{"prompt": "a"}')]


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(BatchFileError, match=r"cannot read .*nothing: No such file"):
        list(read_lines(tmp_path / "nothing"))
    with pytest.raises(BatchFileError, match=r"cannot read .*: Is a directory"):
        list(read_lines(tmp_path))
    if Path("/proc/self/mem").exists():
        with pytest.raises(BatchFileError, match="cannot read /proc/self/mem: Input/output error"):
            list(read_lines("/proc/self/mem"))


def test_a_disk_that_fails_says_how_far_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    class FailingInput(io.BytesIO):
        def readinto1(self, buffer: Any, /) -> int:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=FailingInput(b"a\nb\n")))  # all of it is the head
    lines = []
    with pytest.raises(BatchFileError, match=r"cannot read .*in.* beyond line 2 \(4 bytes\): Input/output error"):
        lines += read_lines(STANDARD)
    assert lines == [(0, b"a"), (1, b"b")]


@pytest.mark.parametrize(
    ("head", "module", "remedy"),
    [
        (
            b"\x28\xb5\x2f\xfd",
            "compression.zstd" if sys.version_info >= (3, 14) else "backports",
            "backports.zstd",
        ),
        (b"PAR1", "pyarrow", "pyarrow"),
    ],
)
def test_a_package_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: bytes, module: str, remedy: str
) -> None:
    (tmp_path / "in").write_bytes(head)
    monkeypatch.setitem(sys.modules, module, None)  # type: ignore[arg-type]
    with pytest.raises(BatchFileError, match=rf"{tmp_path}/in .*pip install .*{remedy}"):
        list(read_lines(tmp_path / "in"))


# -- standard input ----------------------------------------------------------------------------------------


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bytes, int], None]]:
    """Makes standard input give these bytes, so many at once."""
    threads = []

    def fill(data: bytes, at_once: int) -> None:
        reading, writing = os.pipe()
        monkeypatch.setattr(sys, "stdin", open(reading))  # noqa: SIM115

        def write() -> None:
            with open(writing, "wb", buffering=0) as file:
                for start in range(0, len(data), at_once):
                    file.write(data[start : start + at_once])

        threads.append(threading.Thread(target=write))
        threads[-1].start()

    yield fill
    for thread in threads:
        thread.join()
    if threads:
        sys.stdin.close()


@kinds
@pytest.mark.parametrize("at_once", [1, 3, 10_000])
def test_standard_input(
    pipe: Callable[[bytes, int], None], compress: Callable[[bytes], bytes], at_once: int
) -> None:
    data = b"\xef\xbb\xbfa\r\n\nb" + b"c" * 300
    pipe(compress(data), at_once)
    assert found(STANDARD) == expected(data)
    assert not sys.stdin.closed


def test_standard_input_that_cannot_be_read(
    pipe: Callable[[bytes, int], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pipe(gzip.compress(b"a\nb")[:-2], 100)
    with pytest.raises(BatchFileError, match=r"^standard input is cut short after line 1 \(2 bytes\)"):
        list(read_lines(STANDARD))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", None)
        with pytest.raises(BatchFileError, match="cannot read standard input: it is closed"):
            list(read_lines(STANDARD))
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"PAR1xxxxPAR1")))
        with pytest.raises(BatchFileError, match=r"standard input is a parquet file.*give its path"):
            list(read_lines(STANDARD))
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
        assert found(STANDARD) == []
    monkeypatch.chdir(tmp_path)
    Path("-").write_bytes(b"a")
    assert found(Path("-")) == found("./-") == [(0, b"a")]


# -- parquet -----------------------------------------------------------------------------------------------


def write_parquet(path: Path, rows: list[dict[str, Any]], **more: Any) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, **more)


def rows_of(path: Path, **more: Any) -> list[Any]:
    return [
        line.message if isinstance(line, BadLine) else json.loads(line) for _, line in read_lines(path, **more)
    ]


def test_rows_of_parquet_are_lines(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a\n\u2028\ud7ff", "custom_id": "a", "metadata": {"n": 1, "m": None}, "max_tokens": 5},
        {"token_ids": [1, 2], "sampling_params": {"temperature": 0.5, "stop": ["x"]}},
        {"messages": [{"role": "user", "content": "Who?"}], "custom_id": "c"},
    ]
    keys = {key for row in rows for key in row}
    write_parquet(tmp_path / "in", [{key: row.get(key) for key in keys} for row in rows])
    assert rows_of(tmp_path / "in") == rows
    parser = LineParser(SamplingParams())
    records = [parser.parse(line) for _, line in read_lines(tmp_path / "in")]
    assert [record.prompt for record in records] == [
        "a\n\u2028\ud7ff",
        [1, 2],
        Chat([{"role": "user", "content": "Who?"}]),
    ]
    assert [record.custom_id for record in records] == ["a", None, "c"]
    assert records[0].metadata == {"n": 1, "m": None}
    assert records[0].sampling_params.max_new_tokens == 5
    assert records[1].sampling_params.stop == ("x",)


def test_structs_of_different_keys_do_not_fill_each_other(tmp_path: Path) -> None:
    """All rows of a column have all its keys, with nulls for missing ones."""
    bodies = [
        {"model": "m", "messages": [{"role": "user", "content": "a"}], "temperature": 0.5},
        {"model": "m", "messages": [{"role": "user", "content": "b", "name": None}], "top_k": 3},
    ]
    rows = [{"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions"} for i in range(2)]
    for as_text in (False, True):
        filled = [
            {**row, "body": json.dumps(body) if as_text else body} for row, body in zip(rows, bodies, strict=True)
        ]
        write_parquet(tmp_path / "in", filled)
        parser = LineParser(SamplingParams())
        records = [parser.parse(line) for _, line in read_lines(tmp_path / "in")]
        assert [record.sampling_params.temperature for record in records] == [0.5, 1.0]
        assert [record.sampling_params.top_k for record in records] == [0, 3]
    write_parquet(
        tmp_path / "in", [{"prompt": "a", "sampling_params": {"top_k": k, "seed": None}} for k in (1, 2)]
    )
    assert [row["sampling_params"] for row in rows_of(tmp_path / "in")] == [{"top_k": 1}, {"top_k": 2}]


def test_maps_and_columns_of_pandas(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    bias = pyarrow.array([[("5", -1.0)]], type=pyarrow.map_(pyarrow.string(), pyarrow.float64()))
    names = pyarrow.array(["a"]).dictionary_encode()
    index = pyarrow.array([7])
    table = pyarrow.table({"prompt": names, "logit_bias": bias, "__index_level_0__": index})
    parquet.write_table(table, tmp_path / "in")
    assert rows_of(tmp_path / "in") == [{"prompt": "a", "logit_bias": {"5": -1.0}}]


def test_rows_that_are_not_json(tmp_path: Path) -> None:
    def only(row: dict[str, Any], **more: Any) -> Any:
        write_parquet(tmp_path / "in", [row])
        return rows_of(tmp_path / "in", **more)[0]

    assert only({"prompt": "a", "temperature": float("nan")}).startswith(
        "the row is not JSON: column 'temperature': Out"
    )
    date = datetime.datetime(2020, 1, 1)
    for row in (
        {"prompt": "a", "when": date},
        {"prompt": "a", "when": [date]},
        {"prompt": "a", "when": {"x": date}},
    ):
        assert only(row) == (
            "the row is not JSON: column 'when': Object of type datetime is not JSON serializable; "
            "make the column text, or leave it out"
        )
    assert "bytes is not JSON" in only({"prompt": b"a"})
    assert only({"body": "{"}).startswith("the row is not JSON: the text in body is not JSON: Expecting")
    assert only({"sampling_params": '{"a": 1, "a": 2}'}).endswith("is not JSON: key 'a' appears twice")
    assert only({"prompt": "x" * 100}, max_line=100) == "the row has 114 bytes as JSON; at most 100 are read"
    assert only({"prompt": None}) == {}  # a row is never blank: it gets its record


def test_row_groups_are_read_one_after_the_other(tmp_path: Path) -> None:
    rows = [{"prompt": str(n)} for n in range(1000)]
    write_parquet(tmp_path / "in", rows, row_group_size=300)
    assert rows_of(tmp_path / "in") == rows
    assert [index for index, _ in read_lines(tmp_path / "in")] == list(range(1000))


def test_parquet_that_is_cut_short(tmp_path: Path) -> None:
    write_parquet(tmp_path / "in.parquet", [{"prompt": str(n)} for n in range(1000)], row_group_size=300)
    whole = (tmp_path / "in.parquet").read_bytes()
    for length in (0, 3, 4, 100, len(whole) - 1):
        (tmp_path / "in.parquet").write_bytes(whole[:length])
        with pytest.raises(BatchFileError, match=r"in\.parquet"):
            list(read_lines(tmp_path / "in.parquet"))
    (tmp_path / "in.parquet").write_bytes(whole[:1500] + bytes(1000) + whole[2500:])
    with pytest.raises(BatchFileError, match=r"cannot read .*in\.parquet beyond row \d+: "):
        list(read_lines(tmp_path / "in.parquet"))


@kinds
def test_what_is_plain_is_told(compress: Callable[[bytes], bytes], tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(compress(b'{"prompt": "a"}\n'))
    assert is_plain(tmp_path / "in") == (compress is bytes)
    (tmp_path / "in").write_bytes(b"PAR1")
    assert not is_plain(tmp_path / "in")
    (tmp_path / "in").write_bytes(b"")
    assert is_plain(tmp_path / "in")
    with pytest.raises(BatchFileError, match="cannot read"):
        is_plain(tmp_path / "nothing")
