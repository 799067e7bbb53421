"""One Chat stream in plain types: its turns in order, the context, the workers used."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from millstream_server.generation.request import LogprobOptions
from millstream_server.processor.answer_options import DEFAULT_ANSWERS, AnswerOptions
from millstream_server.processor.media.uploads import Uploads
from millstream_server.processor.text.messages import ChatMessage, MediaPart, Tool
from millstream_server.runtime.drain import OpenWork
from millstream_server.runtime.errors import Failure, InvalidRequestError, UnavailableError
from millstream_server.runtime.frozen import dataclass
from millstream_server.runtime.priority import Priority
from millstream_server.runtime.rpc.auth import caller
from millstream_server.runtime.rpc.call import Call
from millstream_server.runtime.telemetry.trace_context import NOT_TRACED, TraceContext, incoming

MAX_WAITING_TURNS = 16
_HALF_CLOSE_S = 1.0
"""How long a client may take to close its side after the server's shutdown has begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The caller of an RPC."""

    deadline_s: float | None = None
    """On the clock of `time.monotonic`; None: none."""
    trace: TraceContext = NOT_TRACED
    name: str = ""
    """Whose key or certificate it has (`runtime.rpc.auth.caller`)."""

    @classmethod
    def of(cls, call: Call) -> Caller:
        """Return the caller of an RPC, in the task that serves it."""
        left_s = call.time_left_s
        return cls(
            deadline_s=None if left_s is None else time.monotonic() + left_s,
            trace=incoming(call.metadata),
            name=caller().name,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a client asked for besides its messages; not validated."""

    path: str
    """Path of their message, with a dot at the end: ``start.options.``."""
    sampling: Mapping[str, Any]
    """The fields of `Sampling` that the client set."""
    logprobs: LogprobOptions | None = None
    priority: Priority | None = Priority.NORMAL
    """None: an unknown value, which is refused."""
    n: int = 1
    stops: tuple[str, ...] = ()
    min_interval_s: float = 0.0
    return_token_ids: bool = False
    include_special_tokens: bool = False
    adapter: str = ""
    """Name of a LoRA adapter; empty: the model itself."""
    session: str = ""
    """Requests with the same one go to the same worker; empty: no preference."""
    cache_salt: str = ""
    """Requests with different ones share no KV cache."""
    seed_left_out: bool = False
    """Its workers can't keep the seed that was asked for as best effort."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A raw prompt to be continued: text or token ids."""

    model: str
    request_id: str
    prompt: str | Sequence[int]
    options: Options


@dataclass(frozen=True, slots=True)
class UserTurn:
    """A turn: what the client adds to the conversation."""

    messages: tuple[ChatMessage, ...]
    options: Options | None
    """New options from this turn on; None: the old ones stay."""
    field: str
    """Path of the turn's field in the message: ``start.messages``, ``user_turn.content``."""
    has_results: bool = False
    """It has the results of tool calls."""


class DrainNotice:
    """In place of a turn: the client is to be told that the server shuts down."""


class Stoppable(Protocol):
    """A turn that waits (`admission.Admission`) or runs (`turn.Turn`)."""

    def cancel(self) -> None:
        """Finish it as CANCELLED."""
        ...

    def fail(self, error: Failure) -> None:
        """End it with an error."""
        ...


class Conversation:
    """A conversation's turns: they wait, run one at a time and are added to the context.

    Two tasks use it. The reader of the stream calls `add`, `cancel`, `fail` and `close_input`. The
    writer gets each turn from `next_turn`, calls `runs` with the turn's admission and generation,
    and `ended` at its end.
    """

    def __init__(self, make_uploads: Callable[[], Uploads], work: OpenWork) -> None:
        """Start without turns; ``work`` knows whether the server accepts no new ones."""
        self.model = ""
        self.request_id = ""
        self.tools: Sequence[Tool] = ()
        self.answers: AnswerOptions = DEFAULT_ANSWERS
        self._make_uploads = make_uploads
        self.uploading: Uploads | None = None
        """The `uploads`; None, as in most conversations: none have begun."""
        self.messages: list[ChatMessage] = []
        """The context: the messages of all turns that have started."""
        self.workers: tuple[str, ...] = ()
        """Where the last turn ran, and its KV prefix is cached (`Plan.places`)."""
        self.number = 0
        """Number of the current turn, from 1."""
        self._options: Options | None = None
        self._work = work
        self._refused = False
        self._waiting: list[UserTurn] = []
        self._changed: asyncio.Future[None] | None = None
        """Set while the writer waits."""
        self._input_closed = False
        self._error: Failure | None = None
        self._current: Stoppable | None = None
        self._preparing = False
        self._cancelled: set[int] = set()
        self._draining = False
        self._notice_due = False

    @property
    def options(self) -> Options:
        if self._options is None:
            raise ValueError("no turn was taken yet")
        return self._options

    @property
    def told_tools(self) -> Sequence[Tool]:
        """The tools that the model is told of."""
        return self.tools if self.answers.with_tools else ()

    @property
    def continued(self) -> ChatMessage | None:
        """The message that this turn's answer goes on in; None: it is one of its own."""
        goes_on = self.answers.continues and self.number == 1 and self.messages
        return self.messages[-1] if goes_on else None

    @property
    def uploads(self) -> Uploads:
        """Files that came before the message that names them, and what all media hold."""
        if self.uploading is None:
            self.uploading = self._make_uploads()
        return self.uploading

    @property
    def media(self) -> list[MediaPart]:
        """The images and videos of the context, in order."""
        return [part for message in self.messages for part in message.media]

    @property
    def has_media(self) -> bool:
        """Whether a message of the context has an image or a video."""
        return any(message.parts for message in self.messages)

    # ---- from the client

    def add(self, turn: UserTurn) -> None:
        """Add a turn; it waits until those before it have ended. Its media count as held.

        Raises:
            InvalidRequestError: too many turns wait, or an upload isn't there.
            OverloadedError: there is no memory for its media.
        """
        if len(self._waiting) >= MAX_WAITING_TURNS:
            kind = turn.field.partition(".")[0]
            raise InvalidRequestError.of(
                kind, f"{MAX_WAITING_TURNS} turns wait already; wait for their answers"
            )
        if self._work.refusing:
            self._refused = True
        else:
            self._take_media(turn)
            self._waiting.append(turn)
        self._wake()

    def _take_media(self, turn: UserTurn) -> None:
        media = [part for said in turn.messages if said.parts for part in said.media]
        if media:
            self.uploads.hold.take(sum([len(part.data) for part in media]))
        for part in media:
            if part.upload_id is not None:
                part.pieces = self.uploads.take(part.upload_id, part.field)

    def cancel(self, number: int | None = None) -> None:
        """Cancel turn ``number``; None: the running turn or, between two turns, the next.

        No effect on a turn that has ended or doesn't exist.
        """
        in_hand = self._current is not None or self._preparing
        first = self.number if in_hand else self.number + 1
        if number is None:
            number = first
        if first <= number <= self.number + len(self._waiting):
            self._cancelled.add(number)
        if number == self.number and self._current:
            self._current.cancel()

    def fail(self, error: Failure) -> None:
        """End the running turn and the conversation with an error of the client's."""
        self._error = error
        if self._current:
            self._current.fail(error)

    def close(self) -> None:
        """Forget all media, now: who still knows this object may live until the next collection."""
        if self.uploading is not None:
            self.uploading.close()
        for message in [m for turn in self._waiting for m in turn.messages] + self.messages:
            if message.parts:
                for part in message.media:
                    part.data = b""

    def close_input(self) -> None:
        """The client has closed its side: waiting turns still run, then the conversation ends."""
        self._input_closed = True
        self._wake()

    def drain(self) -> None:
        """The server shuts down: turns added already still run, then the stream ends."""
        self._draining = self._notice_due = True
        self._wake()

    # ---- to the client

    def take_notice(self) -> bool:
        """Return whether the client is to be told now that the server shuts down: once True."""
        if not self._notice_due:
            return False
        self._notice_due = False
        return True

    async def next_turn(self) -> UserTurn | DrainNotice | None:
        """Wait for the next turn, and add its messages and options to the conversation.

        Return None when the client has closed its side and no turn waits. A `DrainNotice` comes
        once, if the server begins to shut down between two turns.

        Raises:
            ServingError: a client's error given to `fail`, or the server shuts down.
        """
        while True:
            if self._error:
                raise self._error
            if self._waiting:
                turn = self._waiting.pop(0)
                self.number += 1
                self._preparing = True
                self.messages += turn.messages
                self._options = turn.options or self._options
                return turn
            if self._refused:
                raise _shutting_down()
            if self._input_closed:
                return None
            if self.take_notice():
                return DrainNotice()
            await self._wait()

    async def _wait(self) -> None:
        self._changed = asyncio.get_running_loop().create_future()
        try:
            if not self._draining:
                await self._changed
                return
            # Not `wait_for`: Python 3.11's loses a cancel that comes with the time-out.
            async with asyncio.timeout(_HALF_CLOSE_S):
                await self._changed
        except TimeoutError:
            raise _shutting_down() from None
        finally:
            self._changed = None

    def _wake(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    def runs(self, current: Stoppable) -> None:
        """Set what runs for the turn: cancels go to ``current``, also those received before.

        Called first with the admission, then with the generation.
        """
        self._current, self._preparing = current, False
        if self._error:
            current.fail(self._error)
        elif self.number in self._cancelled:
            current.cancel()

    def ended(self, answer: ChatMessage, workers: tuple[str, ...]) -> None:
        """Add the turn's answer to the context; ``workers`` is empty if the turn never ran."""
        self._current = None
        self._cancelled.discard(self.number)
        self.workers = workers or self.workers
        if self.continued is not None:
            answer = self.messages.pop().continued(answer)
        self.messages.append(answer)


def _shutting_down() -> UnavailableError:
    return UnavailableError(
        "this server is shutting down; go on with the conversation on another one",
        retry_delay_s=0.1,
    )
