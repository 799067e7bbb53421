"""An answer as it streams in, for tasks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any, Self

import grpc

from millstream.v1 import processor_pb2
from millstream_client.answers import Answer
from millstream_client.errors import MillstreamError
from millstream_client.handle import RPC_FAILURES, CallHandle, incomplete

Response = processor_pb2.ChatResponse | processor_pb2.CompleteResponse
Opener = Callable[[float | None], AsyncGenerator[Any, None]]
"""Starts an attempt that has so many seconds; closing what it yields from ends its call."""
Ready = Callable[[], Awaitable[None]]
"""Waits until there is a connection."""


class AnswerStream(AsyncIterator[processor_pb2.ChoiceDelta]):
    """Iterate it for what each choice grows by, or await `answer` for the whole.

    Nothing is sent before the first of these. Leaving early ends the call:
    ``async with``, `aclose`, cancelling the task that reads, or dropping the last reference.
    """

    def __init__(
        self, deltas: AsyncGenerator[processor_pb2.ChoiceDelta, None], handle: CallHandle
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

    async def __anext__(self) -> processor_pb2.ChoiceDelta:
        """Wait for what a choice grew by.

        Raises:
            MillstreamError: the request failed; its ``partial`` is the answer as far as it came.
        """
        return await anext(self._deltas)

    async def answer(self) -> Answer:
        """Read to the end; answers the whole.

        Raises:
            MillstreamError: the request failed; its ``partial`` is the answer as far as it came.
        """
        async for _ in self._deltas:
            pass
        return self.result

    def cancel(self) -> None:
        """End the call while another task reads; that one gets a RequestCancelledError."""
        self._handle.cancel()

    async def aclose(self) -> None:
        """End the call; nobody may be reading."""
        await self._deltas.aclose()

    async def __aenter__(self) -> Self:
        """Use it."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the call if it still runs."""
        await self.aclose()


async def answer_deltas(
    open_attempt: Opener, handle: CallHandle, ready: Ready
) -> AsyncGenerator[processor_pb2.ChoiceDelta, None]:
    """Send a request until it is answered or fails for good; yields what its answer grows by."""
    answer, attempts = handle.answer, handle.attempts
    with handle:
        while True:
            try:
                async with contextlib.aclosing(open_attempt(attempts.timeout_s())) as responses:
                    async for response in responses:
                        answer.add(response)
                        for delta in response.choices:
                            yield delta
                if not answer.complete:
                    raise incomplete()  # it may be tried again like the others
            except (*RPC_FAILURES, asyncio.CancelledError) as error:
                if cancels_task(error):
                    raise
                if answer.complete:
                    return  # only the end of the stream is missing
                failed = handle.failure(error)
                pause_s = handle.pause_s(failed)
                if pause_s is None:
                    raise failed from failed.__cause__
            else:
                return
            await before_next(failed, pause_s, handle, ready)


async def before_next(
    failed: MillstreamError, pause_s: float, handle: CallHandle, ready: Ready
) -> None:
    """Pause, then wait until there is a connection; whoever ends the request ends this too.

    Raises:
        MillstreamError: ``failed``, when there is none in time; or how the request was ended.
    """

    async def connected() -> bool:
        await asyncio.sleep(pause_s)
        if failed.code is not grpc.StatusCode.UNAVAILABLE:
            return True
        try:
            await asyncio.wait_for(ready(), handle.attempts.wait_s())
        except TimeoutError:
            return False
        return True

    pause = asyncio.ensure_future(connected())
    handle.runs(pause)
    try:
        go_on = await pause
    except asyncio.CancelledError as error:
        if cancels_task(error) or not handle.ended:
            raise
    if handle.ended:
        raise handle.failure(failed) from failed.__cause__
    if not go_on:
        raise failed from failed.__cause__


def cancels_task(error: BaseException) -> bool:
    """Tell this task's cancellation from a call's or a pause's, which looks the same."""
    task = asyncio.current_task()
    cancelling = task is not None and task.cancelling() > 0
    return cancelling and isinstance(error, asyncio.CancelledError)


async def one_shot(call: Any) -> AsyncGenerator[Any, None]:
    """Yield the responses of a call whose only message was sent with it."""
    try:
        async for response in call:
            yield response
    finally:
        call.cancel()
