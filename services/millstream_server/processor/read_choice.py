"""A choice whose answer is read: reasoning, text and tool calls as events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from millstream_server.formats.calls import Call
from millstream_server.generation.output import Finish, FinishReason, LogprobColumns
from millstream_server.processor.answer import Answer, Reading, joined
from millstream_server.processor.choice import Choice, Delta
from millstream_server.processor.text.messages import ChatMessage

if TYPE_CHECKING:
    from millstream_server.processor.turn import Turn


class ReadChoice(Choice):
    """A choice with events in place of text."""

    __slots__ = ("_answer",)

    def __init__(
        self, turn: Turn, index: int, reading: Reading, *, continuation: bool = False
    ) -> None:
        super().__init__(turn, index, continuation=continuation)
        self._answer = Answer(reading, shows_special=turn.options.include_special_tokens)

    @property
    def message(self) -> ChatMessage:
        return self._answer.message

    @property
    def reasoning_tokens(self) -> int:
        return self._answer.reasoning_tokens

    def _delta(
        self, ids: list[int], logprobs: LogprobColumns | None, finish: Finish | None
    ) -> Delta:
        answer, text = self._answer, self._text
        consumed, ends = self._push_events(ids, finish)
        matched: str | int | None = text.matched
        if ends:
            self.finish_reason = FinishReason.TOOL_CALLS if matched is None else FinishReason.STOP
            self.cancel()  # the worker may have generated beyond
        elif finish is not None:
            answer.push(text.rest(), ())
            self.finish_reason, matched = finish.reason, finish.matched_token_id
            if text.matched is not None:
                self.finish_reason, matched = FinishReason.STOP, text.matched
        del ids[consumed:]
        self.token_ids.extend(ids)
        calls: Sequence[Call] = ()
        if self.finish_reason is not None:
            answer.finish()
            calls = answer.whole_calls
            if self.finish_reason is FinishReason.STOP and text.matched is None and answer.can_call:
                self.finish_reason = FinishReason.TOOL_CALLS
        return Delta(
            self.index,
            "",
            ids,
            logprobs[:consumed] if logprobs is not None else (),
            self.finish_reason,
            matched if self.finish_reason is FinishReason.STOP else None,
            joined(answer.take()),
            calls,
        )

    def _push_events(self, ids: Sequence[int], finish: Finish | None) -> tuple[int, bool]:
        """Read tokens one by one; return how many, and whether the choice ends behind them."""
        answer, reader = self._answer, self._text
        hidden = len(ids) if reader.hides_last(ids, finish) else 0
        for count, token_id in enumerate(ids, start=1):
            text = "" if count == hidden else reader.step(token_id)
            if answer.shows(token_id):
                text += reader.held()  # it stands before the marker
            if answer.push(text, (token_id,)) or reader.matched is not None:
                return count, True
        return len(ids), False
