"""Where a checkpoint's tensors are: in safetensors files, or in memory; and what they say of themselves."""

# Tests: tests/models/test_loader.py

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from radixrt.errors import ModelError
from radixrt.models.config import read_json

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")

# A mixture of 235B parameters needs 5 MB for either.
MAX_INDEX_BYTES = 2**25
MAX_HEADER_BYTES = 2**26  # of all files

_LAYER = re.compile(r"model\.layers\.([0-9]{1,9})\.")


WeightSource = str | Path | Mapping[str, Tensor]  # as of `Runtime.update_weights`

WORDS = {  # of safetensors
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint8: "U8",
    torch.int32: "I32",
}


def check_source(source: object) -> None:
    """Raise ModelError where weights cannot come from what `source` is."""
    if not isinstance(source, (str, Path, Mapping)):
        raise ModelError(f"weights are a {type(source).__name__}; give a path, a hub id or tensors by name")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint.

    Attributes:
        where: the file that it is in, or what else, for errors.
        dtype: in the words of safetensors, such as "BF16".
    """

    where: Path | str
    name: str
    shape: tuple[int, ...]
    dtype: str


Wanted = Callable[[StoredTensor], bool]


@dataclass(frozen=True)
class WeightFiles:
    """The files of a folder, each once, with `named`: the tensors that the index names, if there is one. As of
    WeightTensors, `str` tells where they are, for errors.
    """

    folder: Path
    files: tuple[Path, ...]
    named: frozenset[str]

    def __str__(self) -> str:
        return str(self.folder)

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
            with _refusals(file):
                left -= _header_bytes(file, left)
                with safe_open(file, framework="pt", device="cpu") as tensors:
                    found += _in_file(file, tensors)
        return found

    def tensors(self, wanted: Wanted) -> Iterator[tuple[str, Tensor]]:
        """A file is mapped to memory: of what nobody looks at nothing is read."""
        for file in self.files:
            with _refusals(file), safe_open(file, framework="pt", device="cpu") as tensors:
                for stored in _in_file(file, tensors):
                    if wanted(stored):
                        yield stored.name, tensors.get_tensor(stored.name)


class WeightTensors:
    """Tensors in memory, by the names that they have in the model's files: on any device, as a state dict.

    Raises ModelError where one is no tensor with numbers of its own.
    """

    named: frozenset[str] = frozenset()

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if not isinstance(name, str):
                raise ModelError(f"{name!r} of the given weights is no name of a tensor")
            if not isinstance(tensor, Tensor):
                raise ModelError(f"{name!r} of the given weights is a {type(tensor).__name__}, not a tensor")
            if hasattr(tensor, "full_tensor"):
                raise ModelError(f"{name} of the given weights is in parts (DTensor); give its full_tensor()")
            if tensor.is_meta or tensor.layout is not torch.strided:
                kind = "on the device meta" if tensor.is_meta else f"of the layout {tensor.layout}"
                raise ModelError(f"{name} of the given weights is {kind}")
        self._tensors = {name: tensor.detach() for name, tensor in tensors.items()}

    def __str__(self) -> str:
        return "the given mapping"

    def stored(self) -> list[StoredTensor]:
        return [_of_tensor(name, tensor) for name, tensor in self._tensors.items()]

    def tensors(self, wanted: Wanted) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._tensors.items():
            if wanted(_of_tensor(name, tensor)):
                yield name, tensor

    def write(self, file: Path) -> None:
        """Make a safetensors file of them. Raises OSError."""
        own, storages = dict[str, Tensor](), set[int]()
        for name, tensor in self._tensors.items():
            own[name] = tensor.cpu().contiguous()
            if (storage := own[name].untyped_storage().data_ptr()) in storages:
                own[name] = own[name].clone()  # such as a tied head: a file has each by itself
            storages.add(storage)
        try:
            save_file(own, file)
        except SafetensorError as error:
            raise OSError(f"{file} cannot be written: {error}") from error


Weights = WeightFiles | WeightTensors
"""The tensors of a checkpoint."""


def _of_tensor(name: str, tensor: Tensor) -> StoredTensor:
    dtype = WORDS.get(tensor.dtype, str(tensor.dtype))
    return StoredTensor("the given mapping", name, tuple(tensor.shape), dtype)


def _in_file(file: Path, tensors: Any) -> Iterator[StoredTensor]:
    for name in tensors.keys():  # noqa: SIM118 (not a mapping)
        part = tensors.get_slice(name)
        yield StoredTensor(file, name, tuple(part.get_shape()), part.get_dtype())


@contextmanager
def _refusals(file: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error


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
