"""Expressions by which tokenizers of known families split texts, beside those that radixrt has itself."""

from __future__ import annotations

CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased(upper: str, lower: str, more: str) -> str:
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{before}{upper}*{lower}+{_ENDINGS}?|{before}{upper}+{lower}*{_ENDINGS}?"
        rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n{more}]*|{_BLANKS}"
    )


O200K = _cased(_UPPER, _LOWER, "/")
KIMI = r"[\p{Han}]+|" + _cased(f"{_UPPER[:-1]}&&[^\\p{{Han}}]]", f"{_LOWER[:-1]}&&[^\\p{{Han}}]]", "")
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"  # noqa: RUF001
