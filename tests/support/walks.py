"""Texts that a structural tag admits, by random walks through xgrammar's matcher."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import xgrammar

_EOS = 256
_LETTER = 257
"""The first token behind the end's: one of two bytes."""
_FILLING = frozenset((*b'ab1 ,"<\\\n', _LETTER))
"""What free text consists of."""
_FREE = 70
"""In free text, and inside of a string, more tokens than these may follow."""
_CLOSING = frozenset(b"\">}]),'")


class Tag:
    """A compiled tag, over a vocabulary of the bytes and, as models have them, of its markers."""

    def __init__(self, source: str) -> None:
        markers = sorted({text.encode() for text in _texts(json.loads(source)) if len(text) > 1})
        self._pieces = [*(bytes([byte]) for byte in range(256)), b"", "é".encode(), *markers]
        info = xgrammar.TokenizerInfo(
            [*self._pieces[:_EOS], b"<eos>", *self._pieces[_LETTER:]],
            xgrammar.VocabType.RAW,
            vocab_size=len(self._pieces),
            stop_token_ids=[_EOS],
        )
        self._compiled = xgrammar.GrammarCompiler(info).compile_structural_tag(source)
        self._mask = xgrammar.allocate_token_bitmask(1, len(self._pieces))

    def admits(self, text: str) -> bool:
        """Return whether a text is a whole answer."""
        matcher = xgrammar.GrammarMatcher(self._compiled)
        return matcher.accept_string(text) and matcher.accept_token(_EOS)

    def draws(self, text: str) -> bool:
        """Return whether an engine can draw it: by tokens, which `admits` doesn't count."""
        matcher = xgrammar.GrammarMatcher(self._compiled)
        left = text.encode()
        while left:
            fitting = [
                at
                for at in self._allowed(matcher)
                if at != _EOS and left.startswith(self._pieces[at])
            ]
            if not fitting:
                return False
            token = max(fitting, key=lambda at: len(self._pieces[at]))
            assert matcher.accept_token(token)
            left = left[len(self._pieces[token]) :]
        return _EOS in self._allowed(matcher)

    def walk(self, rng: random.Random, most: int = 1500) -> str | None:
        """Return a text that it admits; None: none has ended within so many steps."""
        matcher = xgrammar.GrammarMatcher(self._compiled)
        written = b""
        for step in range(most):
            allowed = self._allowed(matcher)
            likely = (0.05 if len(allowed) > _FREE else 0.5) + step / most
            if _EOS in allowed and (len(allowed) == 1 or rng.random() < likely):
                return written.decode()
            token = self._chosen(rng, allowed - {_EOS}, step / most)
            if token is None or not matcher.accept_token(token):
                return None
            written += self._pieces[token]
        return None

    def _allowed(self, matcher: xgrammar.GrammarMatcher) -> set[int]:
        matcher.fill_next_token_bitmask(self._mask)
        words = self._mask[0].tolist()
        found = {at for at in range(len(self._pieces)) if words[at // 32] >> (at % 32) & 1}
        # A half of a character only inside of a marker, where nothing else can follow.
        return {at for at in found if at < 0x80 or at >= _EOS} or found

    def _chosen(self, rng: random.Random, allowed: set[int], done: float) -> int | None:
        if not allowed:
            return None
        markers = [token for token in allowed if token > _LETTER]
        filling = sorted(allowed & _FILLING)
        closing = sorted(allowed & _CLOSING)
        free = len(allowed) > _FREE
        if markers and rng.random() < (0.3 if free else 0.6 - done):
            return rng.choice(sorted(markers))
        if closing and rng.random() < 0.25 + done:
            return rng.choice(closing)
        return rng.choice(filling if free and filling else sorted(allowed))


def _texts(node: Any) -> Iterator[str]:
    """Yield the texts of a tag's markers."""
    if isinstance(node, list):
        for part in node:
            yield from _texts(part)
    elif isinstance(node, dict):
        for key, part in node.items():
            if key in {"begin", "end", "value", "separator"} and isinstance(part, str):
                yield part
            elif key not in {"json_schema", "excludes"}:
                yield from _texts(part)
