"""Special tokens that a text does not show, though its stop strings name them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from radixrt.text.tokenizer import Tokenizer


def special_texts(tokenizer: Tokenizer) -> dict[int, str]:
    """The text of each token that `skip_special_tokens` leaves out, by id.

    Whole ranges of tokens are decoded, and halved where there are some: most have none.
    """
    found: dict[int, str] = {}
    spans = [(0, tokenizer.vocab_size)]
    while spans:
        first, end = spans.pop()
        whole = tokenizer.decode(range(first, end), skip_special_tokens=False)
        if whole == tokenizer.decode(range(first, end), skip_special_tokens=True):
            continue
        if end - first == 1:
            found[first] = whole
        else:
            middle = (first + end) // 2
            spans += [(first, middle), (middle, end)]
    return found


def named_in(stops: Sequence[str], texts: Mapping[int, str]) -> dict[int, str]:
    """Those of `texts` that a stop string holds."""
    return {token_id: text for token_id, text in texts.items() if any(text in stop for stop in stops)}


class HiddenTokens:
    """Where special tokens stand in the end of a text that does not show them.

    Positions count characters of that end. `texts` are those of the tokens that stops name, by id; `stops` are the
    stops that name some.
    """

    def __init__(self, texts: Mapping[int, str], stops: Sequence[str]) -> None:
        self._texts = texts
        self.stops = tuple(stop for stop in stops if any(text in stop for text in texts.values()))
        self._found: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return len(self._found)

    def take(self, token_id: int, position: int) -> None:
        """Remember a token that comes at `position`, if it is one of those."""
        if (text := self._texts.get(token_id)) is not None:
            self._found.append((position, text))

    def put_into(self, text: str) -> str:
        """The text with the tokens."""
        pieces, begun = [], 0
        for position, own in self._found:
            pieces += [text[begun:position], own]
            begun = min(position, len(text))
        return "".join([*pieces, text[begun:]])

    def before(self, place: int) -> int:
        """The position of a place in `put_into`; of one within a token, where that stands."""
        for position, own in self._found:
            if place <= position:
                break
            place = max(position, place - len(own))
        return place

    def place_of(self, position: int) -> int:
        """The place in `put_into` of a position, before the tokens that stand there."""
        return position + sum(len(own) for at, own in self._found if at < position)

    def forget(self, count: int) -> None:
        """Count from `count` characters later on."""
        self._found = [(position - count, own) for position, own in self._found if position >= count]
