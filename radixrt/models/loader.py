"""Loading a model: from a folder or hub id to a Decoder whose weights are in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Literal, get_args

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import Tensor

from layers.norm import RMSNorm
from layers.placement import Placement
from radixrt.errors import ModelError
from radixrt.models.config import ModelConfig, read_architecture, read_json
from radixrt.models.decoder import Decoder
from radixrt.models.registry import find_architecture
from triton_ops.implementation import Impl

LoadFormat = Literal["auto", "dummy"]

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# Configs and tokenizers, fetched from the hub besides weights.
TEXT_PATTERNS = ("*.json", "*.txt", "*.model", "*.jinja")
_MAY_DIFFER = ("dtype", "initializer_range", "bos_token_id", "eos_token_ids")  # in weights of the same shape
STORED_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# Random numbers in dummy weights before they repeat: a prime, so that rows of a matrix differ.
DUMMY_PERIOD = 4194301


def load_model(
    source: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    context_length: int | None = None,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    impl: Impl = "auto",
) -> tuple[Decoder, ModelConfig]:
    """Load the model in `source`, a folder or a hub id in Hugging Face format, onto `device`.

    Args:
        dtype: a torch dtype or its name; "auto" is the checkpoint's, or float32 on a CPU.
        context_length: the longest sequence that the model will see; None: as its config says.
        load_format: "auto" reads safetensors, tensor by tensor, into place. "dummy" needs a config alone, and
            fills the weights with random numbers that depend on `seed`, not on the device.
        impl: which implementation of the operations.

    Raises:
        ModelError: the source cannot be used.
        ParameterError: the model cannot have this context length.
    """
    if load_format not in get_args(LoadFormat):
        raise ModelError(f"load_format {load_format!r} is unknown; these are: {', '.join(get_args(LoadFormat))}")
    folder = model_folder(source, weights=load_format == "auto")
    decoder = find_architecture(read_architecture(folder))
    config = decoder.config_class.from_folder(folder)
    if context_length is not None:
        config = config.with_context_length(context_length)
    device = torch.device(device)
    files = _weight_files(folder) if load_format == "auto" else []
    model = decoder(config, Placement(_resolve_dtype(dtype, config, device), device, impl))
    if load_format == "dummy":
        _fill_randomly(model, config.initializer_range, seed)
    else:
        _fill_from_files(model, config, files)
    return model.eval(), config


def reload_weights(
    model: Decoder, config: ModelConfig, source: str | Path, *, before_change: Callable[[], object]
) -> None:
    """Replace a model's weights by those of `source`, another checkpoint of the same shape.

    Names and shapes of all tensors are checked first: after a ModelError nothing has changed. `before_change` is
    called before the first weight is replaced.
    """
    folder = model_folder(source)
    other = find_architecture(read_architecture(folder)).config_class.from_folder(folder)
    other = other.with_context_length(config.context_length)
    if type(other) is not type(config):
        raise ModelError(f"{folder} holds a {other.architecture}, not a {config.architecture}")
    differing = [
        f"{field.name} is {getattr(other, field.name)!r}, not {getattr(config, field.name)!r}"
        for field in fields(config)
        if field.name not in _MAY_DIFFER and getattr(other, field.name) != getattr(config, field.name)
    ]
    if differing:
        raise ModelError(f"{folder} is not a checkpoint of this model: {'; '.join(differing)}")
    files = _weight_files(folder)
    _fill_from_files(model, config, files, check_only=True)
    before_change()
    _fill_from_files(model, config, files)


def model_folder(source: str | Path, *, weights: bool = True) -> Path:
    """Return the folder `source`, or the local copy of the hub's model of that name, fetched if need be.

    Without `weights` only configs and tokenizers are fetched. Raises ModelError.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    if isinstance(source, Path) or str(source).count("/") > 1 or str(source)[:1] in ("/", ".", "~"):
        raise ModelError(f"there is no folder {source}")
    patterns = [*TEXT_PATTERNS, "*.safetensors"] if weights else [*TEXT_PATTERNS]
    try:
        # Subfolders hold other formats of the same weights.
        return Path(snapshot_download(str(source), allow_patterns=patterns, ignore_patterns=["*/*"]))
    except Exception as error:  # offline, no such model, no access, not a name
        raise ModelError(
            f"{str(source)!r} is neither a folder nor a model that the hub gives: {type(error).__name__}: {error}"
        ) from error


def _resolve_dtype(dtype: str | torch.dtype, config: ModelConfig, device: torch.device) -> torch.dtype:
    return check_dtype(dtype) or (torch.float32 if device.type == "cpu" else config.dtype)


def check_dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    """The dtype of that name; None for "auto". Raises ModelError where no model can have it."""
    if dtype == "auto":
        return None
    resolved = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if resolved not in (torch.float32, torch.bfloat16, torch.float16):
        raise ModelError(f"dtype {dtype!r} is not supported; 'auto', 'float32', 'bfloat16' and 'float16' are")
    return resolved


def _weight_files(folder: Path) -> list[Path]:
    """List the safetensors files of a folder, each once."""
    index = folder / INDEX_FILE
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index} holds no weight_map")
        names = sorted({str(name) for name in weight_map.values()})
        if any(Path(name).name != name for name in names):
            raise ModelError(f"{index} names files outside its folder: {_abbreviate(names)}")
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ModelError(f"{folder} lacks weight files that its index names: {_abbreviate(missing)}")
        return [folder / name for name in names]
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    pickles = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
    if pickles:
        raise ModelError(
            f"{folder} holds its weights as {_abbreviate(pickles)}: pickles can run code and are not read. "
            "Convert them to safetensors (transformers' save_pretrained writes them)."
        )
    raise ModelError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}")


def _stored_tensors(files: Iterable[Path], model: Decoder) -> Iterator[tuple[Path, str, Tensor]]:
    """Yield every tensor of the files under the name that `model` has for it."""
    for file in files:
        try:
            with safe_open(file, framework="pt", device="cpu") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                    for part, tensor in model.split_stored(name, tensors.get_tensor(name)):
                        yield file, part, tensor
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} cannot be read: {error}") from error


def _fill_from_files(model: Decoder, config: ModelConfig, files: list[Path], *, check_only: bool = False) -> None:
    places = dict(model.checkpoint_tensors())
    missing = dict(places)
    extra = []
    for file, name, tensor in _stored_tensors(files, model):
        if name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name == "lm_head.weight"):
            continue
        if name not in places:
            extra.append(name)
            continue
        if name not in missing:
            raise ModelError(f"tensor {name} is stored twice; the second time in {file}")
        place = missing.pop(name)
        if tensor.shape != place.shape:
            raise ModelError(
                f"tensor {name} in {file} has shape {list(tensor.shape)}; config.json asks for {list(place.shape)}"
            )
        if tensor.dtype not in STORED_DTYPES:
            raise ModelError(f"tensor {name} in {file} is {tensor.dtype}; quantised weights are not supported")
        if not check_only:
            place.copy_(tensor)
    wrong = []
    if missing:
        wrong.append(f"{len(missing)} tensors are missing: {_abbreviate(sorted(missing))}")
    if extra:
        wrong.append(f"{len(extra)} tensors belong nowhere: {_abbreviate(sorted(extra))}")
    if wrong:
        raise ModelError(
            f"the weights in {files[0].parent} are not those of the {config.architecture} of config.json: "
            + "; ".join(wrong)
        )


def _fill_randomly(model: Decoder, std: float, seed: int) -> None:
    """Make norms neutral, and fill all other weights from one long cycle of normal numbers, mean 0 and `std`."""
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.weight.fill_(module.neutral)
    noise = torch.empty(DUMMY_PERIOD, device="cpu")
    noise.normal_(std=std, generator=torch.Generator(device="cpu").manual_seed(seed))
    noise = noise.to(model.norm.weight)  # its device and dtype: rounded once, then copied
    offset = 0
    for name, place in model.checkpoint_tensors():
        if name.endswith("norm.weight"):
            continue
        flat = place.view(-1)  # a stack's parts are whole rows: contiguous
        start = 0
        while start < flat.numel():
            piece = noise[offset : offset + flat.numel() - start]
            flat[start : start + piece.numel()].copy_(piece)
            start += piece.numel()
            offset = (offset + piece.numel()) % DUMMY_PERIOD


def _abbreviate(names: list[str]) -> str:
    shown = ", ".join(names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
