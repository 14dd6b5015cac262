"""A codec for tests whose tokens are given bytes."""

from __future__ import annotations

from collections.abc import Sequence


class PieceCodec:
    """Token i spells `pieces[i]`; texts are encoded byte by byte."""

    byte_ids: frozenset[int] = frozenset()

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces, self.size = list(pieces), len(pieces)

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [[self.pieces.index(bytes([byte])) for byte in text.encode()] for text in texts]

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace")

    def piece(self, token_id: int) -> str | None:
        return self.pieces[token_id].decode("latin-1")

    def token_id(self, piece: str) -> int | None:
        return None

    def serialized(self) -> str | None:
        return None

    def token_bytes(self) -> list[bytes | None]:
        return [*self.pieces]

    def definition(self) -> bytes:
        return repr(self.pieces).encode()
