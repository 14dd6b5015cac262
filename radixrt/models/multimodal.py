"""Checkpoints of several parts, of which only the text part is loaded: the names of its tensors."""

from __future__ import annotations

OTHER_PARTS = ("vision_tower.", "vision_model.", "visual.", "multi_modal_projector.", "embed_vision.")


def text_name(name: str) -> str | None:
    """A stored tensor's name in a checkpoint of the text part alone; None if it belongs to another part."""
    inner = name.removeprefix("model.")
    if inner.startswith(OTHER_PARTS):
        return None
    if not inner.startswith("language_model."):
        return name
    # `language_model.model.layers...` in older checkpoints, `model.language_model.layers...` in newer ones.
    own = inner.removeprefix("language_model.")
    return own if own.startswith(("model.", "lm_head.")) else f"model.{own}"
