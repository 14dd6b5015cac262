r"""How byte-level tokenizers split texts before merges, by what GGUF files call them (tokenizer.ggml.pre).

The names are those of llama.cpp, the expressions those of each model's own tokenizer: one after the other splits
what those before it have left. `\s+` at the end of some takes what no other alternative does.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Split:
    """One way of splitting."""

    expressions: tuple[str, ...]
    composes: bool = False  # accents are composed first (NFC)
    ignores_merges: bool = False  # a whole word that is in the vocabulary is its token, whatever the merges make
    adds_bos: bool = False  # unless the file says otherwise


def _class(ranges: str) -> str:
    """The characters of ranges in hexadecimal, as the inside of a class of an expression."""
    return "".join("-".join(chr(int(end, 16)) for end in each.split("-")) for each in ranges.split())


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"
_MARKED_WORDS = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(ending: str, numbers: str) -> str:
    """Words are cut where a capital letter follows a small one."""
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{before}{_UPPER}*{_LOWER}+{ending}|{before}{_UPPER}+{_LOWER}*{ending}"
        rf"|{numbers}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
    )


# Letters that have a case, those of Georgia aside.
_CASED_LETTERS = _class(
    "41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C "
    "38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B "
    "1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 "
    "1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 "
    "2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B "
    "2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 "
    "FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF "
    "1E900-1E943"
)
_MARKS = _class("21-2F 3A-7E FF01-FF0F FF1A-FF5E 2018-201F 3000-3002")
_EAST_ASIAN = _class("4E00-9FA5 800-4E00 AC00-D7FF")
_HAN_AND_KANA = _class("4E00-9FA5 3040-309F 30A0-30FF")

_THREE_DIGITS, _ONE_DIGIT = (_WORDS % r"\p{N}{1,3}",), (_WORDS % r"\p{N}",)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    rf"\s?[{_MARKS}]+",
    r"\s+$",
    rf"[{_EAST_ASIAN}]+",
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", rf"[{_EAST_ASIAN}]+", r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    rf"[{_HAN_AND_KANA}]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANKS}",
)
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")
_SEED_CODER = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BLANKS}"

_LLAMA3 = Split(_THREE_DIGITS, ignores_merges=True, adds_bos=True)
_WITH_DIGITS = (r"\p{N}", _GPT2)
_QWEN2 = Split(_ONE_DIGIT, composes=True)

SPLITS = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), Split(_THREE_DIGITS)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    "qwen35": Split((_MARKED_WORDS,), composes=True),
    "stablelm2": _QWEN2,
    **dict.fromkeys(("hunyuan", "solar-open", "grok-2"), Split(_ONE_DIGIT)),
    "deepseek-llm": Split(_DEEPSEEK_LLM),
    "deepseek-coder": Split(_DEEPSEEK_CODER),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), Split(_DEEPSEEK_V3)),
    "tekken": Split((_cased("", r"\p{N}"),), ignores_merges=True, adds_bos=True),
    **dict.fromkeys(
        ("gpt-4o", "llama4", "kanana2", "minimax-m2"), Split((_cased(f"{_ENDINGS}?", r"\p{N}{1,3}"),))
    ),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "exaone4", "jais", "trillion"), Split((_GPT2,))
    ),
    **dict.fromkeys(("mpt", "olmo"), Split((_GPT2,), composes=True)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"), Split(_WITH_DIGITS)),
    "command-r": Split(_WITH_DIGITS, composes=True),
    "falcon": Split(_FALCON),
    "seed-coder": Split((_SEED_CODER,)),
}
