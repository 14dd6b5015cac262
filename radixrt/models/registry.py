"""The classes that build the architectures of `radixrt.models.families`."""

# Tests: tests/models/test_adding.py, tests/models/test_loader.py

from __future__ import annotations

from importlib import import_module

from radixrt.errors import ModelError
from radixrt.models.decoder import Decoder
from radixrt.models.families import FAMILIES, REFUSED


def find_architecture(name: str) -> type[Decoder]:
    """Return the class of an architecture, built with `(config, placement)`. Raises ModelError, with the reason
    where it is known.
    """
    if (family := FAMILIES.get(name)) is None:
        known = ", ".join(sorted(FAMILIES))
        reason = f": {REFUSED[name]}" if name in REFUSED else ""
        raise ModelError(f"architecture {name!r} is not supported{reason}; all that are: {known}")
    found: type[Decoder] = getattr(import_module(family.module), family.decoder)
    return found
