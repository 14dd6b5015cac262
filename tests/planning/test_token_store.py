"""Token ids on disk."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from radixrt.errors import BatchFileError, JournalError
from radixrt.planning import token_store
from radixrt.planning.token_store import OFFSETS_FILE, TOKENS_FILE, TokenStore, TokenWriter
from tests.support.file_limit import file_limit

PROMPTS = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), max_size=8)


def prompts_of(store: TokenStore) -> list[list[int]]:
    return [store[i].tolist() for i in range(len(store))]


def write(folder: Path, *batches: list[list[int]]) -> TokenStore:
    with TokenWriter(folder) as writer:
        for batch in batches:
            writer.append([np.array(prompt, dtype=np.int64) for prompt in batch])
        return writer.finish()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches=st.lists(PROMPTS, max_size=3))
def test_what_is_written_is_read(tmp_path: Path, batches: list[list[list[int]]]) -> None:
    store = write(tmp_path / "tokens", *batches)
    expected = [prompt for batch in batches for prompt in batch]
    assert prompts_of(store) == expected == prompts_of(TokenStore.of(expected))
    assert store.lengths.tolist() == [len(prompt) for prompt in expected]
    assert (store.tokens.dtype, store.offsets.dtype) == (np.int32, np.int64)
    store.forget()
    assert prompts_of(store) == expected


def test_files_are_little_endian_numbers(tmp_path: Path) -> None:
    write(tmp_path, [[1, 258], []], [[3]])
    assert (tmp_path / TOKENS_FILE).read_bytes() == bytes([1, 0, 0, 0, 2, 1, 0, 0, 3, 0, 0, 0])
    assert (tmp_path / OFFSETS_FILE).read_bytes() == b"".join(n.to_bytes(8, "little") for n in (0, 2, 2, 3))


def test_a_store_is_mapped_and_read_only(tmp_path: Path) -> None:
    store = write(tmp_path, [[1, 2]])
    with pytest.raises(ValueError, match="read-only"):
        store.tokens[0] = 5


@pytest.mark.parametrize("ids", [[-1], [2**31], [5, 2**40]])
def test_ids_that_are_none_are_refused(tmp_path: Path, ids: list[int]) -> None:
    with TokenWriter(tmp_path) as writer:
        writer.append([np.array([7])])
        with pytest.raises(ValueError, match=r"are not all in 0\.\."):
            writer.append([np.array([8]), np.array(ids)])
        assert prompts_of(writer.finish()) == [[7]]
    with pytest.raises(ValueError, match=r"are not all in 0\.\."):
        TokenStore.of([ids])


def test_a_store_that_is_not_finished_leaves_nothing(tmp_path: Path) -> None:
    with TokenWriter(tmp_path) as writer:
        writer.append([np.array([7])])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(BatchFileError, match="cannot read the tokens"):
        TokenStore.open(tmp_path)


@pytest.mark.parametrize(
    ("name", "size"), [(TOKENS_FILE, 4), (TOKENS_FILE, 6), (OFFSETS_FILE, 8), (OFFSETS_FILE, 0)]
)
def test_a_store_that_was_cut_short_is_refused(tmp_path: Path, name: str, size: int) -> None:
    write(tmp_path, [[1, 2], [3]])
    file = tmp_path / name
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(BatchFileError, match="not whole"):
        TokenStore.open(tmp_path)


def test_a_writer_replaces_what_was_there(tmp_path: Path) -> None:
    write(tmp_path, [[1, 2], [3]])
    assert prompts_of(write(tmp_path, [[4]])) == [[4]]


def test_a_path_that_cannot_be_is_told(tmp_path: Path) -> None:
    with pytest.raises(BatchFileError, match="cannot write the tokens") as caught:
        TokenWriter(tmp_path / "no" / "folder")
    assert caught.type is BatchFileError  # the same command would fail again


def test_a_disk_that_refuses_is_told(tmp_path: Path) -> None:
    refused = pytest.raises(JournalError, match=r"cannot write the tokens in .*: File too large; raise the limit")
    with file_limit(100_000), refused, TokenWriter(tmp_path / "tokens") as writer:
        writer.append([np.zeros(50_000, dtype=np.int32)])
    assert list((tmp_path / "tokens").iterdir()) == []


def test_a_disk_that_cannot_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, [[1]])

    def fail(*args: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(token_store, "open", fail, raising=False)
    with pytest.raises(JournalError, match=r"cannot read the tokens in .*: Input/output error; see to the disk"):
        TokenStore.open(tmp_path)
