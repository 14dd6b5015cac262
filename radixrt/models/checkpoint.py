"""A checkpoint beside a model: which stored tensor is which of the model's, and whether all are right."""

# Tests: tests/models/test_loader.py

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from layers.checkpoint_slot import CheckpointSlot
from layers.placement import Placement
from radixrt.errors import ModelError
from radixrt.models.config import ModelConfig
from radixrt.models.decoder import Decoder
from radixrt.models.families import text_models_of
from radixrt.models.multimodal import text_name
from radixrt.models.rank_part import rank_part
from radixrt.models.weight_files import INDEX_FILE, WORDS, StoredTensor, Weights, abbreviate

STORED_DTYPES = ("F64", "F32", "BF16", "F16")
STORED_E4M3 = "F8_E4M3"
# Of tensors that stay in the bits in which they are stored, by the dtype of their place.
_STORED_AS = {dtype: word for dtype, word in WORDS.items() if word not in STORED_DTYPES}

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_COMPARED_ROWS = 4096  # at once: bounds the memory


@dataclass
class Checkpoint:
    """The tensors of `weights`, all of which are `stored`, under the names that `model` has for them: a whole one,
    which may be on "meta", of `config`. Either may change in what `told` says.
    """

    model: Decoder
    config: ModelConfig
    weights: Weights
    stored: list[StoredTensor]

    @cached_property
    def _named(self) -> list[tuple[StoredTensor, dict[str, torch.Size]]]:
        """What each stored tensor is for the model: names and shapes."""
        shapes = ((tensor, torch.empty(tensor.shape, device="meta")) for tensor in self.stored)
        return [
            (tensor, {name: part.shape for name, part in self._parts(tensor.name, shape)})
            for tensor, shape in shapes
        ]

    def _parts(self, stored: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """What a stored tensor is for the model: itself, several, or nothing where it belongs to another part."""
        name = text_name(stored) if text_models_of(self.config.architecture) else stored
        if tensor.dim() == 0:
            tensor = tensor.view(1)
            name = None if name is None else self.config.quantization.name_of_scalar(name)
        return iter(()) if name is None else self.model.split_stored(name, tensor)

    def _is_ignored(self, name: str) -> bool:
        """Whether a stored tensor is one that some checkpoints have, and no model needs."""
        if name.endswith(("rotary_emb.inv_freq", *self.config.quantization.unneeded)):
            return True
        return self.config.tie_word_embeddings and name == _HEAD

    # --- what it says of itself ---

    def told(self, placement: Placement) -> tuple[ModelConfig, Placement]:
        """Config and placement with what the checkpoint itself says: whether embeddings are tied, if config.json
        does not; and which layers are stored plainly, where its format wants to know.
        """
        config, quantization = self.config, placement.quantization
        if not config.is_tying_known:
            config = replace(config, tie_word_embeddings=self._is_tied(), is_tying_known=True)
        plain = (name for tensor, parts in self._named if tensor.name.endswith(".weight") for name in parts)
        left = quantization.leaving(frozenset(name.removesuffix(".weight") for name in plain))
        return config, replace(placement, quantization=left)

    def _is_tied(self) -> bool:
        """Whether a checkpoint has one matrix for embedding and head, by what it stores."""
        embedding, head = self._ends()
        if head is None:
            return not any(name.endswith(_HEAD) for name in self.weights.named)
        return embedding is not None and self._are_equal(embedding, head)

    def _ends(self) -> tuple[StoredTensor | None, StoredTensor | None]:
        """The embedding and the head; None for what is not stored."""
        found = {name: tensor for tensor, parts in self._named for name in parts if name in (_EMBEDDING, _HEAD)}
        return found.get(_EMBEDDING), found.get(_HEAD)

    def _are_equal(self, first: StoredTensor, second: StoredTensor) -> bool:
        if first.shape != second.shape:
            return False
        one, other = (tensor for _, tensor in self.weights.tensors(lambda each: each in (first, second)))
        starts = range(0, len(one), _COMPARED_ROWS)
        pieces = ([each[start : start + _COMPARED_ROWS].float() for each in (one, other)] for start in starts)
        return all(torch.equal(own, others.to(own.device)) for own, others in pieces)

    # --- whether it is right ---

    def check(self) -> None:
        """Compare its tensors with those of the model. Raises ModelError."""
        places = dict(self.model.checkpoint_tensors())
        missing, extra = dict(places), []
        for tensor, parts in self._named:
            for name, shape in parts.items():
                if self._is_ignored(name):
                    continue
                if name not in places:
                    extra.append(name)
                    continue
                if name not in missing:
                    raise ModelError(f"tensor {name} is stored twice; the second time in {tensor.where}")
                place = missing.pop(name)
                if shape != place.shape:
                    raise ModelError(
                        f"tensor {name} in {tensor.where} has shape {list(shape)}; "
                        f"config.json asks for {list(place.shape)}"
                    )
                _check_dtype(tensor, name, place)
        self._check_numbers()
        self._check_tied_head()
        wrong = []
        if missing:
            wrong.append(f"{len(missing)} tensors are missing: {abbreviate(sorted(missing))}")
        if extra:
            wrong.append(f"{len(extra)} tensors belong nowhere: {abbreviate(sorted(extra))}")
        if wrong:
            raise ModelError(
                f"the weights in {self.weights} are not those of the {self.config.architecture} of config.json: "
                + "; ".join(wrong)
            )
        found = {tensor.name for tensor in self.stored}
        if absent := sorted(name for name in self.weights.named - found if not self._is_ignored(name)):
            raise ModelError(
                f"{self.weights}/{INDEX_FILE} names {len(absent)} tensors that no file holds: {abbreviate(absent)}"
            )

    def _check_numbers(self) -> None:
        """Raise ModelError where tensors that only tell something of others tell what the format cannot have."""
        quantization = self.config.quantization
        if not quantization.checked:
            return
        for stored, tensor in self.weights.tensors(lambda stored: stored.name.endswith(quantization.checked)):
            for _, part in self._parts(stored, tensor):
                if (problem := quantization.problem(part)) is not None:
                    raise ModelError(f"tensor {stored} in {self.weights} {problem}")

    def _check_tied_head(self) -> None:
        """Raise ModelError where embeddings are tied, and yet a head is stored that differs from the embedding."""
        if not self.config.tie_word_embeddings:
            return
        embedding, head = self._ends()
        if head is not None and embedding is not None and not self._are_equal(embedding, head):
            raise ModelError(
                f"tensor {head.name} in {head.where} differs from the embedding, but the model has one matrix for "
                "both; set tie_word_embeddings to false in config.json if the head is meant, or leave the tensor "
                "out"
            )

    # --- what becomes of it ---

    def fill(self, model: Decoder) -> None:
        """Copy every tensor into place, or the part of it of `model`, a rank's; `check` has found all of them.

        Files are mapped to memory, so a rank reads its part alone, except that narrow columns are read with their
        pages.
        """
        places, wholes = dict(model.checkpoint_tensors()), dict(self.model.checkpoint_tensors())
        elsewhere = wholes.keys() - places.keys()
        # What other stages have is not even mapped.
        left = {each.name for each, parts in self._named if elsewhere and places.keys().isdisjoint(parts)}
        for stored, tensor in self.weights.tensors(lambda each: each.name not in left):
            for name, part in self._parts(stored, tensor):
                if not self._is_ignored(name) and name not in elsewhere:
                    place = places[name]
                    own = rank_part(name, part, wholes[name], place, model.placement.ranks)
                    place.copy_(own if isinstance(place, Tensor) else own.cpu())


def _check_dtype(tensor: StoredTensor, name: str, place: CheckpointSlot) -> None:
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
