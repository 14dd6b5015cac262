"""GGUF files: converted once to a folder in Hugging Face format, with weights in bfloat16, which all else reads.

What llama.cpp writes differs from a checkpoint in names, in the order of rows, and in what it leaves out of the
config: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The package `gguf` dequantises it.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from layers.placement import Placement
from radixrt.errors import ModelError
from radixrt.models.config import ModelConfig
from radixrt.models.gguf_config import ARCHITECTURES, ROPE_TENSORS, checked_architecture, dequantised, read_config
from radixrt.models.gguf_header import Header, read_header
from radixrt.models.gguf_tokenizer import Vocabulary, write_tokenizer
from radixrt.models.registry import find_architecture
from radixrt.models.weight_files import INDEX_FILE, abbreviate

SUFFIX = ".gguf"
VERSION = 3  # of what is written here
CACHE_VARIABLE = "RADIXRT_CACHE"
SHARD_BYTES = 2**31

_EXPERT = re.compile(r"(.*\.experts)\.([0-9]+)\.(\w+)\.weight")

_log = logging.getLogger(__name__)


def is_gguf(path: Path) -> bool:
    """By its name."""
    return path.suffix.lower() == SUFFIX


def converted(file: Path) -> Path:
    """The folder that a GGUF file has been converted to: now, or before if the file has not changed since.

    It lies in `$RADIXRT_CACHE/gguf`, by default `~/.cache/radixrt/gguf`. Of several processes one converts, and
    the others wait. Raises ModelError.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(f"{file}: reading GGUF needs one more package: pip install 'radixrt[gguf]'")
    status = file.stat()
    identity = f"{VERSION} {file.resolve()} {status.st_size} {status.st_mtime_ns}"
    name = f"{file.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    cache = Path(os.environ.get(CACHE_VARIABLE) or "~/.cache/radixrt").expanduser() / "gguf"
    folder, unfinished = cache / name, cache / f".{name}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f".{name}.lock"):
            if all((folder / each).is_file() for each in ("config.json", INDEX_FILE)):
                return folder
            for left in (folder, unfinished):  # of a process that was killed, or half deleted
                shutil.rmtree(left, ignore_errors=True)
            _log.info("%s is converted to %s", file, folder)
            unfinished.mkdir()
            try:
                _convert(file, unfinished)
                for made in unfinished.rglob("*"):
                    if made.is_file():
                        with made.open("rb") as written:
                            os.fsync(written.fileno())
                unfinished.rename(folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    except ModelError as error:
        raise ModelError(f"{file} cannot be used: {error}") from error
    except Exception as error:  # whatever the packages raise of a file that they cannot read
        _log.debug("%s cannot be used", file, exc_info=True)
        raise ModelError(f"{file} cannot be used: {type(error).__name__}: {error}") from error
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of that path, which is there only while a process holds it or waits for it."""
    while True:
        with path.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Who had it before may have removed it: then others do not see this one.
            if path.exists() and os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return


def _convert(file: Path, folder: Path) -> None:
    """Write config, tokenizer and weights."""
    header = read_header(file)
    arch = checked_architecture(header)
    vocabulary = Vocabulary.of(header)
    rows = header.tensors["token_embd.weight"].shape[0]
    if len(vocabulary.pieces) > rows:
        raise ModelError(f"it has {len(vocabulary.pieces):,} tokens, and embeddings of {rows:,}")
    known = read_config(header, arch)
    known.eos_token_id = vocabulary.end_tokens(header)  # its class has those of another vocabulary
    known.save_pretrained(folder)
    write_tokenizer(vocabulary, header, folder)

    decoder = find_architecture(ARCHITECTURES[arch][0])
    config = decoder.config_class.from_folder(folder).with_context_length(2)
    skeleton = decoder(config, Placement(torch.bfloat16, torch.device("meta")))
    names = [name for name, _ in skeleton.checkpoint_tensors()]
    needed = 2 * sum(math.prod(tensor.shape) for tensor in header.tensors.values())
    if (free := shutil.disk_usage(folder).free) < needed:
        raise ModelError(
            f"it takes {needed / 1e9:.1f} GB in bfloat16, and {folder.parent} has room for {free / 1e9:.1f} GB; "
            f"{CACHE_VARIABLE} names another folder"
        )
    _write_weights(_tensors(header, arch, names, config), folder, len(names))


def _tensors(header: Header, arch: str, names: Iterable[str], config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """The tensors of those names, in bfloat16. Raises ModelError if one is missing, or belongs nowhere."""
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

    number = next(number for number in MODEL_ARCH if MODEL_ARCH_NAMES[number] == arch)
    known = get_tensor_name_map(number, config.num_layers)
    wanted: dict[str, list[str]] = {}  # names of a stored tensor: of one, or of all experts in turn
    for name in names:
        of_expert = _EXPERT.fullmatch(name)
        stem, _, kind = (f"{of_expert[1]}.{of_expert[3]}.weight" if of_expert else name).rpartition(".")
        stored = known.get_name(stem)
        wanted.setdefault(f"{stored or stem}.{kind}", []).append(name)
    stored_names = header.tensors.keys() - {*ROPE_TENSORS}
    if missing := sorted(wanted.keys() - stored_names):
        raise ModelError(f"it lacks {len(missing)} tensors: {abbreviate(missing)}")
    if extra := sorted(stored_names - wanted.keys()):
        raise ModelError(f"{len(extra)} tensors of the file belong nowhere: {abbreviate(extra)}")
    for stored_name, tensor in header.tensors.items():
        if (targets := wanted.get(stored_name)) is None:
            continue
        values = dequantised(tensor)
        stem = stored_name.split(".")[-2]
        if arch == "llama" and (heads := {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(stem)):
            # Halves of a head's rows are stored in turn.
            values = values.view(heads, -1, 2, *values.shape[1:]).transpose(1, 2).flatten(0, 2)
        if arch in ("gemma2", "gemma3") and stored_name.endswith("norm.weight"):
            values = values - 1.0  # a checkpoint has what is added to 1
        parts = values if _EXPERT.fullmatch(targets[0]) else [values]
        for name, part in zip(targets, parts, strict=True):
            yield name, part.to(torch.bfloat16).contiguous()


def _write_weights(tensors: Iterable[tuple[str, Tensor]], folder: Path, count: int) -> None:
    """In files of about SHARD_BYTES, with their index."""
    held: dict[str, Tensor] = {}
    weight_map: dict[str, str] = {}

    def write() -> None:
        shard = f"model-{len(set(weight_map.values())) + 1:05}.safetensors"
        save_file(held, folder / shard)
        weight_map.update(dict.fromkeys(held, shard))
        held.clear()

    for name, tensor in tqdm(tensors, "converting", total=count, unit=" tensors", disable=None):
        held[name] = tensor
        if sum(each.nbytes for each in held.values()) >= SHARD_BYTES:
            write()
    if held:
        write()
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
