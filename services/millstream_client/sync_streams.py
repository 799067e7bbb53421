"""An answer as it streams in, for threads; `streams` without the awaiting."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Iterator
from types import TracebackType
from typing import Any, Self

import grpc

from millstream.v1 import processor_pb2
from millstream_client.answers import Answer
from millstream_client.errors import MillstreamError
from millstream_client.handle import RPC_FAILURES, CallHandle, incomplete

Opener = Callable[[float | None], Generator[Any, None, None]]
"""Starts an attempt that has so many seconds; closing what it yields from ends its call."""
Knock = Callable[[float], Any]
"""Begins a call that waits so many seconds for a connection, and ends when it is answered."""


class SyncAnswerStream(Iterator[processor_pb2.ChoiceDelta]):
    """Iterate it for what each choice grows by, or call `answer` for the whole.

    Nothing is sent before the first of these. Leaving early ends the call:
    ``with``, `close`, or dropping the last reference.
    """

    def __init__(
        self, deltas: Generator[processor_pb2.ChoiceDelta, None, None], handle: CallHandle
    ) -> None:
        """Wrap ``deltas``, which fill the handle's answer."""
        self._deltas = deltas
        self._handle = handle

    @property
    def result(self) -> Answer:
        """The answer as far as it came."""
        return self._handle.answer

    @property
    def request_id(self) -> str:
        """The request's id in logs and traces."""
        return self._handle.request_id

    def __next__(self) -> processor_pb2.ChoiceDelta:
        """Wait for what a choice grew by.

        Raises:
            MillstreamError: the request failed; its ``partial`` is the answer as far as it came.
        """
        return next(self._deltas)

    def answer(self) -> Answer:
        """Read to the end; answers the whole.

        Raises:
            MillstreamError: the request failed; its ``partial`` is the answer as far as it came.
        """
        for _ in self._deltas:
            pass
        return self.result

    def cancel(self) -> None:
        """End the call while another thread reads; that one gets a RequestCancelledError."""
        self._handle.cancel()

    def close(self) -> None:
        """End the call; nobody may be reading."""
        self._deltas.close()

    def __enter__(self) -> Self:
        """Use it."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the call if it still runs."""
        self.close()


def answer_deltas(
    open_attempt: Opener, handle: CallHandle, knock: Knock
) -> Generator[processor_pb2.ChoiceDelta, None, None]:
    """Send a request until it is answered or fails for good; yields what its answer grows by."""
    answer, attempts = handle.answer, handle.attempts
    with handle:
        while True:
            try:
                with contextlib.closing(open_attempt(attempts.timeout_s())) as responses:
                    for response in responses:
                        answer.add(response)
                        yield from response.choices
                if not answer.complete:
                    raise incomplete()  # it may be tried again like the others
            except RPC_FAILURES as error:
                if answer.complete:
                    return  # only the end of the stream is missing
                failed = handle.failure(error)
                pause_s = handle.pause_s(failed)
                if pause_s is None:
                    raise failed from failed.__cause__
            else:
                return
            before_next(failed, pause_s, handle, knock)


def before_next(failed: MillstreamError, pause_s: float, handle: CallHandle, knock: Knock) -> None:
    """Pause, then wait until there is a connection; whoever ends the request ends this too.

    Raises:
        MillstreamError: ``failed``, when there is none in time; or how the request was ended.
    """
    pause, go_on = _Pause(), True
    handle.runs(pause)
    pause.wait(pause_s)
    if not handle.ended and failed.code is grpc.StatusCode.UNAVAILABLE:
        # Not grpc.channel_ready_future: a thread of gRPC's own polls for it, and fails aloud when
        # the channel is closed meanwhile.
        call = handle.begin(lambda: knock(handle.attempts.wait_s()))
        handle.runs(call)
        go_on = call.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
    if handle.ended:
        raise handle.failure(failed) from failed.__cause__
    if not go_on:
        raise failed from failed.__cause__


class _Pause(threading.Event):
    """A wait that ends when it is cancelled, as a call does."""

    def cancel(self) -> None:
        self.set()


def one_shot(call: Any) -> Generator[Any, None, None]:
    """Yield the responses of a call whose only message was sent already."""
    try:
        yield from call
    finally:
        call.cancel()
