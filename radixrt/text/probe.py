"""The texts on which a tokenizer that was built is compared with what it was built from."""

# Tests: tests/text/test_tokenizer.py, tests/models/test_gguf_tokenizer.py

from __future__ import annotations

from collections.abc import Iterable, Sequence
from unicodedata import normalize

from radixrt.errors import TokenizerError

PROBE = (
    "Mira likes Oslo.\n  Tarek  counts 37, 1234567 and 3.14;\n\n\tHugo's boats aren't   blue! \r\n"
    "helloWorld FooBar HTTPServer __init__(self, x=0) -> {'a': [1, 2]} // http://example.org/?q=%20#top\n"
    "naïve café, Ünïcödé; e\u0301 a\u0308 o\u0331; שָׁלוֹם, हिन्दी, ไทย, 日本語、한국어 \u3000 ½ ² Ⅷ ﬁ\n"
    "👩\u200d👩\u200d👧 🇳🇴 😀\ufe0f \u00a0\u2028\u200b<|no|> </no> [NO] ▁ Ġ <0x0A>  end\n\n\n"
    "def f(x):\n    if x != 0x1F:\n\t\treturn [x] * 100  # it's   DONE\n}}));\r\n \n"
    "Straße a\u0308\u0323 क\u094dषि ภาษา 中文字。 Αθήν 👩\u200d💻\ufe0f \u2003x ٣ "
    "====----____aaaaaaabababab      (((( 00000 ......"
)
# Texts of their own: how a text begins decides its first tokens.
BEGINNINGS = (" ", "   two", "\n", "日本", "====")
_EXCERPT = 40  # tokens or characters in an error


def probe_without(contents: Iterable[str]) -> str:
    """The probe, without texts that are tokens of their own."""
    text = PROBE
    for content in contents:
        text = text.replace(content, "")
    return text


def check_same(ours: list[int], theirs: list[int], text: str, what: str) -> None:
    """Raise TokenizerError where the ids of `text` differ from those of its source, which is `what`."""
    if ours != theirs:
        first, end = _difference(ours, theirs)
        raise TokenizerError(
            f"the tokenizer does not encode as {what} says: the ids of {_excerpt(text)} from place {first} on are "
            f"{ours[first:end]}, not {theirs[first:end]}"
        )


def check_round_trip(back: str, text: str = PROBE) -> None:
    """Raise TokenizerError where `back`, the encoded and decoded `text`, is another beyond Unicode's forms."""
    if back not in (text, normalize("NFC", text), normalize("NFKC", text)):
        first, end = _difference(back, text)
        raise TokenizerError(
            f"the tokenizer that was made of its files changes text: {text[first:end]!r} becomes "
            f"{back[first:end]!r}"
        )


def _excerpt(text: str) -> str:
    return f"{text[:_EXCERPT]!r}..." if len(text) > _EXCERPT else repr(text)


def _difference(ours: Sequence[object], theirs: Sequence[object]) -> tuple[int, int]:
    """Where two sequences begin to differ, and the end of an excerpt."""
    differing = (place for place, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
    first = next(differing, min(len(ours), len(theirs)))
    return first, first + _EXCERPT
