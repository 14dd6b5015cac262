"""tekken.json: byte-level vocabularies of Mistral, by the ranks of their tokens."""

# Tests: tests/text/test_real_vocabularies.py

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import regex

from radixrt.errors import TokenizerError
from radixrt.text.byte_level import spelled
from radixrt.text.codec import MAX_PIECE, MAX_SIZE, JsonCodec, panics_caught
from radixrt.text.probe import check_same, probe_without

BOS, EOS = "<s>", "</s>"
# The special tokens of files that do not list theirs, from id 0 on.
_UNLISTED = (
    *("<unk>", BOS, EOS, "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
_SECONDS = 10.0  # of its expression, on the probe
_FILLER = "<SPECIAL_{}>"


def read_tekken(file: Path) -> JsonCodec:
    """The tokenizer that a tekken.json describes, with its special tokens.

    Raises TokenizerError, and KeyError, TypeError or ValueError for what is no such file.
    """
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    whole = json.loads(file.read_text(encoding="utf-8"))
    config = whole["config"]
    size, num_special = int(config["default_vocab_size"]), int(config["default_num_special_tokens"])
    if not 0 < num_special < size <= MAX_SIZE or size - num_special > len(whole["vocab"]):
        raise TokenizerError(
            f"{file.name} holds {len(whole['vocab'])} tokens, but says that {size - num_special} of {size} are "
            "no special ones"
        )
    ranks = {
        base64.b64decode(token["token_bytes"]): int(token["rank"])
        for token in whole["vocab"]
        if token["rank"] < size - num_special
    }
    if sorted(ranks.values()) != list(range(size - num_special)):
        raise TokenizerError(f"{file.name} does not have a token of each rank from 0 to {size - num_special - 1}")
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise TokenizerError(f"{file.name} has no token for some byte")
    if (longest := max(map(len, ranks))) > MAX_PIECE:
        raise TokenizerError(f"{file.name} has a token of {longest:,} bytes; {MAX_PIECE:,} are supported")
    special = _special_tokens(whole.get("special_tokens"), num_special)
    vocabulary = {spelled(token): rank + num_special for token, rank in ranks.items()}
    if same := [token for token in special if token in vocabulary]:
        raise TokenizerError(f"{file.name} has {same[0]!r} as a special token and as an ordinary one")
    vocabulary |= {token: token_id for token_id, token in enumerate(special)}
    with panics_caught():
        backend = Backend(models.BPE(vocabulary, merges_by_rank(ranks)))
    backend.model.ignore_merges = True
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(config["pattern"]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    codec = JsonCodec(backend)

    probe = probe_without(special)
    pieces = (match[0].encode() for match in regex.finditer(config["pattern"], probe, timeout=_SECONDS))
    by_ranks = [rank + num_special for piece in pieces for rank in _by_ranks(ranks, piece)]
    check_same(codec.encode([probe])[0], by_ranks, probe, file.name)
    return codec


def _special_tokens(listed: Any, count: int) -> list[str]:
    tokens = dict(enumerate(_UNLISTED))
    if listed is not None:
        tokens = {int(token["rank"]): str(token["token_str"]) for token in listed}
    if outside := [rank for rank in tokens if not 0 <= rank < count]:
        raise TokenizerError(f"a special token has the rank {outside[0]}; there are {count} of them")
    return [tokens.get(rank, _FILLER.format(rank)) for rank in range(count)]


def merges_by_rank(ranks: Mapping[bytes, int]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, in the order of its rank: what byte-pair encoding by ranks does."""
    names = {token: spelled(token) for token in ranks}
    merges: list[tuple[str, str]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        made = [(ranks[a], ranks[b], a, b) for a, b in pairs if a in ranks and b in ranks]
        merges += [(names[a], names[b]) for _, _, a, b in sorted(made)]
    return merges


def _by_ranks(ranks: Mapping[bytes, int], piece: bytes) -> list[int]:
    """Byte-pair encoding as it is defined: the neighbours that make the token of the lowest rank are joined."""
    parts = [piece] if piece in ranks else [bytes([byte]) for byte in piece]
    while len(parts) > 1:
        joined = [ranks.get(left + right, len(ranks)) for left, right in pairwise(parts)]
        best = min(range(len(joined)), key=joined.__getitem__)
        if joined[best] == len(ranks):
            break
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return [ranks[part] for part in parts]
