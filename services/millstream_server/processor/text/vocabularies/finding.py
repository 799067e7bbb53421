"""Which of a checkpoint's files its tokenizer is made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream_server.processor.text.vocabularies.sentencepiece_file import read_sentencepiece
from millstream_server.processor.text.vocabularies.tekken import read_tekken
from millstream_server.processor.text.vocabularies.tiktoken_file import is_tiktoken, read_tiktoken
from millstream_server.processor.text.vocabularies.vocabulary import (
    BrokenVocabularyError,
    Vocabulary,
)

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of vocabulary file."""

    name: str
    files: tuple[str, ...]
    """Patterns of the names; the first that fits."""
    read: Callable[[Path, Config, Config], Vocabulary]
    """Reads a file, with config.json and tokenizer_config.json."""
    fits: Callable[[Path], bool] = lambda _: True


OWN = "tokenizer.json"
_MODEL = ("tokenizer.model", "tokenizer.model.v*")
KINDS = (
    Kind("tekken", ("tekken.json", "tekken_*.json"), lambda file, _, __: read_tekken(file)),
    Kind("tiktoken", ("tiktoken.model", "*.tiktoken", *_MODEL), read_tiktoken, is_tiktoken),
    Kind(
        "sentencepiece",
        (*_MODEL, "spiece.model", "sentencepiece.bpe.model"),
        lambda file, _, names: read_sentencepiece(file, names),
    ),
)
"""In this order, where there is no tokenizer.json."""


@dataclass(frozen=True, slots=True)
class VocabularyFile:
    """A checkpoint's vocabulary file; ``kind`` None: it is the library's own tokenizer.json."""

    kind: Kind | None
    file: Path

    def __str__(self) -> str:
        return f"{self.kind.name}: {self.file.name}" if self.kind else self.file.name


def find(path: Path) -> VocabularyFile:
    """Return the file of a checkpoint.

    Raises:
        BrokenVocabularyError: it has none that can be read here.
    """
    if (path / OWN).is_file():
        return VocabularyFile(None, path / OWN)
    for kind in KINDS:
        for pattern in kind.files:
            for file in sorted(path.glob(pattern)):
                if file.is_file() and kind.fits(file):
                    return VocabularyFile(kind, file)
    known = ", ".join(dict.fromkeys(name for kind in KINDS for name in kind.files))
    code = next(iter(sorted(path.glob("tokenization*.py"))), None)
    why = f"; {code.name} is code of the checkpoint, which isn't run" if code else ""
    raise BrokenVocabularyError(f"{path} has no {OWN} and none of {known}{why}")
