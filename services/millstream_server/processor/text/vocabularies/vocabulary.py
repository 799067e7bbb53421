"""What every kind of vocabulary file becomes: a tokenizer, and the names of its special tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tokenizers import AddedToken, Tokenizer, processors


class BrokenVocabularyError(ValueError):
    """A file can't be used; who reads it names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """A tokenizer of the library's, with the ids of the maker's."""

    tokenizer: Tokenizer
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """What the files say of ``bos_token`` and so on, if tokenizer_config.json says nothing."""
    version: str = ""
    """A tekken file's, such as "v11", which its chat encoding depends on."""
    efforts: tuple[str, ...] = ()
    """Efforts of reasoning that a tekken file names; the first is the default."""


def add_special(tokenizer: Tokenizer, texts: Iterable[str]) -> None:
    """Let ``texts``, which are in the vocabulary, be read as one token each, and not be shown."""
    tokenizer.add_special_tokens(
        [AddedToken(text, normalized=False, special=True) for text in texts]
    )


def put_bos_first(tokenizer: Tokenizer, bos: str) -> None:
    """Let raw prompts begin with the token ``bos``."""
    token_id = tokenizer.token_to_id(bos)
    if token_id is None:
        raise BrokenVocabularyError(f"it has no token {bos}")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, token_id)]
    )
