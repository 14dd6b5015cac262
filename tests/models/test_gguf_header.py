"""Headers of GGUF files: what is told of the file is checked against the file before it is believed."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from radixrt import ModelError
from radixrt.models.gguf_header import read_header
from tests.support import checkpoints

gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install 'radixrt[gguf]'")

from tests.support.gguf_files import BYTE_LEVEL_SIZE, write_gguf  # noqa: E402 (needs gguf)

U8, U32, F32, BOOL, TEXT, ARRAY, U64 = 0, 4, 6, 7, 8, 9, 10


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def field(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, sizes: list[int], kind: int = 0, offset: int = 0, dimensions: int | None = None) -> bytes:
    count = len(sizes) if dimensions is None else dimensions
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", count, *sizes, kind, offset)


def array(kind: int, count: int, values: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + values


def whole(
    fields: list[bytes] = [],  # noqa: B006
    tensors: list[bytes] = [],  # noqa: B006
    data: bytes = bytes(256),
    counts: tuple[int, int] | None = None,
    version: int = 3,
) -> bytes:
    header = b"GGUF" + struct.pack("<IQQ", version, *(counts or (len(tensors), len(fields))))
    header += b"".join([*fields, *tensors])
    return header + bytes(-len(header) % 32) + data


def test_what_is_read(tmp_path: Path) -> None:
    """All types, as gguf's own writer writes them and its reader reads them."""
    file = write_gguf(checkpoints.llama(), tmp_path / "a.gguf", stored_as=gguf.GGMLQuantizationType.F16)
    found, expected = read_header(file), gguf.GGUFReader(file)
    fields = {name: each.contents() for name, each in expected.fields.items() if not name.startswith("GGUF.")}
    assert {name: found.field(name) for name in found.fields} == fields
    assert [*found.tensors] == [each.name for each in expected.tensors]
    for each in expected.tensors:
        own = found.tensors[each.name]
        assert own.shape == tuple(reversed(each.shape.tolist()))
        assert own.data.tobytes() == each.data.tobytes()
        assert own.kind == each.tensor_type
    more = tmp_path / "more.gguf"
    more.write_bytes(whole([field("a", BOOL, b"\1"), field("b", ARRAY, array(U8, 3, b"abc"))], version=2))
    header = read_header(more)
    assert (header.fields["a"], header.field("b")) == (True, [97, 98, 99])
    assert header.field("b", np.ndarray).dtype == np.uint8
    with pytest.raises(ModelError, match="a is of the type bool, not int"):
        header.field("a", int)


DAMAGED: dict[str, tuple[bytes, str]] = {
    "short": (b"GGUF", "it has 4 bytes, fewer than any"),
    "magic": (b"GGML" + bytes(100), "begins with b'GGML', not with GGUF"),
    "version": (whole(version=1), "version 1; 2 and 3 are"),
    "order": (whole(version=3 << 24), "version 50,331,648, or in the other byte order"),
    "fields": (whole(counts=(0, 2**60)), "to hold 1,152,921,504,606,846,976 fields, and 264 bytes are left"),
    "tensors": (whole(counts=(2**63, 0)), "to hold 9,223,372,036,854,775,808 tensors"),
    "texts": (whole([field("a", ARRAY, array(TEXT, 2**61))]), "2,305,843,009,213,693,952 texts in a, and"),
    "texts that overlap the end": (
        whole([field("a", ARRAY, array(TEXT, 20, b"\xff" * 200))]),
        "text 0 of a ends at 18,446,744,073,709,551,6.., beyond",
    ),
    "numbers": (whole([field("a", ARRAY, array(F32, 2**62))]), "4,611,686,018,427,387,904 values in a"),
    "bools": (whole([field("a", ARRAY, array(BOOL, 10**4))]), "10,000 values in a, and"),
    "lists of lists": (whole([field("a", ARRAY, array(ARRAY, 1))]), "a is a list of the type 9"),
    "a type": (whole([field("a", 77, b"")]), "a is of the type 77"),
    "a text": (
        whole([field("a", TEXT, struct.pack("<Q", 2**64 - 1))]),
        "a would take 18,446,744,073,709,551,615 b",
    ),
    "a name": (whole([struct.pack("<Q", 2**40)], data=bytes(64)), "a field's name would take 1,099,511,627,776 "),
    "UTF-8": (whole([field("a", TEXT, struct.pack("<Q", 2) + b"\xff\xfe")]), "a is not UTF-8"),
    "a name twice": (whole([field("a", U8, b"1")] * 2), "the field 'a' is there twice"),
    "alignment": (whole([field("general.alignment", U32, struct.pack("<I", 24))]), "24, not a power of two"),
    "no alignment": (whole([field("general.alignment", U32, bytes(4))]), "0, not a power of two"),
    "a tensor twice": (
        whole([], [tensor("t", [4]), tensor("t", [4], offset=32)]),
        "the tensor 't' is there twice",
    ),
    "dimensions": (whole([], [tensor("t", [], dimensions=2**31)]), "t has 2,147,483,648 dimensions"),
    "no dimensions": (whole([], [tensor("t", [])]), "t has 0 dimensions"),
    "sizes": (whole([], [tensor("t", [2**63, 2**63])]), "the tensor t would take "),
    "a size that wraps": (whole([], [tensor("t", [2**32, 2**32, 2**32])]), "the tensor t would take "),
    "an empty tensor": (whole([], [tensor("t", [4, 0])]), "the sizes .4, 0., which F32 cannot store"),
    "a part of a block": (whole([], [tensor("t", [33], kind=8)]), "the sizes .33., which Q8_0 cannot store"),
    "a kind": (whole([], [tensor("t", [4], kind=999)]), "t is quantised as 999"),
    "an offset": (whole([], [tensor("t", [4], offset=2**63)]), "t would take 16 bytes where 0 are left"),
    "an odd offset": (whole([], [tensor("t", [4], offset=4)]), "t begins at 4, no multiple of 32"),
    "overlap": (whole([], [tensor("t", [16]), tensor("u", [16], offset=32)]), "the tensors t and u overlap"),
    "one inside another": (
        whole([], [tensor("t", [2], offset=32), tensor("u", [64])]),
        "the tensors u and t overlap",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_what_is_damaged(name: str, tmp_path: Path) -> None:
    """In little memory, however much the file says that it holds."""
    file = tmp_path / "a.gguf"
    data, message = DAMAGED[name]
    file.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=message):
            read_header(file)
        assert tracemalloc.get_traced_memory()[1] < 10**6
    finally:
        tracemalloc.stop()


def fuzzed(folder: Path, seed: int, count: int) -> dict[str, Any]:
    write_gguf(checkpoints.llama(num_hidden_layers=1), folder / "llama.gguf")
    write_gguf(checkpoints.gemma3(num_hidden_layers=1), folder / "gemma3.gguf")
    byte_level = checkpoints.qwen2(num_hidden_layers=1, vocab_size=BYTE_LEVEL_SIZE)
    stored_as = gguf.GGMLQuantizationType.F16
    write_gguf(byte_level, folder / "qwen2.gguf", pre="qwen2", stored_as=stored_as)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.support.gguf_fuzz", str(folder), str(seed), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["converted"] + sum(found["errors"].values()) == count
    return found


def test_mutated_files(tmp_path: Path) -> None:
    found = fuzzed(tmp_path, seed=0, count=120)
    assert found["converted"] > 5
    assert len(found["errors"]) > 20


@pytest.mark.long
def test_3000_mutated_files(tmp_path: Path) -> None:
    found = fuzzed(tmp_path, seed=1000, count=3000)
    print(found["converted"], len(found["errors"]))
