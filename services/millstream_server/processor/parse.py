"""Reads an answer that didn't come from a turn of ours: the part of Chat behind the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from millstream_server.formats.calls import Call
from millstream_server.formats.events import Event
from millstream_server.formats.parser import PIECE_CHARS
from millstream_server.processor.answer import SECONDS_PER_CHAR, Answer, Reading, joined
from millstream_server.processor.prompts import check_token_ids
from millstream_server.processor.text.detokenizer import detokenizer
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.runtime.errors import InvalidRequestError
from millstream_server.runtime.work.pool import WorkPool, stop_if_gone

MAX_ANSWER_IDS = 1 << 20
MAX_ANSWER_CHARS = 4 << 20
_AT_ONCE = 256
"""Token ids that are read on the event loop, or events that are converted, in some 2 ms."""
_SECONDS_PER_ID = 10e-6
_MOST_READ_CHARS = 1 << 17
"""Arguments up to here are checked on the event loop at a call's end, in 0.3 ms."""
_SECONDS_PER_READ_CHAR = 2e-9
_SHORTEST_CALL = 16
"""Characters of a call, its markers included."""
T = TypeVar("T")


class ParsedAnswer:
    """One answer, in pieces of any size, as text or as token ids.

    Order of calls: `add_ids` or `add_text` any number of times, `finish` once. Each returns the
    events that have come.
    """

    def __init__(self, text: TextModel, reading: Reading, threads: WorkPool) -> None:
        self._answer = Answer(reading, shows_special=False)
        self._detokenizer = detokenizer(text, shown=reading.shown)
        self._vocab_size = text.vocab_size
        self._threads = threads
        self._step = 1 if reading.one_call else PIECE_CHARS
        """Characters that are read before it is asked whether the answer ends there."""
        self._over = False
        self._ids = 0
        self._chars = 0
        self._read = 0
        """Characters so far, also of token ids."""

    async def add_ids(self, ids: Sequence[int], field: str) -> list[Event]:
        """Read on; errors name ``field``.

        Raises:
            InvalidRequestError: the answer is of text, too long, or an id is no token.
        """
        self._ids += len(ids)
        if self._chars:
            raise _mixed(field)
        if self._ids > MAX_ANSWER_IDS:
            raise InvalidRequestError.of(field, f"at most {MAX_ANSWER_IDS} in all")

        def work() -> list[Event]:
            check_token_ids(ids, self._vocab_size, field)
            events: list[Event] = []
            for start in range(0, len(ids), _AT_ONCE):
                stop_if_gone()
                for token_id in ids[start : start + _AT_ONCE]:
                    self._push(self._detokenizer.push((token_id,)), (token_id,))
                # An event of each token would take 80 times its bytes.
                events += joined(self._answer.take())
            return joined(events)

        return await self._run(work, len(ids) * _SECONDS_PER_ID, short=len(ids) <= _AT_ONCE)

    async def add_text(self, piece: str, field: str) -> list[Event]:
        """Read on; errors name ``field``.

        Raises:
            InvalidRequestError: the answer is of token ids, or too long.
        """
        self._chars += len(piece)
        if self._ids:
            raise _mixed(field)
        if self._chars > MAX_ANSWER_CHARS:
            raise InvalidRequestError.of(field, f"at most {MAX_ANSWER_CHARS} characters in all")

        def work() -> list[Event]:
            for start in range(0, len(piece), self._step):
                stop_if_gone()
                self._push(piece[start : start + self._step], ())
            return joined(self._answer.take())

        return await self._run(work, len(piece) * SECONDS_PER_CHAR, short=len(piece) <= PIECE_CHARS)

    async def converted(self, work: Callable[[], T], events: int | None = None) -> T:
        """Make a message of so many ``events``, or of all calls: few at once, many in the pool."""
        count = (self._ids + self._chars) // _SHORTEST_CALL if events is None else events
        if count <= _AT_ONCE:
            return work()
        return await self._threads.run(work, count * _SECONDS_PER_ID)

    async def finish(self) -> list[Event]:
        """End the answer; return what was held back."""

        def work() -> list[Event]:
            self._push(self._detokenizer.flush(), ())
            self._answer.finish()
            return joined(self._answer.take())

        return await self._run(work, 0, short=True)

    async def _run(
        self, work: Callable[[], list[Event]], seconds: float, *, short: bool
    ) -> list[Event]:
        """Do work on the event loop if it is short, and no call can end in it that is long."""
        if short and self._read <= _MOST_READ_CHARS:
            return work()
        return await self._threads.run(work, seconds + self._read * _SECONDS_PER_READ_CHAR)

    def _push(self, text: str, ids: Sequence[int]) -> None:
        self._read += len(text)
        if not self._over:
            self._over = self._answer.push(text, ids)

    @property
    def whole_calls(self) -> Sequence[Call]:
        """All calls; empty if they are too large for one message."""
        return self._answer.whole_calls

    @property
    def reasoning_tokens(self) -> int:
        return self._answer.reasoning_tokens


def _mixed(field: str) -> InvalidRequestError:
    return InvalidRequestError.of(field, "an answer is of token ids or of text, not of both")
