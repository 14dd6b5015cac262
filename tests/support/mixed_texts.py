"""Texts of many kinds, drawn by a seed: prose, code, digits, scripts, emoji, marks, blanks."""

from __future__ import annotations

import random

# ruff: noqa: RUF001
_PROSE = """
the of and Oslo Mira counted 37 boats aren't I'll WE'VE don't helloWorld HTTPServer snake_case __init__ kWh
Straße naïve café Ünïcödé Москва Ελλάδα ქართული שלום مرحبا हिन्दी ภาษาไทย ελληνικά Ⅷ ½ ² ﬁ ΣΊΣΥΦΟΣ İstanbul
日本語 中文字符 カタカナ ひらがな 한국어 漢字かな交じり文 臺灣 龥 🙂 👩‍💻 🇳🇴 👍🏽 ❤️ 1 12 123 1234 1234567 3.14159
0x1F 1e-9 2,000 ٣٤ １２ https://example.org/a?b=%20#c user@example.com C:\\x\\y $12.50 #tag @name a/b // /* */
<!-- --> <div> </div> {'a':[1,2]} !=== -> => :: ... …… — “quoted” «so» ((( ))) }}}; \\n \\u0041 ~~~ ==== ---- ____
aaaa abababab ▁ Ġ
"""
_WORDS = [*_PROSE.split(), "e\u0301", "a\u0308\u0323", "o\u0331\u0301", "\u0301", "n\u0303o"]
_BETWEEN = [" "] * 12 + [
    "",
    "",
    "  ",
    "   ",
    "        ",
    "\n",
    "\n\n",
    "\r\n",
    "\t",
    "\n    ",
    " \n",
    "\u00a0",
    "\u3000",
]
_CODE = (
    "def f(x):\n    return x[0] + 1\n",
    "for (int i = 0; i < n; ++i) {\n\tsum += a[i];\n}\n",
    "SELECT * FROM t WHERE id='7';\n",
)


def mixed_texts(count: int, seed: int) -> list[str]:
    """`count` texts of up to some 30 words."""
    drawn = random.Random(seed)
    return [_text(drawn) for _ in range(count)]


def _text(drawn: random.Random) -> str:
    parts = []
    for _ in range(drawn.randint(1, 30)):
        kind = drawn.random()
        if kind < 0.85:
            parts.append(drawn.choice(_WORDS))
        elif kind < 0.9:
            parts.append(drawn.choice(_CODE))
        elif kind < 0.95:
            parts.append(drawn.choice("=-_ a0(.\n#▁") * drawn.randint(2, 40))
        else:
            first, last = drawn.choice(
                [(0x21, 0x7E), (0xC0, 0x24F), (0x370, 0x3FF), (0x4E00, 0x9FA5), (0x1F600, 0x1F64F)]
            )
            parts.append("".join(chr(drawn.randint(first, last)) for _ in range(drawn.randint(1, 6))))
        parts.append(drawn.choice(_BETWEEN))
    return "".join(parts)
