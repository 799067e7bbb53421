"""A conversation of several turns: its messages so far, and the stream that it keeps."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import grpc

from millstream.v1 import chat_pb2, processor_pb2
from millstream_client.connection import Connection
from millstream_client.errors import DeadlineExceededError
from millstream_client.history import History, Turn
from millstream_client.knobs import Knobs, generation_options
from millstream_client.media import ImageInput, VideoInput, attached
from millstream_client.request import Request, incomplete
from millstream_client.requests import AnyMessage, Content, question
from millstream_client.streams import AnswerStream
from millstream_client.tool_calls import ToolLimits
from millstream_client.tool_run import ToolRun
from millstream_client.writing import half_close, take_uploads, write, write_uploads

if TYPE_CHECKING:
    from typing import Unpack


class Conversation:
    """A conversation: turns, one at a time.

    All turns share one stream, so that the server keeps worker and KV prefix. If the stream broke,
    or the server shuts down, the next turn opens another, which starts with every finished turn; a
    failed turn is not kept.
    A turn that failed before any of its answer arrived is retried like any request.
    """

    def __init__(self, connection: Connection, history: History) -> None:
        """Make a conversation; nothing is sent before the first turn."""
        self._connection = connection
        self.history = history
        self._call: Any = None
        self._preparing = False
        """Whether the running turn's files are being read or sent, before the turn itself."""
        self._turns_on_call = 0
        self._running: Request | None = None
        self._server_drains = False
        self._ahead: asyncio.Future[Any] | None = None
        """The first read of a turn on a stream that was idle."""

    @property
    def messages(self) -> tuple[chat_pb2.ChatMessage, ...]:
        """The messages of all finished turns, with the bytes of their images and videos."""
        return self.history.messages

    def say(
        self,
        content: Content,
        *,
        image: ImageInput | None = None,
        images: Sequence[ImageInput] = (),
        video: VideoInput | None = None,
        videos: Sequence[VideoInput] = (),
        timeout_s: float | None = None,
        **knobs: Unpack[Knobs],
    ) -> AnswerStream:
        """Start a turn of the user; knobs, if any, replace the conversation's from this turn on.

        Images and videos, given as paths, bytes or URLs, come before the text. For another order
        give a list: ``["Left:", Image("a.png"), "Right:", Image("b.png")]``.
        """
        media = attached(image, images, video, videos)
        options = generation_options(**knobs) if knobs else None
        return self.stream(Turn([question(content, media)], options), timeout_s)

    def tool_results(
        self, results: Sequence[AnyMessage], *, timeout_s: float | None = None
    ) -> AnswerStream:
        """Start a turn with the results of the tools that the model called."""
        return self.stream(Turn(results), timeout_s)

    async def cancel(self) -> None:
        """Cancel the running turn, which finishes with what was generated; keep the conversation.

        A turn that waits for a retry, or whose images are still being sent, has nothing to finish:
        it fails with a RequestCancelledError.
        """
        request, call = self._running, self._call
        if request is None:
            return
        if self._preparing or call is None or call.done():
            request.cancel()
        else:
            cancel = processor_pb2.CancelTurn(turn=self._turns_on_call)
            # If the stream has ended, the turn fails by itself.
            await write(call, processor_pb2.ChatRequest(cancel=cancel))

    def abort(self) -> None:
        """End the stream; the running turn fails with a RequestCancelledError."""
        if self._running is not None:
            self._running.cancel()
        elif self._call is not None:
            self._call.cancel()

    async def close(self) -> None:
        """Close the stream, or abort it if a turn is running."""
        if self._running is not None:
            self._call = None
            self._running.cancel()
        else:
            await self._leave()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def stream(self, turn: Turn, timeout_s: float | None, answer_type: Any = None) -> AnswerStream:
        """Prepare a turn."""
        history = self.history
        request = Request(
            self._connection, timeout_s, history.request_id, partial(history.refit, turn)
        )
        messages = request.messages(lambda: self._attempt(turn, request), self._one_turn(request))

        def run(first: AnswerStream, limits: ToolLimits) -> ToolRun:
            return ToolRun(self, first, limits, timeout_s, owned=False)

        return AnswerStream(request, messages, run, answer_type)

    @contextlib.contextmanager
    def _one_turn(self, request: Request) -> Iterator[None]:
        """Reserve the conversation for a turn, including the pauses between its attempts."""
        if self._running is not None:
            raise RuntimeError("a turn is running: read it to its end, or close its stream, first")
        self._running = request
        try:
            yield
        finally:
            self._running, self._preparing = None, False

    async def _attempt(
        self, turn: Turn, request: Request
    ) -> AsyncGenerator[processor_pb2.ChatResponse, None]:
        self._preparing = True
        await self.history.read(turn)  # a file that can't be read doesn't end the stream
        request.check_not_ended()
        # An RPC's deadline would end the whole stream, so a turn has its own timer.
        timeout_s = request.timeout_s()
        timer = timeout_s is not None and asyncio.get_running_loop().call_later(
            timeout_s, request.end, DeadlineExceededError("the time that was given has passed")
        )
        finished = False
        try:
            call = await self._send(turn, request)
            while not finished:
                ahead, self._ahead = self._ahead, None
                message = await (ahead or call.read())
                if not isinstance(message, processor_pb2.ChatResponse):  # EOF
                    raise incomplete()
                if message.HasField("draining"):
                    self._server_drains = True
                    if not (message.HasField("started") or request.answer.request_id):
                        continue  # it came between two turns
                request.answer.add(message)
                finished = message.HasField("finished")
                yield message
        finally:
            if timer:
                timer.cancel()
            if finished:
                self.history.add(turn, request.answer)
                if self._server_drains:
                    await self._leave()
            elif self._call is not None:
                self._call.cancel()
                self._call = self._ahead = None

    async def _leave(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            await half_close(call)

    async def _send(self, turn: Turn, request: Request) -> Any:
        """Send a turn on the stream, or on a new one with all messages before."""
        call = self._call  # `close` may reset it while a message is written
        if call is not None and not call.done():
            self._turns_on_call += 1
            request.watch(call)
            # A notice that wasn't read yet would hide that the stream has ended.
            self._ahead = _reading(call)
            if await self._write(call, turn.request()):
                return call
            notice = isinstance(await _result(self._ahead), processor_pb2.ChatResponse)
            if not notice and await _refused(call):
                return call  # the server has refused the turn already: reading raises the error
            # The stream ended before the turn: open a new one.
            self._ahead = None
        request.check_not_ended()
        self._call = call = self._connection.stub.Chat(  # type: ignore[call-arg]  # the stubs know no writers
            metadata=self._connection.metadata(), wait_for_ready=False
        )
        self._turns_on_call = 1
        self._server_drains = False
        request.watch(call)
        # If it has failed, reading raises the error.
        await self._write(call, self.history.start(turn))
        return call

    async def _write(self, call: Any, message: processor_pb2.ChatRequest) -> bool:
        """Send a turn's files that don't fit in its message, then the message."""
        self._preparing = True
        uploads = take_uploads(message)
        if not await write_uploads(call, uploads):
            return False
        self._preparing = False  # a cancel may follow it
        return await write(call, message)


def _reading(call: Any) -> asyncio.Future[Any]:
    """Begin to read a message; its failure may go unread."""
    reading: asyncio.Future[Any] = asyncio.ensure_future(call.read())
    reading.add_done_callback(lambda done: done.cancelled() or done.exception())
    return reading


async def _result(reading: asyncio.Future[Any]) -> Any:
    """Wait for a read; None if it fails."""
    await asyncio.wait([reading])
    return None if reading.cancelled() or reading.exception() else reading.result()


async def _refused(call: Any) -> bool:
    """Return whether the server has ended the stream because of what was sent.

    After UNAVAILABLE it hasn't: it stopped, or the connection broke, while the stream was idle.
    """
    ended_idle = (grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE)
    return call.done() and await call.code() not in ended_idle
