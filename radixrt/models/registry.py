"""The classes that build the architectures of `radixrt.models.families`."""

# Tests: tests/models/test_adding.py, tests/models/test_loader.py

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType

from radixrt.errors import ModelError
from radixrt.models.decoder import Decoder
from radixrt.models.families import FAMILIES, REFUSED, Family


def _decoder(family: Family) -> type[Decoder]:
    found: type[Decoder] = getattr(import_module(family.module), family.decoder)
    return found


ARCHITECTURES: Mapping[str, type[Decoder]] = MappingProxyType(
    {architecture: _decoder(family) for architecture, family in FAMILIES.items()}
)


def find_architecture(name: str) -> type[Decoder]:
    """Return the class of an architecture, built with `(config, placement)`. Raises ModelError, with the reason
    where it is known.
    """
    try:
        return ARCHITECTURES[name]
    except KeyError:
        known = ", ".join(sorted(ARCHITECTURES))
        reason = f": {REFUSED[name]}" if name in REFUSED else ""
        raise ModelError(f"architecture {name!r} is not supported{reason}; all that are: {known}") from None
