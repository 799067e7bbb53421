"""What a simulated engine says in the tokens of a model: English that can be worked out by hand.

The answer to a prompt of n tokens is

    I am a simulated engine and have no model. I read n tokens, thought of nothing and say this to
    everyone.

then, if images, videos, weights and adapters add to the step (`engines.simulated.state`), "Media,
weights and adapters add up to <the sum>.", then the token that ends an answer. A prompt that ends
in the beginning of its own answer is continued there, so a request that moves to another worker
gets the same tokens. A request that ignores the end gets the answer to all tokens so far next.

A prompt whose last message has `say "TEXT"`, TEXT as in JSON, is answered with that text: reasoning
and tool calls in the notation of any model, without a model. A tool's result may say it too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from millstream_server.runtime.settings import SettingsError

_SENTENCE = (
    "I am a simulated engine and have no model. I read {} tokens, thought of nothing and say this "
    "to everyone."
)
_SHIFTED = " Media, weights and adapters add up to {}."
_SAY = re.compile(r'say ("(?:[^"\\]|\\.)*")')
_READ = 2048
"""So many of a prompt's last tokens are looked through."""
_MOST_BEHIND = 80
"""Most characters of a template behind the last message: what comes before more isn't the last."""
_FILES = ("generation_config.json", "config.json")


class Speech:
    """Turns the answers into tokens of one model."""

    def __init__(self, tokenizer: Tokenizer, end: int) -> None:
        """``end`` is the token that ends an answer."""
        self._tokenizer = tokenizer
        self.end = end

    @classmethod
    def load(cls, model_path: Path) -> Speech | None:
        """Read a model's files; None: they have no tokenizer.json, or no token ends an answer.

        Raises:
            SettingsError: a file can't be read.
        """
        if not (model_path / "tokenizer.json").is_file():
            return None
        try:
            files = [model_path / name for name in _FILES]
            found = [json.loads(file.read_text("utf-8")) for file in files if file.is_file()]
            tokenizer = Tokenizer.from_file(str(model_path / "tokenizer.json"))
        except Exception as error:  # the binding raises no narrower class
            raise SettingsError(
                f"--model-path {model_path}: its tokenizer can't be read ({error}); "
                "give -- --vocab-size N for tokens without text"
            ) from error
        end = next(filter(None, map(_end_of, found)), None)
        return None if end is None else cls(tokenizer, end)

    def answer(self, prompt_tokens: int, shift: int) -> list[int]:
        """Return the tokens of the answer to a prompt of that length, its end the last."""
        text = _SENTENCE.format(prompt_tokens) + (_SHIFTED.format(shift) if shift else "")
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return [*ids, self.end]

    def tokens(self, prompt: Sequence[int], shift: int) -> Iterator[int]:
        """Yield what follows a prompt, without end."""
        length = len(prompt)
        rest = self._told(prompt) or self._rest(prompt, shift) or self.answer(length, shift)
        while True:
            yield from rest
            length += len(rest)
            rest = self.answer(length, shift)

    def _told(self, prompt: Sequence[int]) -> list[int]:
        """Return what is missing of a text that the last message says to say; empty: none does."""
        text = self._text(prompt[-_READ:])
        found = [*_SAY.finditer(text)]
        try:
            told = json.loads(found[-1][1]) if found else ""
        except ValueError:
            return []
        if not told:
            return []
        whole = [*self._tokenizer.encode(told, add_special_tokens=False).ids, self.end]
        said = next(
            count
            for count in range(min(len(whole) - 1, len(prompt)), -1, -1)
            if list(prompt[len(prompt) - count :]) == whole[:count]
        )
        behind = len(text) - found[-1].end() - len(self._text(whole[:said]))
        return whole[said:] if behind <= _MOST_BEHIND else []

    def _text(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def _rest(self, prompt: Sequence[int], shift: int) -> list[int]:
        """Return what is missing of an answer that the prompt ends in; empty: it ends in none."""
        longest = self.answer(len(prompt), shift)
        for start in range(max(1, len(prompt) - len(longest)), len(prompt)):
            if prompt[start] == longest[0]:
                whole, said = self.answer(start, shift), len(prompt) - start
                if said < len(whole) and list(prompt[start:]) == whole[:said]:
                    return whole[said:]
        return []


def _end_of(config: dict[str, Any]) -> int | None:
    for section in (config, config.get("text_config") or {}):
        ids = section.get("eos_token_id")
        if ids is not None:
            return int(ids[0] if isinstance(ids, list) else ids)
    return None
