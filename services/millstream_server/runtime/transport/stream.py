"""One RPC on an HTTP/2 stream: its requests, its responses, its end."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from h2.errors import ErrorCodes

from millstream_server.runtime.errors import (
    Code,
    DeadlinePassedError,
    Failure,
    MalformedMessageError,
    ServingError,
    StatusError,
)
from millstream_server.runtime.rpc.served_call import CallOverError, ServedCall, Trailers
from millstream_server.runtime.rpc.status import to_trailers
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.transport.framing import MessageReader
from millstream_server.runtime.transport.h2_state import WINDOW_BYTES
from millstream_server.runtime.transport.headers import RequestHead, status_headers
from millstream_server.runtime.transport.inbox import Inbox
from millstream_server.runtime.transport.limits.work import MESSAGE_S, REQUEST_S
from millstream_server.runtime.transport.sender import Sender

if TYPE_CHECKING:
    from millstream_server.runtime.rpc.call import Source
    from millstream_server.runtime.rpc.serving import Method
    from millstream_server.runtime.transport.connection import Connection

log = get_log(__name__)

_TWO_MESSAGES = (
    "this method takes one request message, and there are more; check the client's stubs"
)


class Stream(ServedCall):
    """A `Call` on an HTTP/2 stream. All calls come from the event loop's thread."""

    __slots__ = (
        "_connection",
        "_context",
        "_deadline_s",
        "_inbox",
        "_method",
        "_reading",
        "_timer",
        "_uncredited",
        "_waiting",
        "begun_s",
        "caller_key",
        "client_done",
        "got_message",
        "head",
        "id",
        "over",
        "sender",
    )

    END: ClassVar[Any] = object()

    def __init__(
        self, connection: Connection, stream_id: int, head: RequestHead, method: Method
    ) -> None:
        """Serve an RPC of ``method``; `start` it when its first frames have been taken."""
        super().__init__(head.path)
        self.id = stream_id
        self.head = head
        self.caller_key = connection.caller_key
        self.begun_s = connection.loop.time()
        self.client_done = False
        """The caller has closed its side."""
        self.got_message = False
        self.over = False
        """The status was sent or the stream was reset: nothing can be sent any more."""
        self.sender = Sender(connection, stream_id, method.serialize)
        self._connection = connection
        self._method = method
        most = method.max_request_bytes or connection.options.max_receive_bytes
        self._inbox = Inbox(connection, MessageReader(head.encoding, most))
        self._uncredited = 0
        """Bytes received for which the caller got no credit yet."""
        self._reading: asyncio.Future[None] | None = None
        self._deadline_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._context = contextvars.copy_context()
        """What layers set is for this RPC only."""
        self._waiting = False
        """It has begun, and gets a task when its first message or the end of its requests comes."""

    # ---- `Call` ----------------------------------------------------------------------------------

    @property
    def metadata(self) -> Sequence[tuple[str, str | bytes]]:
        """See `Call`."""
        return self.head.metadata

    @property
    def peer(self) -> str:
        """See `Call`."""
        return self._connection.peer

    @property
    def certificate_names(self) -> Any:
        """See `Call`."""
        return self._connection.certificate_names

    @property
    def time_left_s(self) -> float | None:
        """See `Call`."""
        if self._deadline_s is None:
            return None
        return max(0.0, self._deadline_s - self._connection.loop.time())

    @property
    def all_read(self) -> bool:
        """See `Call`."""
        return self.client_done and not self._inbox

    @property
    def limit_s(self) -> float | None:
        """Longest wait for its first message; None: for ever."""
        return self._method.first_message_s or self._connection.options.first_message_s

    # ---- its life --------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin it; serve it, but see `Method.waits`."""
        if (timeout_s := self.head.timeout_s) is not None:
            self._deadline_s = self.begun_s + timeout_s
            loop = self._connection.loop
            self._timer = loop.call_later(timeout_s, self._deadline_passed)
        self._waiting = True
        try:
            self._context.run(self._method.begin, self)
        except Exception as error:  # noqa: BLE001 - it becomes the status
            self._give_up(error)
            return
        heard = self.got_message or self.client_done
        if heard or not self._method.waits:
            self._serve()
        if not heard and self.limit_s is not None:
            self._connection.awaits_message(self)

    def _serve(self) -> None:
        self._waiting = False
        serving = self._method.serve(self, begun=True)
        self._task = self._connection.loop.create_task(serving, context=self._context)
        self._task.add_done_callback(self._served)

    def _give_up(self, error: BaseException) -> None:
        """End it without having served it."""
        if self._waiting:
            self._waiting = False
            self._context.run(self._method.give_up, self, error, self._refuse)
            self._stop_timer()
        elif isinstance(error, (ServingError, StatusError)):  # it hasn't begun
            self._refuse(error.code, error.message, to_trailers(error))

    def _refuse(self, code: Code, message: str, trailers: Trailers) -> None:
        if not self.over:
            self._send_status(code, message, trailers)

    def _deadline_passed(self) -> None:
        self._deadline_s = 0.0
        error = DeadlinePassedError("the caller's deadline passed")
        if self._waiting:
            self._give_up(error)
            return
        self._refuse(error.code, error.message, self.trailers)
        self._cancel()

    def lost(self) -> None:
        """Handle that the caller reset the stream, or that the connection was lost."""
        self.over = True
        self._release()
        self._give_up(asyncio.CancelledError())
        self._cancel()

    def fail(self, failure: Failure) -> None:
        """See `ServedCall`; without a handler its status is sent now."""
        if self._task is None:
            self._give_up(failure)
        else:
            super().fail(failure)

    def end_with(self, error: Failure) -> None:
        """End it with a status, whatever its handler does."""
        self._inbox.drop()
        self.sender.drop()
        self.fail(error)

    def _cancel(self) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _served(self, task: asyncio.Task[Any]) -> None:
        self._stop_timer()
        # The task knows this object: without the cycle both go now, not at a garbage collection.
        self._task = self._reading = None
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("an RPC's handler failed after its end", error=error, method=self.method)
        if not self.ending:  # it was cancelled before its first step
            self._waiting = True
            self._give_up(self.failure or asyncio.CancelledError())
        if self.over:
            return
        self.over = True
        self._release()
        self._connection.reset(self, ErrorCodes.INTERNAL_ERROR)

    def _release(self) -> None:
        """Forget what was received and not read, and what was not sent."""
        self._inbox.drop()
        self.sender.drop()
        self._connection.over(self)

    # ---- requests --------------------------------------------------------------------------------

    @property
    def has_request(self) -> bool:
        """See `ServedCall`."""
        return bool(self._inbox)

    @property
    def held_bytes(self) -> int:
        """Bytes received and not read."""
        return self._inbox.held_bytes

    def received(self, data: bytes, nbytes: int) -> None:
        """Take a DATA frame that used ``nbytes`` of the window."""
        if self.client_done or self.over:
            return
        self._uncredited += nbytes
        try:
            completed = self._inbox.feed(data)
        except (ServingError, StatusError) as error:
            self.client_done = True  # nothing after it can be understood
            # Its traceback knows this object and the message, of megabytes: a cycle.
            self.end_with(error.with_traceback(None))
            return
        if completed:
            self._connection.work_begun_s += completed * MESSAGE_S
            if self._method.lone and (completed > 1 or self.got_message):
                self.end_with(MalformedMessageError(_TWO_MESSAGES))
                return
            if not self.got_message:
                self.got_message = True
                self._connection.work_begun_s += REQUEST_S
                self._connection.heard(self)
            self._wake()
        self._inbox.count()
        self._credit()

    def closed_by_client(self) -> None:
        """Take the end of the caller's side."""
        if not self.client_done:
            self._inbox.end(MalformedMessageError("the request ends in the middle of a message"))
        self.client_done = True
        self._connection.heard(self)
        self._wake()

    def _credit(self) -> None:
        """Let the caller send the rest of the message begun, or more if all was read."""
        if self._inbox or self.client_done:
            return  # later, when the handler has read it
        credit = self._uncredited
        if credit >= WINDOW_BYTES // 2 or self._inbox.missing:
            self._uncredited = 0
            self._connection.credit(self, credit)

    def _wake(self) -> None:
        """Let the handler read."""
        if self._waiting:
            self._serve()
        elif self._reading is not None and not self._reading.done():
            self._reading.set_result(None)

    async def read(self) -> Any:
        """See `ServedCall`."""
        while not self._inbox:
            if self.client_done:
                return self.END
            if self.over:
                raise CallOverError
            self._reading = self._connection.loop.create_future()
            await self._reading
        message = self._inbox.take()
        self._credit()
        return self._method.parse(message)

    # ---- responses -------------------------------------------------------------------------------

    def ready(self) -> None:
        """See `Call`."""
        self.sender.ready()

    async def send_from(self, source: Source) -> None:
        """See `Call`."""
        if self.over:
            raise CallOverError
        await self.sender.send_from(source)

    async def write(self, response: Any) -> None:
        """See `ServedCall`."""
        data = self._method.serialize(response)
        if self.over:
            raise CallOverError
        if not self.sender.send_whole(data):
            await self.sender.send_parts(data)
            if self.over:
                raise CallOverError

    # ---- the end ---------------------------------------------------------------------------------

    def complete(self) -> None:
        """See `ServedCall`."""
        if not self.over:
            self._send_status(Code.OK, "", self.trailers)

    async def abort(self, code: Code, message: str, trailers: Trailers) -> None:
        """See `ServedCall`."""
        if self.over:
            raise CallOverError
        self._send_status(code, message, trailers)

    def _send_status(self, code: Code, message: str, trailers: Trailers) -> None:
        self.over = True
        self.sender.send_trailers(status_headers(code, message, trailers))
        self._release()

    def is_late(self, error: BaseException) -> bool:
        """See `ServedCall`."""
        return isinstance(error, CallOverError)
