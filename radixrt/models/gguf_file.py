"""GGUF files: converted once to a folder in Hugging Face format, with weights in bfloat16, which all else reads.

What llama.cpp writes differs from a checkpoint in names, in the order of rows, and in what it leaves out of the
config: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The package `gguf` reads and dequantises it,
transformers knows most of the config and the tokenizer.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from tokenizers import Regex, decoders, normalizers, pre_tokenizers, processors
from torch import Tensor
from tqdm import tqdm

from layers.placement import Placement
from radixrt.errors import ModelError
from radixrt.models.config import ModelConfig, check_sizes
from radixrt.models.registry import find_architecture
from radixrt.models.weight_files import INDEX_FILE, abbreviate

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

SUFFIX = ".gguf"
VERSION = 3  # of what is written here
CACHE_VARIABLE = "RADIXRT_CACHE"
SHARD_BYTES = 2**31

# By general.architecture.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
# How byte-level tokenizers split texts, by tokenizer.ggml.pre: one regular expression after the other.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_WORDS % "{1,3}",),
    "qwen2": (_WORDS % "",),
    "deepseek-r1-qwen": (_WORDS % "",),
}
# Numbers of layers of the two models that scale scores by hidden_size / num_heads; all others do by head_dim.
_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}
# Sizes of config.json, by what a file calls them.
_SIZES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "context_length": "max_position_embeddings",
    "expert_count": "num_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
}
# What chats' turns end with, whatever the file says.
_ENDS = {"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"}
_CONTROL = (3, 4)  # token types: control, user-defined
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# What else may be told of yarn, and what changes nothing.
_OF_YARN = {"yarn_ext_factor": 1.0, "yarn_attn_factor": 1.0, "attn_factor": 1.0, "yarn_log_multiplier": 0.0}
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
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise ModelError(f"{file}: reading GGUF needs one more package: pip install 'radixrt[gguf]'") from error
    status = file.stat()
    identity = f"{VERSION} {file.resolve()} {status.st_size} {status.st_mtime_ns}"
    name = f"{file.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    cache = Path(os.environ.get(CACHE_VARIABLE) or "~/.cache/radixrt").expanduser() / "gguf"
    folder, unfinished = cache / name, cache / f".{name}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / f".{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if all((folder / each).is_file() for each in ("config.json", INDEX_FILE)):
                return folder
            for left in (folder, unfinished):  # of a process that was killed, or half deleted
                shutil.rmtree(left, ignore_errors=True)
            _log.info("%s is converted to %s", file, folder)
            unfinished.mkdir()
            try:
                _convert(file, gguf.GGUFReader(file), unfinished)
                for made in unfinished.iterdir():
                    with made.open("rb") as written:
                        os.fsync(written.fileno())
                unfinished.rename(folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    except ModelError:
        raise
    except Exception as error:  # whatever gguf and transformers raise of a file that they cannot read
        _log.debug("%s cannot be used", file, exc_info=True)
        raise ModelError(f"{file} cannot be used: {type(error).__name__}: {error}") from error
    return folder


def _convert(file: Path, reader: GGUFReader, folder: Path) -> None:
    """Write config, tokenizer and weights."""
    from transformers import AutoConfig, AutoTokenizer

    arch = _checked_architecture(file, reader)
    with _alone(file, reader, folder / "alone") as (place, name):
        known: Any = AutoConfig.from_pretrained(place, gguf_file=name, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=name, trust_remote_code=False)
    _fill_config(known, arch, reader)
    known.eos_token_id = _end_tokens(reader)  # its class has those of another vocabulary
    known.save_pretrained(folder)
    _fill_tokenizer(tokenizer, reader)
    tokenizer.save_pretrained(folder)

    decoder = find_architecture(ARCHITECTURES[arch])
    config = decoder.config_class.from_folder(folder).with_context_length(2)
    skeleton = decoder(config, Placement(torch.bfloat16, torch.device("meta")))
    names = [name for name, _ in skeleton.checkpoint_tensors()]
    needed = 2 * sum(int(tensor.n_elements) for tensor in reader.tensors)
    if (free := shutil.disk_usage(folder).free) < needed:
        raise ModelError(
            f"{file} takes {needed / 1e9:.1f} GB in bfloat16, and {folder.parent} has room for "
            f"{free / 1e9:.1f} GB; {CACHE_VARIABLE} names another folder"
        )
    _write_weights(_tensors(reader, arch, names, config), folder, len(names))


def _checked_architecture(file: Path, reader: GGUFReader) -> str:
    """The architecture that a file holds. Raises ModelError where it, or a size, is not one that can be read."""
    arch = _field(reader, "general.architecture")
    if arch not in ARCHITECTURES:
        raise ModelError(
            f"{file} holds the architecture {arch!r}, which is not supported; these are: "
            + ", ".join(ARCHITECTURES)
        )
    sizes = {ours: _field(reader, f"{arch}.{theirs}") for theirs, ours in _SIZES.items()}
    if lists := [name for name, size in sizes.items() if size is not None and not isinstance(size, int)]:
        raise ModelError(f"{file} has layers of different sizes ({', '.join(lists)}), which is not supported")
    check_sizes(sizes)
    if sizes["num_experts"] and arch != "qwen3moe":
        raise ModelError(f"{file} is a mixture of experts of the architecture {arch}, which is not supported")
    if _field(reader, f"{arch}.attention.causal") in (False, 0):
        raise ModelError(f"{file} has attention that is not causal, which is not supported")
    if (_field(reader, "split.count") or 1) > 1:
        raise ModelError(f"{file} is one of several files; join them: llama-gguf-split --merge FIRST JOINED")
    return str(arch)


@contextmanager
def _alone(file: Path, reader: GGUFReader, place: Path) -> Iterator[tuple[Path, str]]:
    """A folder with a link to the file alone, as transformers also reads tokenizers that lie beside it; within it
    transformers gets `reader`: each other one would take as long to parse all tokens.
    """
    import gguf

    package: Any = gguf
    place.mkdir()
    (place / file.name).symlink_to(file.resolve())
    kept, package.GGUFReader = package.GGUFReader, lambda path: reader
    try:
        yield place, file.name
    finally:
        package.GGUFReader = kept
        shutil.rmtree(place)


def _end_tokens(reader: GGUFReader) -> list[int]:
    """Of texts and of turns, sorted."""
    ends = {_field(reader, f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")} - {None}
    kinds = _field(reader, "tokenizer.ggml.token_type") or []
    for number, (piece, kind) in enumerate(zip(_field(reader, "tokenizer.ggml.tokens"), kinds, strict=False)):
        if kind in _CONTROL and piece in _ENDS:
            ends.add(number)
    return sorted(ends)


def _fill_config(config: Any, arch: str, reader: GGUFReader) -> None:
    """Change what transformers does not read of the file, or leaves as its class has it."""
    tensors = {tensor.name: tensor for tensor in reader.tensors}

    def number(name: str) -> Any:
        return _field(reader, f"{arch}.{name}")

    config.rms_norm_eps = _as_written(config.rms_norm_eps)
    config.architectures, config.dtype = [ARCHITECTURES[arch]], torch.bfloat16
    config.vocab_size = int(tensors["token_embd.weight"].shape[1])
    if (head_dim := number("attention.key_length")) is not None:
        config.head_dim = int(head_dim)
    if "blk.0.attn_q.bias" in tensors and arch == "llama":
        config.attention_bias = True
    if arch == "qwen3moe":
        config.moe_intermediate_size = int(number("expert_feed_forward_length"))
        config.norm_topk_prob, config.mlp_only_layers, config.decoder_sparse_step = True, [], 1
    if arch in ("gemma2", "gemma3"):
        by_width = config.num_hidden_layers == _SCALED_BY_WIDTH[arch]
        width = config.hidden_size // config.num_attention_heads
        config.query_pre_attn_scalar = width if by_width else config.head_dim
        for name in ("attn_logit_softcapping", "final_logit_softcapping"):
            if (cap := number(name)) is not None:
                setattr(config, name, float(cap))
    if arch == "phi3" and (window := number("attention.sliding_window")) is not None:
        config.sliding_window = int(window) or None

    rope = config.rope_parameters
    # Layers with a window are not scaled.
    rope.get("full_attention", rope).update(_rope(config, arch, reader, tensors))


def _rope(config: Any, arch: str, reader: GGUFReader, tensors: dict[str, ReaderTensor]) -> dict[str, Any]:
    """What differs from a rope without scaling; transformers reads nothing of it. Raises ModelError."""

    def number(name: str) -> Any:
        return _field(reader, f"{arch}.rope.{name}")

    def factors(name: str) -> list[float]:
        return [float(factor) for factor in _dequantised(tensors[name]).tolist()]

    found: dict[str, Any] = {}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotated = number("dimension_count") or head_dim
    if rotated != head_dim:
        found["partial_rotary_factor"] = rotated / head_dim
    trained = config.max_position_embeddings
    original = number("scaling.original_context_length") or trained
    factor = number("scaling.factor") or number("scale_linear")
    kind = number("scaling.type") or ("none" if factor in (None, 1.0) else "linear")
    if _ROPE_TENSORS[0] in tensors:  # Llama 3.1's, worked out
        same = factors(_ROPE_TENSORS[0])
        found |= {"rope_type": "longrope", "short_factor": same, "long_factor": same, "attention_factor": 1.0}
        found["original_max_position_embeddings"] = trained
    elif _ROPE_TENSORS[1] in tensors:
        found |= {"rope_type": "longrope", "original_max_position_embeddings": original}
        found |= {"long_factor": factors(_ROPE_TENSORS[1]), "short_factor": factors(_ROPE_TENSORS[2])}
        if (attention_factor := number("scaling.attn_factor")) is not None:
            found["attention_factor"] = attention_factor
    elif kind == "linear":
        found |= {"rope_type": "linear", "factor": _as_written(factor)}
    elif kind == "yarn":
        for name, neutral in _OF_YARN.items():
            if (value := number(f"scaling.{name}")) not in (None, neutral):
                raise ModelError(f"{arch}.rope.scaling.{name} is {value}, which is not supported with yarn")
        found |= {"rope_type": "yarn", "factor": _as_written(factor), "original_max_position_embeddings": original}
        for name in ("beta_fast", "beta_slow"):
            if (beta := number(f"scaling.yarn_{name}")) is not None:
                found[name] = _as_written(beta)
    elif kind != "none":
        raise ModelError(f"{arch}.rope.scaling.type is {kind!r}; none, linear and yarn are supported")
    return found


def _fill_tokenizer(tokenizer: Any, reader: GGUFReader) -> None:
    """What transformers leaves out: how texts are split before merges, special tokens, and BOS before a text."""

    def of(name: str) -> Any:
        return _field(reader, f"tokenizer.ggml.{name}")

    kind, pieces, backend = of("model"), of("tokens"), tokenizer.backend_tokenizer
    if kind == "gpt2":
        pre = of("pre")
        if pre not in SPLITS:
            raise ModelError(
                f"the file's tokenizer splits texts as {pre!r} (tokenizer.ggml.pre), which is not supported; "
                f"these are: {', '.join(sorted(SPLITS))}"
            )
        splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in SPLITS[pre]]
        as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, as_bytes])
        backend.decoder = decoders.ByteLevel()
        backend.normalizer = normalizers.NFC() if "qwen" in pre else None
    ids = {name: of(f"{name}_token_id") for name in ("bos", "eos", "padding", "unknown")}
    for name, attribute in (("bos", "bos"), ("eos", "eos"), ("padding", "pad"), ("unknown", "unk")):
        setattr(tokenizer, f"{attribute}_token", None if ids[name] is None else pieces[ids[name]])
    adds = {"bos": of("add_bos_token"), "eos": of("add_eos_token")}
    if adds["bos"] is None:
        adds["bos"] = kind == "llama"
    added = {name: (pieces[ids[name]], ids[name]) for name in adds if adds[name] and ids[name] is not None}
    if added:
        single = [added["bos"][0] if "bos" in added else "", "$A", added["eos"][0] if "eos" in added else ""]
        backend.post_processor = processors.TemplateProcessing(
            single=" ".join(filter(None, single)), special_tokens=list(added.values())
        )
    elif kind == "gpt2":
        backend.post_processor = processors.ByteLevel(trim_offsets=False)


def _tensors(
    reader: GGUFReader, arch: str, names: Iterable[str], config: ModelConfig
) -> Iterator[tuple[str, Tensor]]:
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
    stored_names = {tensor.name for tensor in reader.tensors} - {*_ROPE_TENSORS}
    if missing := sorted(wanted.keys() - stored_names):
        raise ModelError(f"the file lacks {len(missing)} tensors: {abbreviate(missing)}")
    if extra := sorted(stored_names - wanted.keys()):
        raise ModelError(f"{len(extra)} tensors of the file belong nowhere: {abbreviate(extra)}")
    for tensor in reader.tensors:
        if (targets := wanted.get(tensor.name)) is None:
            continue
        values = _dequantised(tensor)
        stem = tensor.name.split(".")[-2]
        if arch == "llama" and (heads := {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(stem)):
            # Halves of a head's rows are stored in turn.
            values = values.view(heads, -1, 2, *values.shape[1:]).transpose(1, 2).flatten(0, 2)
        if arch in ("gemma2", "gemma3") and tensor.name.endswith("norm.weight"):
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


def _dequantised(tensor: ReaderTensor) -> Tensor:
    """In float32, in the order of a checkpoint."""
    from gguf import dequantize

    shape = [int(size) for size in reversed(tensor.shape)]
    return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).view(shape).float()


def _as_written(number: float) -> float:
    """Such as 1e-6 for the float32 that is nearest to it."""
    return float(f"{number:.7g}")


def _field(reader: GGUFReader, name: str) -> Any:
    """A number, text or list; None if the file has none of this name."""
    field = reader.get_field(name)
    return None if field is None else field.contents()
