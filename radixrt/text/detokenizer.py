"""Token ids to text, one at a time, for a stream."""

from __future__ import annotations

from radixrt.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_MAX_CONTEXT = 8  # tokens
_MAX_WINDOW = 64  # tokens


class Detokenizer:
    """Decodes a growing list of token ids, and returns text as it becomes certain.

    All results of `push` and the one of `finish` join to `tokenizer.decode` of all ids. Text that another token
    may still change is held back: the bytes of an unfinished character, and a whole run of byte-fallback tokens,
    which one bad byte turns into replacements.

    A token costs the decoding of a few: the `_window` of tokens whose text is not certain yet, and a `_context` of
    some before them.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._context: list[int] = []
        self._context_text = ""
        self._window: list[int] = []
        self._returned = 0  # characters of the window's text
        self._in_bytes = False  # the window ends in a run of byte-fallback tokens
        self._due = 1  # length at which the window is decoded next

    def push(self, token_id: int) -> str:
        """Take the next token. Returns the text that has become certain, often ""."""
        self._window.append(token_id)
        if token_id in self._tokenizer.byte_ids:
            self._in_bytes = True
            return ""
        if self._in_bytes and self._is_silent(token_id):
            return ""  # decoding may drop it and join the bytes around it
        self._in_bytes = False
        if len(self._window) < self._due:
            return ""
        text = self._window_text()
        certain = text.removesuffix(_REPLACEMENT)  # one for all bytes of an unfinished character
        new = certain[self._returned :]
        if text and certain == text:
            self._close(text)
        elif not text and self._is_silent(token_id):
            self._window.pop()
        else:  # half a character, or a leading blank, which spells nothing by itself
            self._returned = max(self._returned, len(certain))
            size = len(self._window)
            # Beyond the limit only when the size has doubled, so endless nonsense costs no more than text.
            self._due = size + 1 if size < _MAX_WINDOW else 2 * size
        return new

    def tentative(self) -> str:
        """Return what `finish` would now, if it is whole characters; "" beyond 64 uncertain tokens."""
        if not self._window or len(self._window) > _MAX_WINDOW:
            return ""
        text = self._window_text()
        return "" if text.endswith(_REPLACEMENT) else text[self._returned :]

    def finish(self) -> str:
        """Return the rest of the text, after the last token."""
        rest = self._window_text()[self._returned :]
        self._window.clear()
        return rest

    @property
    def at_boundary(self) -> bool:
        """Whether all text so far has been returned, so that the next token's begins here."""
        return not self._window

    def _window_text(self) -> str:
        return self._tokenizer.decode(self._context + self._window, self._skip)[len(self._context_text) :]

    def _close(self, text: str) -> None:
        """Turn the window, whose text is certain, into context."""
        self._context += self._window
        self._context_text += text
        anchor = self._tokenizer.anchor
        if len(self._context) > _MAX_CONTEXT and anchor is not None:
            self._context = [anchor, self._context[-1]]
            self._context_text = self._tokenizer.decode(self._context, self._skip)
        self._window.clear()
        self._returned = 0
        self._due = 1

    def _is_silent(self, token_id: int) -> bool:
        """Whether a token spells nothing in the middle of a text, like a skipped special token."""
        return self._tokenizer.decode_inside([token_id], self._skip) == ""
