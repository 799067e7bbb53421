"""Compares a tokenizer of ours with the maker's package, over 10,000 random texts; by hand.

`TextModel.load(DIR).tokenizer.save("made.json")`, then, where the package is:
`python tests/support/models/vocabulary_oracles.py tekken|sentencepiece|PATTERN FILE made.json`.
PATTERN is that of a tiktoken file.
"""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

_TEXTS = 10_000
_WORDS = (
    *("hello", "World", "don't", "I'LL", "3.14", "\n\n", "  ", "\t", "世界", "ÿ", "e\u0301", "😀"),
    *(
        "ПРИВЕТ",
        "عربى",
        "한국어",
        "カナ",
        "!=",
        "camelCase",
        "\u00a0",
        "\r\n",
        "\x00",
        "'\u017f",
        "ﬁ",
    ),
    *("aaaa", "½", "Ⅳ"),
)


def random_texts() -> Iterator[str]:
    drawn = random.Random(7)
    for number in range(_TEXTS):
        if number % 2:
            yield drawn.choice(("", " ")).join(drawn.choices(_WORDS, k=drawn.randint(0, 30)))
        else:
            points = [drawn.randrange(drawn.choice((0x80, 0x3000, 0x11_0000))) for _ in range(30)]
            yield "".join(chr(p) for p in points if not 0xD800 <= p < 0xE000)


def maker(kind: str, file: Path) -> Callable[[str], Sequence[int]]:
    if kind == "tekken":
        module: Any = importlib.import_module("mistral_common.tokens.tokenizers.tekken")
        tekken = module.Tekkenizer.from_file(file)
        return lambda text: list(tekken.encode(text, bos=False, eos=False))
    if kind == "sentencepiece":
        module = importlib.import_module("sentencepiece")
        pieces = module.SentencePieceProcessor(model_file=str(file))
        return lambda text: list(pieces.encode(text))
    module = importlib.import_module("tiktoken")
    ranks = importlib.import_module("tiktoken.load").load_tiktoken_bpe(str(file))
    encoding = module.Encoding("own", pat_str=kind, mergeable_ranks=ranks, special_tokens={})
    return lambda text: list(encoding.encode(text, disallowed_special=()))


def main(kind: str, file: str, made: str) -> int:
    encode = maker(kind, Path(file))
    library: Any = importlib.import_module("tokenizers")
    ours = library.Tokenizer.from_file(made)
    texts = list(random_texts())
    different = [t for t in texts if encode(t) != ours.encode(t, add_special_tokens=False).ids]
    said = [f"{len(different)} of {len(texts)} differ", *map(repr, different[:5])]
    sys.stdout.write("\n".join(said) + "\n")
    return bool(different)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
