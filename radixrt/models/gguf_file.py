"""GGUF files: converted once to a folder in Hugging Face format, with weights in bfloat16, which all else reads.

What llama.cpp writes differs from a checkpoint in names, in the order of rows, and in what it leaves out of the
config: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The package `gguf` reads and dequantises it,
transformers knows most of the config and the tokenizer.
"""

# Tests: tests/models/test_gguf_file.py

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from tokenizers import Regex, decoders, normalizers, pre_tokenizers, processors
from torch import Tensor
from tqdm import tqdm

from layers.placement import Placement
from radixrt.errors import ModelError
from radixrt.models.registry import find_architecture
from radixrt.models.weight_files import INDEX_FILE, abbreviate

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

SUFFIX = ".gguf"
VERSION = 1  # of what is written here
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
    "default": (_GPT2,),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_WORDS % "{1,3}",),
    "qwen2": (_WORDS % "",),
    "deepseek-r1-qwen": (_WORDS % "",),
}
# Numbers of layers of the two models that scale scores by hidden_size / num_heads; all others do by head_dim.
_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3": 62}
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_EXPERT = re.compile(r"(.*\.experts)\.([0-9]+)\.(\w+)\.weight")

_log = logging.getLogger(__name__)


def converted(file: Path) -> Path:
    """The folder that a GGUF file has been converted to: now, or before if the file has not changed since.

    It lies in `$RADIXRT_CACHE/gguf`, by default `~/.cache/radixrt/gguf`, and may be deleted. Raises ModelError.
    """
    try:
        from gguf import GGUFReader
    except ModuleNotFoundError as error:
        raise ModelError(f"{file}: reading GGUF needs one more package: pip install 'radixrt[gguf]'") from error
    try:
        status = file.stat()
        identity = f"{VERSION} {file.resolve()} {status.st_size} {status.st_mtime_ns}"
        name = f"{file.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
        cache = Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "radixrt") / "gguf"
        if (folder := cache / name).is_dir():
            return folder
        cache.mkdir(parents=True, exist_ok=True)
        _log.info("%s is converted to %s", file, folder)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".unfinished-") as unfinished:
            made = Path(unfinished) / name
            made.mkdir()
            _convert(file, GGUFReader(file), made)
            try:
                made.rename(folder)
            except OSError:
                if not folder.is_dir():  # else another process was faster
                    raise
    except ModelError:
        raise
    except Exception as error:  # whatever gguf and transformers raise of a file that they cannot read
        raise ModelError(f"{file} cannot be used: {type(error).__name__}: {error}") from error
    return folder


def _convert(file: Path, reader: GGUFReader, folder: Path) -> None:
    """Write config, tokenizer and weights."""
    from transformers import AutoConfig, AutoTokenizer

    arch = _field(reader, "general.architecture")
    if arch not in ARCHITECTURES:
        raise ModelError(
            f"{file} holds the architecture {arch!r}, which is not supported; these are: "
            + ", ".join(ARCHITECTURES)
        )
    known: Any = AutoConfig.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
    _complete(known, arch, reader)
    known.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
    _mend_tokenizer(tokenizer, reader)
    tokenizer.save_pretrained(folder)
    ends = {_field(reader, f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")} - {None}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": sorted(ends)}))

    decoder = find_architecture(ARCHITECTURES[arch])
    config = decoder.config_class.from_folder(folder).with_context_length(2)
    skeleton = decoder(config, Placement(torch.bfloat16, torch.device("meta")))
    names = [name for name, _ in skeleton.checkpoint_tensors()]
    needed = 2 * sum(int(tensor.n_elements) for tensor in reader.tensors)
    if (free := shutil.disk_usage(folder).free) < needed:
        raise ModelError(
            f"{file} takes {needed / 1e9:.1f} GB in bfloat16, and {folder.parent.parent} has room for "
            f"{free / 1e9:.1f} GB; {CACHE_VARIABLE} names another folder"
        )
    _write_weights(_tensors(reader, arch, names, config.num_heads, config.num_kv_heads), folder, len(names))


def _complete(config: Any, arch: str, reader: GGUFReader) -> None:
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
    for layers in (rope.get("full_attention", rope),):  # layers with a window are not scaled
        layers.update(_rope(config, arch, reader, tensors))


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
    kind, factor = number("scaling.type") or "none", number("scaling.factor")
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
        found |= {"rope_type": "yarn", "factor": _as_written(factor), "original_max_position_embeddings": original}
    elif kind != "none":
        raise ModelError(f"{arch}.rope.scaling.type is {kind!r}; none, linear and yarn are supported")
    return found


def _mend_tokenizer(tokenizer: Any, reader: GGUFReader) -> None:
    """What transformers leaves out: how texts are split before merges, special tokens, and BOS before a text."""

    def of(name: str) -> Any:
        return _field(reader, f"tokenizer.ggml.{name}")

    kind, pieces, backend = of("model"), of("tokens"), tokenizer.backend_tokenizer
    if kind == "gpt2":
        pre = of("pre") or "default"
        if pre not in SPLITS:
            raise ModelError(
                f"the file's tokenizer splits texts as {pre!r}, which is not supported; these are: "
                + ", ".join(sorted(SPLITS))
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
    reader: GGUFReader, arch: str, names: Iterable[str], num_heads: int, num_kv_heads: int
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of those names, in bfloat16. Raises ModelError if one is missing, or belongs nowhere."""
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

    number = next(number for number in MODEL_ARCH if MODEL_ARCH_NAMES[number] == arch)
    known = get_tensor_name_map(number, 2**10)
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
        if arch == "llama" and (heads := {"attn_q": num_heads, "attn_k": num_kv_heads}.get(_part(tensor.name))):
            # Halves of a head's rows are stored in turn.
            values = values.view(heads, -1, 2, *values.shape[1:]).transpose(1, 2).flatten(0, 2)
        if arch in ("gemma2", "gemma3") and tensor.name.endswith("norm.weight"):
            values = values - 1.0  # a checkpoint has what is added to 1
        parts = values if _EXPERT.fullmatch(targets[0]) else [values]
        for name, part in zip(targets, parts, strict=True):
            yield name, part.to(torch.bfloat16).contiguous()


def _part(name: str) -> str:
    """Such as attn_q of blk.0.attn_q.weight."""
    return name.split(".")[-2]


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
