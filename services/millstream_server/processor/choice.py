"""A turn's choices: the legs that tokens come from, and the text that they become."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from millstream_server.formats.calls import Call
from millstream_server.formats.events import Event
from millstream_server.generation.output import (
    Finish,
    FinishReason,
    LogprobColumns,
    OutputSink,
    TokenLogprob,
    logprob_bytes,
    output_bytes,
)
from millstream_server.processor.leg import Leg
from millstream_server.processor.telemetry import NO_SPAN
from millstream_server.processor.text.detokenizer import detokenizer
from millstream_server.processor.text.messages import ChatMessage, ChatRole
from millstream_server.processor.text.stops import StopMatcher

if TYPE_CHECKING:
    from millstream_server.generation.ticket import Ticket
    from millstream_server.processor.dispatch import Dispatch
    from millstream_server.processor.successor import Successor
    from millstream_server.processor.turn import Turn

MOST_TOKENS = 16_384
_MOST_LOGPROBS = 256
"""Most tokens of one message, without and with logprobs (up to 21 each): clients take messages of
4 MiB, and while one stream's backlog becomes text all others wait."""


@dataclass(slots=True)
class Delta:
    """New output of one choice; ``finish_reason`` is set in the last delta.

    Not frozen, since that would take three times as long to make; nobody changes one.
    """

    index: int
    text: str = ""
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob] = ()
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None
    """The stop string, or the id of the EOS or stop token."""
    events: Sequence[Event] = ()
    """In place of ``text``, where the answer is read."""
    calls: Sequence[Call] = ()
    """In the last delta: all tool calls."""


class StoppedText:
    """The text of a choice's tokens: whole characters, up to a stop."""

    __slots__ = ("_detokenizer", "_matcher", "_shows_end", "matched", "push")

    def __init__(self, turn: Turn, *, continuation: bool) -> None:
        """Begin; ``continuation``: the text continues the prompt's."""
        options = turn.options
        special = options.include_special_tokens
        self._shows_end = special
        """The text includes the token that ended the choice."""
        self._detokenizer = detokenizer(
            turn.text_model,
            skip_special_tokens=not special,
            shown=turn.shown,
            continuation=continuation,
            behind=turn.request.token_ids if continuation else (),
        )
        self.push = self._detokenizer.push
        """Takes new tokens, returns the text that they complete, whatever the stops."""
        self._matcher = StopMatcher(options.stops) if options.stops else None
        self.matched: str | None = None
        """The stop that is complete."""

    def read(self, ids: Sequence[int], finish: Finish | None) -> tuple[str, int]:
        """Return the new text and how many of the tokens it is made of.

        The EOS or stop token counts, but its text is left out. Tokens after a stop string don't
        count: so usage is exact although the engine may have generated beyond it.
        """
        shown = ids[:-1] if self.hides_last(ids, finish) else ids
        if self._matcher is None:
            return self.push(shown), len(ids)
        parts: list[str] = []
        for count, token_id in enumerate(shown, start=1):  # to know which completed the stop
            parts.append(self.step(token_id))
            if self.matched is not None:
                return "".join(parts), count
        return "".join(parts), len(ids)

    def hides_last(self, ids: Sequence[int], finish: Finish | None) -> bool:
        """Whether the last token's text is left out, since it ended the choice."""
        return (
            not self._shows_end
            and finish is not None
            and bool(ids)
            and finish.matched_token_id == ids[-1]
        )

    def step(self, token_id: int) -> str:
        """Read one token; return the text that no stop can begin with any more."""
        text = self.push((token_id,))
        if self._matcher is not None:
            text, self.matched = self._matcher.push(text)
        return text

    def held(self) -> str:
        """Return what was held back as a stop's beginning: no stop goes on here."""
        return "" if self._matcher is None else self._matcher.flush()

    def rest(self) -> str:
        """Return the remaining text at the end."""
        rest = self._detokenizer.flush()
        if self._matcher is not None:
            rest, self.matched = self._matcher.push(rest)
        return rest + self.held()


class Choice(Leg):
    """One choice: the leg that its tokens come from, and what they become."""

    __slots__ = ("_logprobs", "_push", "_shares", "_text", "_texts", "dispatch", "finish_reason",
                 "index", "prompt_leg", "successor", "ticket", "token_ids", "unsent",
                 "wants_prompt_logprobs")  # fmt: skip

    def __init__(self, turn: Turn, index: int, *, continuation: bool = False) -> None:
        """Make a turn's choice ``index``; ``continuation``: its text continues the prompt's."""
        super().__init__(turn)
        self.index = index
        self.prompt_leg: Leg | None = None
        """The leg that runs the prompt; None: this one does (itself here would be a cycle)."""
        self.ticket: Ticket | None = None
        """Of a hand-off whose second leg has not started."""
        self.dispatch: Dispatch | None = None
        """What starts that leg."""
        self.successor: Successor | None = None
        """What stands in for a worker that was lost; None: none was."""
        self.wants_prompt_logprobs = False
        """No delta is made before the prompt's leg has ended with the prompt's logprobs."""
        self.finish_reason: FinishReason | None = None
        """Set when the last delta has been made."""
        self.unsent: list[int] = []
        """Tokens that have come and are in no delta."""
        self._logprobs: LogprobColumns | None = None
        """Of ``unsent``; None: of none."""
        self.token_ids = array("I")
        """The tokens of all deltas."""
        self._texts: list[str] = []
        self._shares = turn.options.n
        """How many choices share a message."""
        self._text = StoppedText(turn, continuation=continuation)
        self._push = self._text.push

    # ---- from the worker: once per frame entry

    def emit(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> None:
        """Keep new tokens until the turn's call can be written."""
        self.unsent += token_ids
        if logprobs:
            self._keep(logprobs)
        turn = self.turn
        output = turn.output
        if not output.scheduled:
            output.schedule()
        if output.gathers:
            output.count(output_bytes(token_ids, logprobs))
        if turn.media is not None:
            turn.release_media()

    def _keep(self, logprobs: Sequence[TokenLogprob]) -> None:
        if self._logprobs is not None:
            self._logprobs.extend(logprobs)
        elif isinstance(logprobs, LogprobColumns):
            self._logprobs = logprobs
        else:
            self._logprobs = LogprobColumns(logprobs)

    # ---- its state

    @property
    def prompt(self) -> Leg:
        """The leg that runs the prompt: itself where one worker does both."""
        return self.prompt_leg or self

    @property
    def sink(self) -> OutputSink:
        return self.successor or self

    @property
    def has_tokens(self) -> bool:
        """Whether its worker has sent any: the prompt has been computed."""
        if self.successor is not None:
            return self.successor.has_tokens
        return bool(self.unsent or self.token_ids)

    @property
    def has_more(self) -> bool:
        """Whether `take` has left tokens for the next delta."""
        return bool(self.unsent) and self.finish_reason is None

    @property
    def waits_for_prompt(self) -> bool:
        """Whether the prompt's logprobs are requested and have not arrived."""
        return self.wants_prompt_logprobs and self.prompt.result is None

    def needs(self, leg: Leg) -> bool:
        """Whether a failure of a leg fails the choice: something of it is still to come.

        Nothing is, of a prompt's leg, once decode has sent a token: the KV cache has come. Its end
        may be told later, and is lost if its worker dies meanwhile.
        """
        if self.finish_reason is not None:
            return False
        handed_off = leg is self.prompt_leg and self.has_tokens
        return self.waits_for_prompt or (self.result is None and not handed_off)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were found in a worker's KV cache."""
        found = 0 if self.result is None else self.result.cached_tokens
        prompt = self.prompt_leg
        if prompt is not None and prompt.result is not None:
            found = max(found, prompt.result.cached_tokens)
        return found

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def message(self) -> ChatMessage:
        """What is added to the conversation."""
        return ChatMessage(ChatRole.ASSISTANT, self.text)

    @property
    def reasoning_tokens(self) -> int:
        return 0

    def cancel(self) -> None:
        super().cancel()
        if self.prompt_leg is not None:
            self.prompt_leg.cancel()
        if self.successor is not None:
            self.successor.cancel()

    @property
    def received(self) -> array[int]:
        """All tokens that have come."""
        return self.token_ids + array("I", self.unsent)

    def reopen(self, turn: Turn, successor: Successor | None) -> None:
        """Take nothing more from its workers; ``successor`` finds others, or it is ended next."""
        self.abandon()
        if self.prompt_leg is not None:
            self.prompt_leg.abandon()
        self.turn, self.successor, self.span = turn, successor, NO_SPAN
        self.error = self.result = self.prompt_leg = self.ticket = self.dispatch = None
        self.wants_prompt_logprobs = False
        self._running = successor

    def _ended(self) -> None:
        super()._ended()
        if self.successor is not None and self.over:
            self.successor = None  # it knows this object

    @property
    def held_bytes(self) -> int:
        """About what the output takes that is in no delta."""
        result = self.prompt.result
        return output_bytes(self.unsent, self._logprobs or ()) + logprob_bytes(
            result.prompt_logprobs if result else ()
        )

    def drop(self) -> None:
        self.unsent, self._logprobs = [], None
        prompt = self.prompt
        if prompt.result is not None and prompt.result.prompt_logprobs:
            prompt.result = replace(prompt.result, prompt_logprobs=())

    # ---- deltas

    def take_text(self) -> tuple[str, int]:
        """Return the new text and its number of tokens; without stops, logprobs and an end."""
        ids, self.unsent = self.unsent, []
        text = self._push(ids)
        self.token_ids.extend(ids)
        self._texts.append(text)
        return text, len(ids)

    def take(self, *, failed: bool = False) -> Delta | None:
        """Return the new output as a delta; None if there is none.

        ``failed``: another choice has ended the turn with an error, so that this one was cancelled.
        Nobody asked for that, so it isn't told.
        """
        ids, finish = self.unsent, self.result
        if failed and finish is not None and finish.reason is FinishReason.CANCELLED:
            finish = None
        if not (ids or finish) or self.finish_reason is not None or self.waits_for_prompt:
            return None
        logprobs, self.unsent, self._logprobs = self._logprobs, [], None
        most = max(1, (MOST_TOKENS if logprobs is None else _MOST_LOGPROBS) // self._shares)
        if len(ids) > most:
            ids, self.unsent = ids[:most], ids[most:]
            if logprobs is not None:
                logprobs, self._logprobs = logprobs[:most], logprobs[most:]
            finish = None  # it comes with the rest
        return self._delta(ids, logprobs, finish)

    def _delta(
        self, ids: list[int], logprobs: LogprobColumns | None, finish: Finish | None
    ) -> Delta:
        reader = self._text
        text, consumed = reader.read(ids, finish)
        matched: str | int | None = reader.matched
        if matched is not None:
            self.finish_reason = FinishReason.STOP
            self.cancel()  # the worker may have generated beyond the stop string
        elif finish is not None:
            text += reader.rest()
            self.finish_reason, matched = finish.reason, finish.matched_token_id
            if reader.matched is not None:  # completed by an incomplete last character
                self.finish_reason, matched = FinishReason.STOP, reader.matched
        if consumed < len(ids):
            del ids[consumed:]
        self.token_ids.extend(ids)
        self._texts.append(text)
        return Delta(
            self.index,
            text,
            ids,
            logprobs[:consumed] if logprobs is not None else (),
            self.finish_reason,
            matched if self.finish_reason is FinishReason.STOP else None,
        )
