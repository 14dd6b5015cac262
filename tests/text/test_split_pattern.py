"""What two neighbours say about a regular expression, beside what the package tokenizers does with whole texts."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest
from tokenizers import Regex, pre_tokenizers

from radixrt.models.gguf_splits import SPLITS
from radixrt.text.codec import panics_caught
from radixrt.text.cuts import is_settled
from radixrt.text.json_cuts import _BYTE_LEVEL, _WORDS
from radixrt.text.split_pattern import MAX_ATOMS, SplitPattern, UnknownPattern, literal
from radixrt.text.tokenizer_json import OF_LLAMA_3, OF_TEKKEN
from tests.support.expressions import BLOOM, CL100K, KIMI, O200K

FAMILIES = {
    "byte level": _BYTE_LEVEL,
    "words": _WORDS,
    "llama 3": OF_LLAMA_3,
    "tekken": OF_TEKKEN,
    "o200k": O200K,
    "cl100k": CL100K,
    "kimi": KIMI,
    "bloom": BLOOM,
}
_KNOWN = {
    expression: f"{name} {place}"
    for name, split in SPLITS.items()
    for place, expression in enumerate(split.expressions)
}
FAMILIES |= {name: expression for expression, name in _KNOWN.items()}
# What tells ways of reading an expression apart.
ODD = (
    *(r"a|bc", r"ab?c", r"ab??c", r"a+b", r"a+?b", r"a++b", r"a*+b|c", r"(ab)+", r"(?:ab|a)c?", r"a?+a"),
    *(r"(?:a?+){1}a", r"(?:a?+)+a", r"a{1}+", r"a{2}+", r"a{1,2}+b", r"a{1}?b", r"ca{1}?b", r"a{2}?b"),
    *(r"a{2,}", r"a{2,3}?", r"a{1,}+c", r"a(?=b)", r"a(?!b)", r"a(?=b)c|ab", r"a+(?!\S)|a", r"a(?!b)(?!c)"),
    *(r"(?=a)\w+", r"\w+(?= )", r"a$", r"a+$|b", r"\s+$", r"(?i:a'S)", r"(?i:k)", r"(?i:sk)", r"(?i)'s|b"),
    *(r"(?i:[a-s])b", r"(?i:[^s])", r"[^a]b", r"[ab&&bc]c", r"[^a&&b]", r"[a[bc]]+", r"[^a[bc]]+", r"."),
    *(r".+", r"\.a", r"[\]a]+", r"[a\-c]+", r"\u0061b", r"\x61b", r"a\n", r"\n$", r"\w+\d", r"\d+\w", r"\W+"),
    *(r"\S+", r"\p{^L}+", r"\P{N}+", r"[^\p{L}]+a", r"(?:a|b(?:c|(?:d)?a))+", r"]a", r"(?:ab(?!c))+"),
    *(r"(?:a$)+b|c", r"(?:(?=a)a)+b", r"a|a(?=b)", r"ab|a+(?!b)", r"(?:a(?!b)|c)+", r"x*a", r"x*+a"),
    *(r"(?:x?a?)b", r"(?:x*+a?)b", r"(?:x++|a)?b", r"(?:x++|a)?+b", r"a-b", r"é|日本", r"\s?[é日]+", r"a{3}"),
    *(r"(?:ab){2}",),
)
ALPHABET = "abcdx ABSskKtlLvVéß日本語あ0129.,'!-]_\n\r\t\u00a0\u3000\u2028ſ\u212a\u0301٣Ⅷ\u0130ıǅʰªﬁ😀\u200d।/\\"  # noqa: RUF001


def pieces(expression: str, text: str) -> list[str]:
    split = pre_tokenizers.Split(Regex(expression), "isolated")
    return [piece for piece, _ in split.pre_tokenize_str(text)]


def ends(split: pre_tokenizers.PreTokenizer, text: str) -> set[int]:
    """Where pieces end."""
    return {end for _, (_, end) in split.pre_tokenize_str(text)}


def texts(letters: str, count: int, rng: random.Random) -> Iterator[str]:
    for _ in range(count):
        few = rng.choices(letters, k=rng.randint(1, 4))
        yield "".join(rng.choices(few if rng.random() < 0.6 else letters, k=rng.randint(2, 9)))


def check(expression: str, pattern: SplitPattern, letters: str, count: int) -> int:
    """How many cuts were local, and right."""
    split = pre_tokenizers.Split(Regex(expression), "isolated")
    found = 0
    for text in texts(letters, count, random.Random(expression)):
        whole = ends(split, text)
        for place in range(1, len(text)):
            before, after = text[place - 1], text[place]
            if not (is_settled(before) and is_settled(after) and pattern.is_local(before, after)):
                continue
            found += 1
            parts = ends(split, text[:place]) | {place + end for end in ends(split, text[place:])}
            assert parts - {place} == whole - {place}, (expression, text, place)
            if pattern.always_takes(before) or pattern.always_takes(after):
                assert place in whole, (expression, text, place)
    return found


COUNT, MANY = 150, 10_000


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str) -> None:
    pattern = SplitPattern(FAMILIES[name])
    assert check(FAMILIES[name], pattern, ALPHABET, COUNT) > 50


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_many_texts_of_families(name: str) -> None:
    check(FAMILIES[name], SplitPattern(FAMILIES[name]), ALPHABET, MANY)


def test_odd_expressions() -> None:
    for expression in ODD:
        check(expression, SplitPattern(expression), "aaabbccdx'sSkK. \n1é日\u017f\u212a", 60)


@pytest.mark.long
def test_many_texts_of_odd_expressions() -> None:
    for expression in ODD:
        check(expression, SplitPattern(expression), "aaabbccdx'sSkK. \n1é日\u017f\u212a", 1_000)


def _drawn(rng: random.Random, depth: int = 0) -> str:
    """An expression by lot."""
    kind = rng.random()
    if depth > 2 or kind < 0.45:
        one = rng.choice((*"aabbc", " ", "[ab]", "[^a]", r"\s", r"\S", r"\w", "[^\\sa]"))
    elif kind < 0.55:
        return rng.choice(("(?=%s)", "(?!%s)")) % rng.choice(("a", r"\S", "[bc]", " ")) + _drawn(rng, depth + 1)
    elif kind < 0.62:
        return _drawn(rng, depth + 1) + rng.choice(("(?=a)", "(?!a)", r"(?!\S)", "$"))
    elif kind < 0.85:
        return "".join(_drawn(rng, depth + 1) for _ in range(rng.randint(2, 3)))
    else:
        one = "(?:" + "|".join(_drawn(rng, depth + 1) for _ in range(rng.randint(1, 3))) + ")"
    counts = (
        "",
        "",
        "",
        "?",
        "*",
        "+",
        "??",
        "+?",
        "?+",
        "*+",
        "++",
        "{2}",
        "{1,2}",
        "{2}?",
        "{1}+",
        "{2,}",
        "{1,2}+",
    )
    return one + rng.choice(counts)


def check_drawn(count: int, number: int) -> None:
    rng = random.Random(number)
    taken = 0
    while taken < count:
        expression = _drawn(rng)
        try:
            pattern = SplitPattern(expression)
        except UnknownPattern:
            continue
        taken += 1
        with suppress(ValueError), panics_caught():  # it gives up on some
            check(expression, pattern, "aabbc \n", 25)


def test_expressions_by_lot() -> None:
    check_drawn(150, 1)


@pytest.mark.long
def test_many_expressions_by_lot() -> None:
    check_drawn(20_000, 2)


REFUSED = {
    "(?<=a)b": "has '\\('",
    "(?<!a)b": "has '\\('",
    "(?>a)b": "has '\\('",
    "(?<name>a)": "has '\\('",
    "(?-i:a)": "has '\\('",
    "a(?i)b": "has '\\('",
    r"(a)\1": r"has '\\1'",
    r"\ba": r"has '\\b'",
    r"\Aa": r"has '\\A'",
    r"a\z": r"has '\\z'",
    r"\Ka": r"has '\\K'",
    r"\ha": r"has '\\h'",  # a digit of a hexadecimal number
    r"\Xa": r"has '\\X'",
    "^a": "has '\\^'",
    "a**": "repeats what is repeated",
    "a{2}{3}": "repeats what is repeated",
    "a+*": "repeats what is repeated",
    "*a": "has '\\*'",
    "a{,2}": "has '{'",
    "a{": "has '{'",
    "a{3,1}": "repeats by",
    "a{0}b": "repeats by",
    "a{2,2}?": "repeats by",
    "a{99999}": "has '{'",
    "(a": r"no '\)'",
    "a)": "not opened",
    "[a": "ends within a class",
    "[]a]": "begins with a bracket",
    "[^]a]": "begins with a bracket",
    "[[:alpha:]]": r"has '\[:'",
    "[a--b]": "has '--'",
    "[a||b]": r"has '\|\|'",
    "[a~~b]": "has '~~'",
    "(?=ab)c": r"no '\)'",
    "(?=": "ends within a bracket",
    r"\p{Alphabetic}": r"has '\\p'",
    r"\pL": r"has '\\p'",
    r"\p{L": r"has '\\p'",
    r"\xe9": r"has '\\x'",
    r"\x{41}": r"has '\\x'",
    r"\u12": r"has '\\u'",
    "\\": r"has '\\'",
    "": "nothing at all",
    "a|": "nothing at all",
    "a*": "nothing at all",
    "(?:a?b?)*": "nothing at all",
    "a|$": "nothing but a condition",
    "(?!a)": "nothing but a condition",
    "a|(?=a)(?!b)": "nothing but a condition",
    "(?i:ss)": "stands for 'ss'",  # as U+00DF
    "(?i:s{2})": "stands for 'ss'",
    "(?i:(?:s|f)(?:x|i))": "stands for 'fi'",
    "(?i:s(?=t)t)": "stands for 'st'",
    "(?i:ß)": "ignores the case of 'ß'",
    r"(?i:\p{Lu})": "ignores the case of",
    r"(?i:[\w])": "ignores the case of",
    "(?:" * 99 + "a" + ")" * 99: "brackets are open",
    "(?:" * 99_999: "brackets are open",
    "a" * (MAX_ATOMS + 1): "more than 256",
}


@pytest.mark.parametrize("expression", REFUSED, ids=lambda expression: expression[:20])
def test_what_is_not_taken(expression: str) -> None:
    with pytest.raises(UnknownPattern, match=REFUSED[expression]):
        SplitPattern(expression)


@pytest.mark.parametrize(
    ("expression", "neighbours", "is_local", "divides"),
    [
        (r"\p{N}{1}+", "12", False, True),
        (r"\p{N}{1,3}", "12", False, True),
        (r"\p{N}", "12", True, True),
        ("xa{1}?y", "xy", False, False),
        (r"\w+(?!\S)", "a ", True, False),
        (r"\w+(?!\S)", "a.", False, False),
        (r"\w+$", "a\n", False, False),
        ("(?:a?+){1}a|b", "ac", True, False),
        ("(?:a?){1}a|b", "ac", True, True),
        ("a++a|b", "ac", True, False),
        ("aa|b", "ac", True, False),
        ("a{2,}|b", "ac", True, False),
        ("(?i:'s)", "'\u017f", False, False),
        ("(?i:k)", "\u212ax", True, True),
    ],
)
def test_neighbours(expression: str, neighbours: str, is_local: bool, divides: bool) -> None:
    """Whether they are local, and whether the first is always taken; that no text differs, the others show."""
    pattern = SplitPattern(expression)
    assert (pattern.is_local(*neighbours), pattern.always_takes(neighbours[0])) == (is_local, divides)


def test_a_text_stands_for_itself() -> None:
    pattern = literal("a.*\n")
    assert not pattern.is_local("a", ".")
    assert not pattern.is_local(".", "*")
    assert pattern.is_local("a", "x")
    assert pattern.takes("\n")
    assert not pattern.always_takes("\n")
    assert literal(" ").always_takes(" ")


_CATEGORIES = (
    "L M N P S Z Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Han "
    "Letter Mark Number Punctuation Symbol"
)
_OTHERS = r"""
\w \s \d \W \S \D . \p{^L} \P{N} [^\s\p{L}\p{N}] [\p{L}&&[^\p{Han}]] [^a&&b] [^[^a]] [a-c[x-z]] \x7f \u00e9 \v
(?i:[a-z]) (?i:[A-z]) (?i:[^s]) (?i:[^a-j]) (?i:\s)
"""
CLASSES = (
    *(rf"\p{{{name}}}" for name in _CATEGORIES.split()),
    *_OTHERS.split(),
    *(f"(?i:{letter})" for letter in "abcdefghijklmnopqrstuvwxyz'-"),
)


@pytest.mark.long_unless(kept=lambda given: given["step"] > 1)
@pytest.mark.parametrize("step", [1, 97])
def test_all_libraries_know_settled_characters_alike(step: int) -> None:
    """Each class has the same ones for Oniguruma as for the package regex."""
    numbers = {*range(1, sys.maxunicode + 1, step), *range(1, 0x400), *range(0x2120, 0x2130)}
    settled = [letter for letter in map(chr, sorted(numbers)) if is_settled(letter)]
    assert len(settled) > 90_000 / step
    for expression in CLASSES:
        split = pre_tokenizers.Split(Regex(expression), "removed")
        left = {letter for piece, _ in split.pre_tokenize_str("".join(settled)) for letter in piece}
        pattern = SplitPattern(expression)
        wrong = [letter for letter in settled if pattern.takes(letter) is (letter in left)]
        assert not wrong, (expression, ascii(wrong[:9]))
