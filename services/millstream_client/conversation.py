"""A conversation of several turns, for tasks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

import grpc

from millstream.v1 import chat_pb2, processor_pb2, processor_pb2_grpc
from millstream_client.dialogue import Dialogue, Turn
from millstream_client.handle import CallHandle, OpenCalls, incomplete
from millstream_client.requests import Knobs, generation_options, user
from millstream_client.retry import Attempts, Retry
from millstream_client.streams import AnswerStream, answer_deltas, cancels_task
from millstream_client.transport import Metadata

if TYPE_CHECKING:
    from typing import Unpack


class Connection(Protocol):
    """What a conversation needs of its client."""

    @property
    def calls(self) -> OpenCalls: ...  # noqa: D102
    @property
    def channel(self) -> grpc.aio.Channel: ...  # noqa: D102
    @property
    def stub(self) -> processor_pb2_grpc.ProcessorServiceStub: ...  # noqa: D102
    @property
    def retry(self) -> Retry: ...  # noqa: D102
    def metadata(self) -> Metadata: ...  # noqa: D102


class Conversation:
    """Turns of one conversation, one at a time.

    All turns share one stream, so that the server keeps worker and KV prefix. If the stream broke,
    the next turn opens another that starts with every finished turn; one that failed is forgotten.
    A turn that failed before any of its answer arrived is sent again like any request.
    """

    def __init__(self, connection: Connection, start: processor_pb2.ChatStart) -> None:
        """Prepare; nothing is sent before the first turn."""
        self._connection = connection
        self._dialogue = Dialogue(start)
        self._call: Any = None
        self._turns = 0
        self._handle: CallHandle | None = None

    @property
    def messages(self) -> tuple[chat_pb2.Message, ...]:
        """Everything said so far, failed turns left out."""
        return self._dialogue.messages

    def say(
        self, text: str, *, timeout_s: float | None = None, **knobs: Unpack[Knobs]
    ) -> AnswerStream:
        """Take the user's turn; knobs, if any, replace the conversation's from here on."""
        options = generation_options(**knobs) if knobs else None
        return self._take(Turn([user(text)], options), timeout_s)

    def tool_results(
        self, results: Sequence[chat_pb2.Message], *, timeout_s: float | None = None
    ) -> AnswerStream:
        """Give the results of the tools that the model called, for it to go on with."""
        return self._take(Turn(results), timeout_s)

    async def cancel(self) -> None:
        """Stop the running turn, which then finishes as far as it came; keeps the conversation.

        A turn that waits to be sent again has nothing to finish: it gets a RequestCancelledError.
        """
        handle, call = self._handle, self._call
        if handle is None:
            return
        if call is None or call.done():
            handle.cancel()
        else:
            cancel = processor_pb2.CancelTurn(turn=self._turns)
            # If the stream is gone, the turn says so itself.
            await _write(call, processor_pb2.ChatRequest(cancel=cancel))

    def hang_up(self) -> None:
        """Cut the stream; whoever reads the running turn gets a RequestCancelledError."""
        if self._handle is not None:
            self._handle.cancel()
        elif self._call is not None:
            self._call.cancel()

    async def close(self) -> None:
        """Leave politely when no turn is running, else cut the stream."""
        call, self._call = self._call, None
        if self._handle is not None:
            self._handle.cancel()
        elif call is not None and not call.done():
            with contextlib.suppress(asyncio.InvalidStateError, grpc.RpcError):
                await call.done_writing()

    async def __aenter__(self) -> Self:
        """Converse."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave."""
        await self.close()

    def _take(self, turn: Turn, timeout_s: float | None) -> AnswerStream:
        handle = CallHandle(
            self._connection.calls,
            Attempts(self._connection.retry, timeout_s),
            self._dialogue.request_id,
            lambda failed: self._dialogue.mend(turn, failed),
        )
        return AnswerStream(self._deltas(turn, handle), handle)

    async def _deltas(
        self, turn: Turn, handle: CallHandle
    ) -> AsyncGenerator[processor_pb2.ChoiceDelta, None]:
        """Hold the conversation for all of a turn, the pauses between its attempts included."""
        if self._handle is not None:
            raise RuntimeError("a turn is running: read it to its end, or close its stream, first")
        self._handle = handle
        deltas = answer_deltas(
            lambda left_s: self._attempt(turn, left_s, handle), handle, self._ready
        )
        try:
            async with contextlib.aclosing(deltas):
                async for delta in deltas:
                    yield delta
        finally:
            self._handle = None

    async def _ready(self) -> None:
        await self._connection.channel.channel_ready()

    async def _attempt(
        self, turn: Turn, timeout_s: float | None, handle: CallHandle
    ) -> AsyncGenerator[processor_pb2.ChatResponse, None]:
        finished = False
        # An RPC's deadline would end the whole conversation's stream, so a turn has a clock.
        clock = timeout_s is not None and asyncio.get_running_loop().call_later(
            timeout_s, handle.time_is_up
        )
        try:
            call = await self._send(turn, handle)
            while not finished:
                response = await call.read()
                if not isinstance(response, processor_pb2.ChatResponse):  # EOF
                    raise incomplete()
                finished = response.HasField("finished")
                yield response
        finally:
            if clock:
                clock.cancel()
            if finished:
                self._dialogue.finished(turn, handle.answer)
            elif self._call is not None:
                self._call.cancel()
                self._call = None

    async def _send(self, turn: Turn, handle: CallHandle) -> Any:
        """Put a turn on the stream, or on a new one with everything said before."""
        call = self._call  # `close` may take ours away while a message is written
        if call is not None and not call.done():
            self._turns += 1
            handle.runs(call)
            if await _write(call, turn.request()):
                return call
            # It ended while nobody looked; the turn didn't start, so start afresh.
        self._call = call = handle.begin(
            lambda: self._connection.stub.Chat(  # type: ignore[call-arg]  # the stubs know no writers
                metadata=self._connection.metadata(), wait_for_ready=False
            )
        )
        self._turns = 1
        handle.runs(call)
        await _write(call, self._dialogue.start(turn))  # if it failed already, reading says why
        return call


async def _write(call: Any, request: processor_pb2.ChatRequest) -> bool:
    """Send a message; answers whether the stream was still there for it."""
    writing = asyncio.ensure_future(call.write(request))
    # grpc.aio's write sleeps on when its call is cancelled before there is a connection.
    call.add_done_callback(lambda _: writing.cancel())
    try:
        await writing
    except (asyncio.InvalidStateError, grpc.RpcError, asyncio.CancelledError) as error:
        if cancels_task(error):
            raise
        return False
    return True
