"""A conversation of several turns, for threads; `conversation` without the awaiting."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from millstream.v1 import chat_pb2, processor_pb2
from millstream_client.dialogue import Dialogue, Turn
from millstream_client.handle import CallHandle, OpenCalls, incomplete
from millstream_client.requests import Knobs, generation_options, user
from millstream_client.retry import Attempts, Retry
from millstream_client.sync_streams import SyncAnswerStream, answer_deltas
from millstream_client.transport import Metadata

if TYPE_CHECKING:
    from typing import Unpack


class SyncConnection(Protocol):
    """What a conversation needs of its client."""

    @property
    def calls(self) -> OpenCalls: ...  # noqa: D102
    @property
    def stub(self) -> Any: ...  # noqa: D102
    @property
    def retry(self) -> Retry: ...  # noqa: D102
    def metadata(self) -> Metadata: ...  # noqa: D102
    def knock(self, within_s: float) -> Any: ...  # noqa: D102


class SyncConversation:
    """Turns of one conversation, one at a time; `cancel` and `hang_up` may come from other threads.

    All turns share one stream, so that the server keeps worker and KV prefix. If the stream broke,
    the next turn opens another that starts with every finished turn; one that failed is forgotten.
    A turn that failed before any of its answer arrived is sent again like any request.
    """

    def __init__(self, connection: SyncConnection, start: processor_pb2.ChatStart) -> None:
        """Prepare; nothing is sent before the first turn."""
        self._connection = connection
        self._dialogue = Dialogue(start)
        self._line: _Line | None = None
        self._turns = 0
        self._handle: CallHandle | None = None

    @property
    def messages(self) -> tuple[chat_pb2.Message, ...]:
        """Everything said so far, failed turns left out."""
        return self._dialogue.messages

    def say(
        self, text: str, *, timeout_s: float | None = None, **knobs: Unpack[Knobs]
    ) -> SyncAnswerStream:
        """Take the user's turn; knobs, if any, replace the conversation's from here on."""
        options = generation_options(**knobs) if knobs else None
        return self._take(Turn([user(text)], options), timeout_s)

    def tool_results(
        self, results: Sequence[chat_pb2.Message], *, timeout_s: float | None = None
    ) -> SyncAnswerStream:
        """Give the results of the tools that the model called, for it to go on with."""
        return self._take(Turn(results), timeout_s)

    def cancel(self) -> None:
        """Stop the running turn, which then finishes as far as it came; keeps the conversation.

        A turn that waits to be sent again has nothing to finish: it gets a RequestCancelledError.
        """
        handle, line = self._handle, self._line
        if handle is None:
            return
        if line is None or not line.call.is_active():
            handle.cancel()
        else:
            cancel = processor_pb2.CancelTurn(turn=self._turns)
            line.send(processor_pb2.ChatRequest(cancel=cancel))

    def hang_up(self) -> None:
        """Cut the stream; whoever reads the running turn gets a RequestCancelledError."""
        handle, line = self._handle, self._line
        if handle is not None:
            handle.cancel()
        elif line is not None:
            line.call.cancel()

    def close(self) -> None:
        """Leave politely when no turn is running, else cut the stream."""
        handle, line, self._line = self._handle, self._line, None
        if handle is not None:
            handle.cancel()
        elif line is not None:
            line.send(None)

    def __enter__(self) -> Self:
        """Converse."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave."""
        self.close()

    def _take(self, turn: Turn, timeout_s: float | None) -> SyncAnswerStream:
        handle = CallHandle(
            self._connection.calls,
            Attempts(self._connection.retry, timeout_s),
            self._dialogue.request_id,
            lambda failed: self._dialogue.mend(turn, failed),
        )
        return SyncAnswerStream(self._deltas(turn, handle), handle)

    def _deltas(
        self, turn: Turn, handle: CallHandle
    ) -> Generator[processor_pb2.ChoiceDelta, None, None]:
        """Hold the conversation for all of a turn, the pauses between its attempts included."""
        if self._handle is not None:
            raise RuntimeError("a turn is running: read it to its end, or close its stream, first")
        self._handle = handle
        try:
            yield from answer_deltas(
                lambda left_s: self._attempt(turn, left_s, handle), handle, self._connection.knock
            )
        finally:
            self._handle = None

    def _attempt(
        self, turn: Turn, timeout_s: float | None, handle: CallHandle
    ) -> Generator[processor_pb2.ChatResponse, None, None]:
        finished = False
        # An RPC's deadline would end the whole conversation's stream, so a turn has a clock.
        clock = threading.Timer(timeout_s, handle.time_is_up) if timeout_s is not None else None
        if clock is not None:
            clock.daemon = True
            clock.start()
        try:
            line = self._send(turn, handle)
            while not finished:
                response = next(line.call, None)
                if response is None:
                    raise incomplete()
                finished = response.HasField("finished")
                yield response
        finally:
            if clock is not None:
                clock.cancel()
            if finished:
                self._dialogue.finished(turn, handle.answer)
            else:
                broken, self._line = self._line, None  # another thread may close us meanwhile
                if broken is not None:
                    broken.call.cancel()

    def _send(self, turn: Turn, handle: CallHandle) -> _Line:
        """Put a turn on the stream, or on a new one with everything said before."""
        line = self._line  # `close` may take ours away from another thread
        if line is not None and line.call.is_active():
            self._turns += 1
            line.send(turn.request())
        else:
            # Ended while nobody looked: the turn didn't start, so start afresh.
            self._turns = 1
            self._line = line = handle.begin(lambda: _Line(self._connection))
            line.send(self._dialogue.start(turn))
        handle.runs(line.call)
        return line


class _Line:
    """One open Chat call and what is to be sent on it."""

    def __init__(self, connection: SyncConnection) -> None:
        # gRPC reads the requests in a thread of its own, which has to end with the call.
        self._requests: queue.SimpleQueue[processor_pb2.ChatRequest | None] = queue.SimpleQueue()
        self.call = connection.stub.Chat(
            iter(self._requests.get, None), metadata=connection.metadata(), wait_for_ready=False
        )
        if not self.call.add_callback(self._over):
            self._over()

    def _over(self) -> None:
        self._requests.put(None)

    def send(self, request: processor_pb2.ChatRequest | None) -> None:
        """Send a message; None closes the sending side."""
        self._requests.put(request)
