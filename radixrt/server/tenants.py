"""API keys: each is a namespace of the cache, so that no tenant can time what another one has asked."""

# Tests: tests/server/test_refusals.py

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from radixrt.errors import ParameterError
from radixrt.server.refusal import Refusal

_MIN_KEY = 16  # characters
_KEY = re.compile(rf"[!-~]{{{_MIN_KEY},}}")


class Tenants:
    """Which keys are known. Without any, all clients share one namespace and need none."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._by_digest = {_digest(key): _digest(key)[:16] for key in keys}

    @classmethod
    def of_file(cls, path: str | Path) -> Tenants:
        """Of a file with a key a line; empty lines and those that begin with # are left out.

        Raises ParameterError where it cannot be read, has none, or has one that no client could send or that is
        too short; the message names its line, not the key.
        """
        try:
            lines = Path(path).read_text("utf-8-sig").split("\n")  # Windows' editors begin a file with a mark
        except (OSError, UnicodeDecodeError) as error:
            raise ParameterError(f"the API keys in {path} cannot be read: {error}") from error
        stripped = enumerate((line.strip(" \t") for line in lines), 1)
        keys = {number: key for number, key in stripped if key and not key.startswith("#")}
        if not keys:
            raise ParameterError(f"{path} must have an API key a line, and has none")
        for number, key in keys.items():
            if not _KEY.fullmatch(key):
                raise ParameterError(
                    f"line {number} of {path} is no API key: that has {_MIN_KEY} characters at least, of ASCII's "
                    "printable ones, and no blanks"
                )
        return cls(keys.values())

    def __bool__(self) -> bool:
        return bool(self._by_digest)

    @property
    def names(self) -> tuple[str | None, ...]:
        """Of all tenants, as `of` tells them: each follows from its key alone."""
        return tuple(self._by_digest.values()) or (None,)

    def of(self, authorization: str | None) -> str | None:
        """The tenant of a header "Bearer KEY"; None where no keys are needed. Raises Refusal."""
        if not self._by_digest:
            return None
        scheme, _, key = (authorization or "").partition(" ")
        # Keys are looked up by digests: how long that takes tells nothing of them.
        tenant = self._by_digest.get(_digest(key.strip())) if scheme.lower() == "bearer" else None
        if tenant is None:
            raise Refusal(401, "a known API key is needed: Authorization: Bearer KEY", "invalid_api_key")
        return tenant


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
