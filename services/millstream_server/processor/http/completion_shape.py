"""How /v1/completions writes choices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from millstream_server.generation.output import TokenLogprob
from millstream_server.processor.choice import Delta
from millstream_server.processor.http.output import FINISH, Finish, Head, TokenUsage, encode, finite

if TYPE_CHECKING:
    from millstream_server.processor.choice import Choice
    from millstream_server.processor.text.tokenizer import TextModel
    from millstream_server.processor.turn import Turn


class TextLogprobs(msgspec.Struct):
    """Logprobs of a completion, in lists of one length."""

    text_offset: list[int]
    token_logprobs: list[float]
    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class TextChoice(msgspec.Struct):
    """One of `n` texts, or what is new of it."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Finish | None


class TextCompletion(Head):  # for the document; `Whole` and `Events` write it in pieces
    """The answer of /v1/completions, and each event of it."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: TokenUsage | msgspec.UnsetType | None = msgspec.UNSET


class CompletionShape:
    """Writes one completion's choices."""

    prefix = "cmpl-"
    kinds = ("text_completion", "text_completion")

    def __init__(self, first: int = 0) -> None:
        """Give the turn's choices the indices from ``first`` on; nothing was noted yet."""
        self._first = first
        self._logprobs: dict[int, TextLogprobs] = {}
        self._chars: dict[int, int] = {}
        """How long the texts of tokens are so far, by choice."""

    def event_parts(self, index: int) -> tuple[bytes, bytes]:
        return b'{"index":%d,"text":' % (
            self._first + index
        ), b',"logprobs":null,"finish_reason":null}'

    def choices(self, delta: Delta, turn: Turn, *, first: bool) -> Iterator[bytes]:
        finish = FINISH[delta.finish_reason] if delta.finish_reason else None
        logprobs = None
        if delta.logprobs:
            logprobs = self._of(delta.index, delta.logprobs, turn.text_model)
        if delta.text or logprobs or finish or first:
            yield encode(TextChoice(self._first + delta.index, delta.text, logprobs, finish))

    def note(self, delta: Delta, turn: Turn) -> None:
        if not delta.logprobs:
            return
        more = self._of(delta.index, delta.logprobs, turn.text_model)
        found = self._logprobs.setdefault(delta.index, TextLogprobs([], [], [], []))
        found.text_offset += more.text_offset
        found.token_logprobs += more.token_logprobs
        found.tokens += more.tokens
        found.top_logprobs += more.top_logprobs

    def whole(self, choice: Choice) -> bytes:
        finish = FINISH[choice.finish_reason] if choice.finish_reason else None
        logprobs = self._logprobs.get(choice.index)
        return encode(TextChoice(self._first + choice.index, choice.text, logprobs, finish))

    def _of(self, index: int, entries: Sequence[TokenLogprob], text: TextModel) -> TextLogprobs:
        made, at = TextLogprobs([], [], [], []), self._chars.get(index, 0)
        for entry in entries:
            token = _text(entry.token_id, text)
            made.text_offset.append(at)
            made.token_logprobs.append(finite(entry.logprob))
            made.tokens.append(token)
            made.top_logprobs.append({_text(i, text): finite(p) for i, p in entry.top})
            at += len(token)
        self._chars[index] = at
        return made


def _text(token_id: int, text: TextModel) -> str:
    return text.token_bytes(token_id).decode("utf-8", "replace")
