"""One choice of a generation: from its legs' tokens to text."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

from millstream_server.generation.output import Finish, FinishReason, TokenLogprob
from millstream_server.generation.request import GenerationRequest
from millstream_server.processor.launch import Launch
from millstream_server.processor.legs import Leg, LegEvents
from millstream_server.processor.text.output import ChoiceText

_MOST_TOKENS = 16_384
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


class Choice:
    """One choice while it is generated.

    ``answer`` is the leg that its tokens come from; ``prompt`` the one that runs the prompt, which
    is the same where one worker does both.
    """

    __slots__ = (
        "_later",
        "_shares",
        "_show_matched_token",
        "_text",
        "_text_parts",
        "answer",
        "finish_reason",
        "index",
        "prompt",
        "token_ids",
        "wants_prompt_logprobs",
    )

    def __init__(
        self,
        index: int,
        events: LegEvents,
        text: ChoiceText,
        *,
        show_matched_token: bool,
        shares: int = 1,
    ) -> None:
        """``show_matched_token``: the text includes the token that ended the choice.

        ``shares``: how many choices share a message.
        """
        self.index = index
        self._shares = shares
        self.answer = Leg(events)
        self._later: tuple[Launch, GenerationRequest] | None = None
        """How to start the answering leg, in a plan whose legs run in sequence."""
        self.prompt = self.answer
        self.wants_prompt_logprobs = False
        """No delta is returned before the prompt's leg has ended with the prompt's logprobs."""
        self.finish_reason: FinishReason | None = None
        """Set when the last delta has been returned."""
        self.token_ids = array("I")
        """The tokens returned so far: another worker could continue after them."""
        self._text = text
        self._text_parts: list[str] = []
        self._show_matched_token = show_matched_token

    def start(self, launch: Launch) -> None:
        """Start the legs; if the plan runs them in sequence, only the first.

        Raises:
            UnavailableError: a worker has just disconnected.
        """
        request = launch.request_of(self.index)
        if not launch.hands_off:
            launch.start(self.answer, 0, request)
            return
        self.prompt = Leg(self.answer.events)
        request = replace(request, ticket=launch.mint())
        launch.start(self.prompt, 0, request)
        logprobs = request.logprobs
        if logprobs and logprobs.prompt:  # only the leg that runs the prompt has them
            self.wants_prompt_logprobs = True
            request = replace(request, logprobs=replace(logprobs, prompt=False))
        if launch.plan.concurrent:
            launch.start(self.answer, 1, request)
        else:
            self._later = launch, request

    @property
    def answer_waits(self) -> bool:
        """Whether the answering leg can start now: the prompt's leg has succeeded."""
        return self._later is not None and self.prompt.result is not None

    def start_answer(self) -> None:
        """Start the answering leg of a plan in sequence; if the prompt's was cancelled, end it.

        Raises:
            UnavailableError: its worker has just disconnected.
        """
        later, self._later = self._later, None
        prompt = self.prompt.result
        if later is None or prompt is None:
            return
        if prompt.reason is FinishReason.CANCELLED:
            self.answer.finish(prompt)
            return
        launch, request = later
        launch.start(self.answer, 1, request)

    @property
    def complete(self) -> bool:
        """Whether the last delta has been returned."""
        return self.finish_reason is not None

    @property
    def waits_for_prompt(self) -> bool:
        """Whether the prompt's logprobs are requested and have not arrived."""
        return self.wants_prompt_logprobs and self.prompt.result is None

    @property
    def needs(self) -> bool:
        """Whether a failure of a leg fails the choice: its output is still incomplete."""
        return not self.complete and (self.answer.result is None or self.waits_for_prompt)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were found in a worker's KV cache."""
        found = (leg.result.cached_tokens for leg in (self.prompt, self.answer) if leg.result)
        return max(found, default=0)

    @property
    def prompt_logprobs(self) -> Sequence[TokenLogprob]:
        """The prompt's logprobs; empty if not requested or not complete."""
        result = self.prompt.result
        return result.prompt_logprobs if result else ()

    @property
    def text(self) -> str:
        """All text returned so far."""
        return "".join(self._text_parts)

    def cancel(self) -> None:
        """Ask the workers to stop."""
        self.prompt.cancel()
        if self.answer is not self.prompt:
            self.answer.cancel()

    @property
    def held_bytes(self) -> int:
        """About what the output takes that has not been returned."""
        held = self.answer.held_bytes
        return held if self.prompt is self.answer else held + self.prompt.held_bytes

    def drop(self) -> None:
        """Drop what has not been returned."""
        self.prompt.drop()
        self.answer.drop()

    def take(self) -> Delta | None:
        """Return the new output as a delta; None if there is none."""
        answer = self.answer
        ids, finish = answer.token_ids, answer.result
        if not (ids or finish) or self.finish_reason is not None or self.waits_for_prompt:
            return None
        answer.token_ids = []
        logprobs, answer.logprobs = answer.logprobs, None
        most = max(1, (_MOST_TOKENS if logprobs is None else _MOST_LOGPROBS) // self._shares)
        if len(ids) > most:
            ids, answer.token_ids = ids[:most], ids[most:]
            if logprobs is not None:
                logprobs, answer.logprobs = logprobs[:most], logprobs[most:]
            finish = None  # it comes with the rest
        if finish is None and not self._text.stops:  # nearly every delta
            text = self._text.push_all(ids)
            self.token_ids.extend(ids)
            self._text_parts.append(text)
            return Delta(self.index, text, ids, logprobs or ())
        return self._take_slowly(ids, logprobs or (), finish)

    def _take_slowly(
        self, ids: list[int], logprobs: Sequence[TokenLogprob], finish: Finish | None
    ) -> Delta:
        """Make a delta that may be the last."""
        text, consumed = self._push(ids, finish)
        matched: str | int | None = self._text.matched
        if matched is not None:
            self.finish_reason = FinishReason.STOP
            self.cancel()  # the worker may have generated beyond the stop string
        elif finish is not None:
            text += self._text.finish()
            self.finish_reason, matched = finish.reason, finish.matched_token_id
            if self._text.matched is not None:  # completed by an incomplete last character
                self.finish_reason, matched = FinishReason.STOP, self._text.matched
        if consumed < len(ids):
            del ids[consumed:]
        self.token_ids.extend(ids)
        self._text_parts.append(text)
        return Delta(
            self.index,
            text,
            ids,
            logprobs[:consumed],
            self.finish_reason,
            matched if self.finish_reason is FinishReason.STOP else None,
        )

    @property
    def has_more(self) -> bool:
        """Whether `take` has left tokens for the next delta."""
        return bool(self.answer.token_ids) and not self.complete

    def _push(self, ids: list[int], finish: Finish | None) -> tuple[str, int]:
        """Detokenize; the EOS or stop token counts in usage, but its text is left out."""
        hidden = (
            not self._show_matched_token
            and finish is not None
            and bool(ids)
            and finish.matched_token_id == ids[-1]
        )
        delta = self._text.push(ids[:-1] if hidden else ids)
        hidden_counts = hidden and delta.matched_stop is None
        return delta.text, delta.consumed_tokens + (1 if hidden_counts else 0)
