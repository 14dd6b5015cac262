"""A codec for tests whose tokens are given bytes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from radixrt.text.cuts import Cuts, NoCuts


class PieceCodec:
    """Token i spells `pieces[i]`; texts are encoded byte by byte."""

    byte_ids: frozenset[int] = frozenset()

    def __init__(self, pieces: Sequence[bytes], special_ids: Collection[int] = ()) -> None:
        self.pieces, self.size, self._special_ids = list(pieces), len(pieces), set(special_ids)

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [[self.pieces.index(bytes([byte])) for byte in text.encode()] for text in texts]

    def cuts(self) -> Cuts:
        raise NoCuts("it is for tests of decoding")

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        left_out = self._special_ids if skip_special_tokens else ()
        return b"".join(self.pieces[i] for i in ids if i not in left_out).decode(errors="replace")

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
