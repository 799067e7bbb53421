"""One request from its first attempt to its end, which may also come from outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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

RPC_FAILURES = (grpc.RpcError, IncompleteAnswerError)
"""What an attempt may end with."""

Mend = Callable[[MillstreamError], bool]
"""Changes a request that was refused; answers whether it is worth another attempt."""


class CallHandle:
    """A request: its answer so far, the attempt or pause that runs, whether it was ended."""

    def __init__(
        self, attempts: Attempts, request_id: str = "", mend: Mend = lambda _: False
    ) -> None:
        """Nothing runs yet."""
        self.attempts = attempts
        self.answer = Answer()
        self._request_id = request_id
        self._mend = mend
        self._call: Any = None
        self._ended: MillstreamError | None = None

    @property
    def request_id(self) -> str:
        """The request's id: as the server says, or else as it was asked to say."""
        return self.answer.request_id or self._request_id

    @property
    def ended(self) -> bool:
        """Whether somebody ended it."""
        return self._ended is not None

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
