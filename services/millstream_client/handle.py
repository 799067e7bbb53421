"""One request from its first attempt to its end, which may also come from outside."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc

from millstream_client.answers import Answer
from millstream_client.errors import (
    DeadlineExceededError,
    IncompleteAnswerError,
    MillstreamError,
    RequestCancelledError,
    from_rpc_error,
)
from millstream_client.retry import Attempts

T = TypeVar("T")

RPC_FAILURES = (grpc.RpcError, IncompleteAnswerError)
"""What an attempt may end with."""

Mend = Callable[[MillstreamError], bool]
"""Changes a request that was refused; answers whether it is worth another attempt."""


def client_closed() -> RequestCancelledError:
    """Make the failure of what a client's closing ended, and of what came after it."""
    return RequestCancelledError("the client was closed")


class OpenCalls:
    """The requests of one client that run; threads may share it."""

    def __init__(self) -> None:
        """Nothing runs yet."""
        self._handles: set[CallHandle] = set()
        self._closed = False

    def check_open(self) -> None:
        """See that the client wasn't closed.

        Raises:
            RequestCancelledError: it was.
        """
        if self._closed:
            raise client_closed()

    def add(self, handle: CallHandle) -> None:
        """Take in a request that begins; it is over at once if the client was closed."""
        # Without a lock, which a dropped stream couldn't take while gc ends it anywhere: as `close`
        # marks first and looks then, it finds this handle, or this finds the mark.
        self._handles.add(handle)
        if self._closed:
            handle.client_closed()

    def discard(self, handle: CallHandle) -> None:
        """Let go of a request that is over."""
        self._handles.discard(handle)

    def close(self) -> None:
        """End every request that runs, and whatever begins later."""
        self._closed = True
        for handle in self._handles.copy():
            handle.client_closed()


class CallHandle:
    """A request: its answer so far, the attempt or pause that runs, whether it was ended.

    While it is entered, closing the client ends it.
    """

    def __init__(
        self,
        calls: OpenCalls,
        attempts: Attempts,
        request_id: str = "",
        mend: Mend = lambda _: False,
    ) -> None:
        """Nothing runs yet."""
        self._calls = calls
        self.attempts = attempts
        self.answer = Answer()
        self._request_id = request_id
        self._mend = mend
        self._call: Any = None
        self._ended: MillstreamError | None = None

    def __enter__(self) -> Self:
        """Begin."""
        self._calls.add(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End."""
        self._calls.discard(self)

    @property
    def request_id(self) -> str:
        """The request's id: as the server says, or else as it was asked to say."""
        return self.answer.request_id or self._request_id

    @property
    def ended(self) -> bool:
        """Whether somebody ended it."""
        return self._ended is not None

    def begin(self, call: Callable[[], T]) -> T:
        """Make a call, unless the request was ended.

        Raises:
            MillstreamError: how it was ended.
        """
        if self._ended is not None:
            raise self.failure(self._ended)
        try:
            return call()
        except (ValueError, grpc.aio.UsageError):
            # So gRPC says that the channel was closed, which another thread may do meanwhile.
            if self._ended is None:
                raise
            raise self.failure(self._ended) from None

    def runs(self, call: Any) -> None:
        """Take over this attempt, or pause; over at once if the request was ended before."""
        self._call = call
        if self._ended is not None:
            call.cancel()

    def cancel(self) -> None:
        """End it; its reader gets a RequestCancelledError."""
        self._end(RequestCancelledError("cancelled by the caller"))

    def time_is_up(self) -> None:
        """End it; its reader gets a DeadlineExceededError."""
        self._end(DeadlineExceededError("the time that was given has passed"))

    def client_closed(self) -> None:
        """End it; its reader gets a RequestCancelledError."""
        self._end(client_closed())

    def _end(self, why: MillstreamError) -> None:
        if self._ended is None:
            self._ended = why
        if self._call is not None:
            self._call.cancel()

    def failure(self, error: BaseException) -> MillstreamError:
        """Say how it failed: as it was ended, or else as ``error`` says."""
        if self._ended is not None:
            failed: MillstreamError = self._ended
        elif isinstance(error, MillstreamError):
            failed = error
        elif isinstance(error, asyncio.CancelledError):  # the channel was closed, without us
            failed = client_closed()
        else:
            failed = from_rpc_error(error)
        failed.request_id = self.request_id
        failed.partial = self.answer if self.answer.begun else None
        return failed

    def pause_s(self, failed: MillstreamError) -> float | None:
        """Give the pause before another attempt; None when this failure is final."""
        if self.ended or self.answer.begun:
            return None
        return 0.0 if self._mend(failed) else self.attempts.pause_s(failed)


def incomplete() -> IncompleteAnswerError:
    """Make the failure of a stream that ended too early; another attempt may bring the answer."""
    error = IncompleteAnswerError("the server ended the stream before the answer was finished")
    error.retryable = True
    return error
