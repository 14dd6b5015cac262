"""The safetensors files of a model folder: which there are, and what their headers say is in them."""

# Tests: tests/models/test_loader.py

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from radixrt.errors import ModelError
from radixrt.models.config import read_json

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")

# A mixture of 235B parameters needs 5 MB for either.
MAX_INDEX_BYTES = 2**25
MAX_HEADER_BYTES = 2**26  # of all files

_LAYER = re.compile(r"model\.layers\.([0-9]{1,9})\.")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, as its header describes it; `dtype` in the words of safetensors, such as "BF16"."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class WeightFiles:
    """The files of a folder, each once, with `named`: the tensors that the index names, if there is one."""

    folder: Path
    files: tuple[Path, ...]
    named: frozenset[str]

    @classmethod
    def of(cls, folder: Path) -> WeightFiles:
        """Those of a folder. Raises ModelError if there are none, or not those of the index."""
        index = folder / INDEX_FILE
        if index.exists():
            weight_map = read_json(index, MAX_INDEX_BYTES).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise ModelError(f"{index} holds no weight_map")
            names = sorted({str(name) for name in weight_map.values()})
            if any(Path(name).name != name for name in names):
                raise ModelError(f"{index} names files outside its folder: {abbreviate(names)}")
            present = {file.name for file in folder.iterdir()}
            if missing := [name for name in names if name not in present]:
                raise ModelError(f"{folder} lacks weight files that its index names: {abbreviate(missing)}")
            return cls(folder, tuple(folder / name for name in names), frozenset(weight_map))
        if (folder / SINGLE_FILE).is_file():
            return cls(folder, (folder / SINGLE_FILE,), frozenset())
        pickles = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
        if pickles:
            raise ModelError(
                f"{folder} holds its weights as {abbreviate(pickles)}: pickles can run code and are not read. "
                "Convert them to safetensors (transformers' save_pretrained writes them)."
            )
        raise ModelError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}")

    def stored(self) -> list[StoredTensor]:
        """Every tensor by the files' headers, whose lengths are judged before they are read. Raises ModelError."""
        left = MAX_HEADER_BYTES
        found: list[StoredTensor] = []
        for file in self.files:
            try:
                left -= _header_bytes(file, left)
                with safe_open(file, framework="pt", device="cpu") as tensors:
                    for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                        part = tensors.get_slice(name)
                        found.append(StoredTensor(file, name, tuple(part.get_shape()), part.get_dtype()))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{file} cannot be read: {error}") from error
        return found


def _header_bytes(file: Path, most: int) -> int:
    """How long the header of a file is. Raises ModelError if that is more than `most`, or than the file."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
    size = file.stat().st_size
    if length + 8 > size:
        raise ModelError(f"{file} cannot be read: its header has {length:,} bytes, the file only {size:,}")
    if length > most:
        raise ModelError(f"{file} has a header of {length:,} bytes; all headers may have {MAX_HEADER_BYTES:,}")
    return length


def num_layers_of(stored: list[StoredTensor]) -> int | None:
    """How many layers the names of tensors speak of; None if they speak of none."""
    found = {int(match[1]) for tensor in stored if (match := _LAYER.match(tensor.name))}
    return max(found) + 1 if found else None


def abbreviate(names: list[str]) -> str:
    """The first names of a list, and how many more there are."""
    shown = ", ".join(names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
