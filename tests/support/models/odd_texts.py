"""Texts that tokenizers may disagree on."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tests.support.models.models import sample_texts

_ODD = (
    *("I'll", "DON'T", "fooBarBaz", "12345", "  ", "\n", "\t", "\r\n", "中文字符", "日本語"),
    *("한국어", "привет", "é", "e\u0301", "👩‍👩‍👧", "…", "http://a.b/c?d=1", "$$", "ﬁ"),
    *("\uff12", "\u00a0", "\u0131", "ẞ", "ǅ"),
)


def odd_texts(count: int) -> Iterator[str]:
    """Make texts of words, marks, blanks, and characters from all of Unicode."""
    chance = random.Random(28)
    words = " ".join(sample_texts(40)).split()

    def piece() -> str:
        kind = chance.random()
        if kind < 0.4:
            return chance.choice((*_ODD, *words))
        if kind < 0.7:
            return " "
        if kind < 0.9:
            return "".join(chr(chance.randint(32, 126)) for _ in range(chance.randint(1, 8)))
        code = chance.randint(1, 0x10FFFF)
        return "" if 0xD800 <= code <= 0xDFFF else chr(code)

    return ("".join(piece() for _ in range(chance.randint(0, 24))) for _ in range(count))
