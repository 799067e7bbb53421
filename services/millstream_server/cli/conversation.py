"""One conversation with the Processor: one bidi Chat stream, re-opened where it broke."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc

from millstream.v1 import chat_pb2, processor_pb2, processor_pb2_grpc

_ChatCall = grpc.aio.StreamStreamCall[processor_pb2.ChatRequest, processor_pb2.ChatResponse]


class HungUpError(Exception):
    """The stream was cancelled, or ended before the turn was finished."""


def text_message(role: chat_pb2.Role.ValueType, text: str) -> chat_pb2.Message:
    """Build a message of one text part."""
    return chat_pb2.Message(role=role, content=[chat_pb2.ContentPart(text=text)])


async def open_chat(
    stub: processor_pb2_grpc.ProcessorServiceStub, start: processor_pb2.ChatStart
) -> _ChatCall:
    """Open a stream and send its first message; a failure shows when the answer is read."""
    call = stub.Chat()  # type: ignore[call-arg]  # the type stubs know no reader/writer calls
    with contextlib.suppress(asyncio.InvalidStateError):  # It failed already.
        await call.write(processor_pb2.ChatRequest(start=start))
    return call


class Conversation:
    """Turns of one conversation, one at a time.

    All turns share one stream, so that the server keeps worker and KV prefix. If the stream broke,
    the next turn opens another that starts with every finished turn; an unfinished one is
    forgotten. `cancel` and `hang_up` may be called while `say` is being iterated.
    """

    def __init__(
        self,
        stub: processor_pb2_grpc.ProcessorServiceStub,
        model: str,
        system: str | None,
        options: processor_pb2.GenerationOptions,
    ) -> None:
        """Prepare; nothing is sent before the first turn."""
        self._stub = stub
        self._model = model
        self._options = options
        self._said = [text_message(chat_pb2.ROLE_SYSTEM, system)] if system else []
        self._call: _ChatCall | None = None
        self._hung_up = False

    async def say(self, text: str) -> AsyncIterator[processor_pb2.ChatResponse]:
        """Take the user's turn; yields the messages of the answer, the last has `finished`.

        Raises:
            grpc.aio.AioRpcError: the stream failed.
            HungUpError: the stream ended before the turn did.
        """
        said = [*self._said, text_message(chat_pb2.ROLE_USER, text)]
        answer = ""
        finished = False
        try:
            call = await self._send(said)
            while not finished:
                response = await call.read()
                if not isinstance(response, processor_pb2.ChatResponse):  # EOF
                    raise HungUpError("the server ended the conversation")
                answer += "".join(c.text for c in response.choices if c.index == 0)
                finished = response.HasField("finished")
                if finished:
                    self._said = [*said, text_message(chat_pb2.ROLE_ASSISTANT, answer)]
                yield response
        except asyncio.CancelledError:
            if self._hung_up:
                raise HungUpError("cut off") from None
            raise
        finally:
            if not finished:
                self.hang_up()
                self._call = None

    async def _send(self, said: list[chat_pb2.Message]) -> _ChatCall:
        """Put the last message of ``said`` on the stream, or all of them on a new one."""
        self._hung_up = False
        if self._call is not None and not self._call.done():
            turn = processor_pb2.UserTurn(content=said[-1].content)
            try:
                await self._call.write(processor_pb2.ChatRequest(user_turn=turn))
            except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
                pass  # It ended while nobody looked; the turn didn't start, so start afresh.
            else:
                return self._call
        start = processor_pb2.ChatStart(model=self._model, messages=said, options=self._options)
        self._call = await open_chat(self._stub, start)
        return self._call

    async def cancel(self) -> None:
        """Stop the running turn and keep the conversation."""
        if self._call is not None and not self._call.done():
            await self._call.write(processor_pb2.ChatRequest(cancel=processor_pb2.CancelTurn()))

    def hang_up(self) -> None:
        """Cut the stream; a running `say` raises HungUpError."""
        self._hung_up = True
        if self._call is not None:
            self._call.cancel()

    async def close(self) -> None:
        """Leave politely, when no turn is running."""
        if self._call is not None and not self._call.done():
            await self._call.done_writing()
        self._call = None
