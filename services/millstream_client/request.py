"""One request: its attempts, within its time-out, and the pauses between them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from millstream_client.answers import Answer
from millstream_client.errors import (
    IncompleteAnswerError,
    InvalidRequestError,
    MillstreamError,
    RequestCancelledError,
    from_rpc_error,
)

if TYPE_CHECKING:
    from millstream_client.connection import Connection

Attempt = Callable[[], AsyncGenerator[Any, None]]
"""Sends the request once and yields the server's messages; closing the generator ends the call."""
GoesOn = Callable[[], bool]
"""Returns whether the part of the answer that has come can be continued."""
Adapt = Callable[[MillstreamError], bool]
"""Called with a failure; may change the request; returns whether to send it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """Sends a request again after a temporary failure.

    That is safe: a request has no effect but its answer. Once a part of the answer has arrived, a
    chat or a completion goes on behind it (``go_on``); what can't go on raises the failure.
    """

    attempts: int = 4
    """Most attempts of one request, including the first."""
    first_pause_s: float = 0.2
    """Pause before the second attempt; each further one is twice as long. The server's pause
    (``RetryInfo``) is used instead if it is longer."""
    max_pause_s: float = 10.0
    """Longest pause; if the server requests a longer one, the failure is raised instead."""
    wait_s: float = 10.0
    """Longest wait for a connection before an attempt."""
    go_on: bool = True
    """Whether an answer whose server is lost goes on at another one, as far as that is right: text
    and reasoning, without several choices, stops, logprobs, constraints and tool calls."""


NO_RETRY = Retry(attempts=1)
"""No retries: every failure is raised at once."""


class Attempts:
    """The attempts of one request, within its time-out."""

    def __init__(self, retry: Retry, timeout_s: float | None) -> None:
        """Begin; the time-out starts now."""
        self._retry = retry
        self._made = 1
        self._deadline_s = None if timeout_s is None else time.monotonic() + timeout_s

    def timeout_s(self) -> float | None:
        """Return the seconds left; None without a limit."""
        if self._deadline_s is None:
            return None
        return max(0.0, self._deadline_s - time.monotonic())

    def pause_s(self, error: MillstreamError) -> float | None:
        """Return the pause before the next attempt in seconds; None if there is no next attempt."""
        if not error.retryable or self._made >= self._retry.attempts:
            return None
        asked = error.retry_delay_s or 0.0
        own = min(self._retry.first_pause_s * 2.0 ** (self._made - 1), self._retry.max_pause_s)
        # Clients that fail together, as in a restart, shouldn't retry together.
        pause = max(asked, own) * random.uniform(1.0, 1.2)  # noqa: S311 - no secret
        left = self.timeout_s()
        if asked > self._retry.max_pause_s or (left is not None and pause >= left):
            return None
        self._made += 1
        return pause

    def wait_s(self) -> float:
        """Return the longest wait for a connection in seconds."""
        left = self.timeout_s()
        return self._retry.wait_s if left is None else min(self._retry.wait_s, left)


class Collected(Protocol):
    """What has come of a request's result so far."""

    @property
    def request_id(self) -> str:
        """The id from the server; empty before it came."""
        ...

    @property
    def begun(self) -> bool:
        """Whether a part of the result has come, so that the request can't be sent again."""
        ...

    @property
    def complete(self) -> bool:
        """Whether the whole result has come."""
        ...


def client_closed() -> RequestCancelledError:
    """Make the error of calls that run when the client is closed, or that come later."""
    return RequestCancelledError("the client was closed")


class Request:
    """One request, from its first attempt to its end."""

    def __init__(
        self,
        connection: Connection,
        timeout_s: float | None,
        request_id: str = "",
        adapt: Adapt = lambda _: False,
        *,
        collected: Collected | None = None,
        retry: Retry | None = None,
        goes_on: GoesOn = lambda: False,
    ) -> None:
        """Prepare; the time-out starts now. ``collected``: a result that is no `Answer`."""
        self._connection = connection
        retry = retry or connection.retry
        self._attempts = Attempts(retry, timeout_s)
        self._goes_on: GoesOn = goes_on if retry.go_on else lambda: False
        self._request_id = request_id
        self._adapt = adapt
        self.answer = Answer()
        """The answer so far; empty for other calls."""
        self._collected: Collected = collected or self.answer
        self._call: Any = None
        self._ended: MillstreamError | None = None

    @property
    def request_id(self) -> str:
        """The id from the server, else the one that was sent."""
        return self._collected.request_id or self._request_id

    def timeout_s(self) -> float | None:
        return self._attempts.timeout_s()

    async def messages(
        self, attempt: Attempt, exclusive: contextlib.AbstractContextManager[None] | None = None
    ) -> AsyncGenerator[Any, None]:
        """Send the request, with retries; yield the server's messages.

        ``exclusive`` is held from the first attempt to the end.

        Raises:
            MillstreamError: the request failed or was ended.
        """
        lost: MillstreamError | None = None
        with exclusive or contextlib.nullcontext(), self._connection.holding(self):
            while True:
                try:
                    self.check_not_ended()
                    async with contextlib.aclosing(attempt()) as messages:
                        async for message in messages:
                            yield message
                    if not self._collected.complete:
                        raise incomplete()
                except (grpc.RpcError, MillstreamError, asyncio.CancelledError) as error:
                    if is_task_cancelled(error):
                        raise
                    if self._collected.complete:
                        return  # the answer is complete, only the stream's end failed
                    failed = self._failure(error)
                    if lost is not None and isinstance(failed, InvalidRequestError):
                        raise lost from failed  # it was right: only going on isn't
                    lost = failed if self._collected.begun else None
                    pause_s = self._pause_s(failed)
                    if pause_s is None:
                        raise failed from failed.__cause__
                else:
                    return
                finally:
                    self._call = None
                await self._pause(failed, pause_s)

    def check_not_ended(self) -> None:
        """Raise the error given to `end`, if there is one."""
        if self._ended is not None:
            raise self._failure(self._ended)

    def watch(self, call: Any) -> None:
        """Let `end` cancel this call or pause; at once if the request was ended before."""
        self._call = call
        if self._ended is not None:
            call.cancel()

    def cancel(self) -> None:
        self.end(RequestCancelledError("cancelled by the caller"))

    def end(self, error: MillstreamError) -> None:
        """End the request; its reader gets ``error``."""
        if self._ended is None:
            self._ended = error
        if self._call is not None:
            self._call.cancel()

    def _failure(self, error: BaseException) -> MillstreamError:
        """Return the request's failure: the error given to `end`, else ``error`` converted."""
        if self._ended is not None:
            failed = self._ended
        elif isinstance(error, MillstreamError):
            failed = error
        elif isinstance(error, asyncio.CancelledError):  # the channel itself was closed
            failed = client_closed()
        else:
            failed = from_rpc_error(error)
        failed.request_id = self.request_id
        failed.partial = self.answer if self.answer.begun else None
        return failed

    def _pause_s(self, failed: MillstreamError) -> float | None:
        """Return the pause before the next attempt in seconds; None if this failure is final."""
        if self._ended is not None:
            return None
        if self._collected.begun and not (failed.retryable and self._goes_on()):
            return None
        return 0.0 if self._adapt(failed) else self._attempts.pause_s(failed)

    async def _pause(self, failed: MillstreamError, pause_s: float) -> None:
        """Pause, then wait until there is a connection.

        Raises:
            MillstreamError: ``failed`` if there is none in time, or the error given to `end`.
        """

        async def connected() -> bool:
            await asyncio.sleep(pause_s)
            if failed.code is not grpc.StatusCode.UNAVAILABLE:
                return True
            try:
                # Not `wait_for`: Python 3.11's loses a cancel that comes with the time-out.
                async with asyncio.timeout(self._attempts.wait_s()):
                    await self._connection.channel.channel_ready()
            except TimeoutError:
                return False
            return True

        pause = asyncio.ensure_future(connected())
        self.watch(pause)
        try:
            go_on = await pause
        except asyncio.CancelledError as error:
            if is_task_cancelled(error) or self._ended is None:
                raise
            raise self._failure(failed) from failed.__cause__
        if not go_on:
            raise self._failure(failed) from failed.__cause__


def is_task_cancelled(error: BaseException) -> bool:
    """Return whether this task was cancelled, and not a call or a pause, which raise the same."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def incomplete() -> IncompleteAnswerError:
    """Make the error of a stream that ended too early; it may be retried."""
    error = IncompleteAnswerError("the server ended the stream before the answer was finished")
    error.retryable = True
    return error
