"""One RPC on an HTTP/2 stream: its requests, its responses, its end."""

from __future__ import annotations

import asyncio
import contextvars
import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from millstream_server.runtime.errors import (
    DeadlinePassedError,
    Failure,
    MalformedMessageError,
    ServingError,
    StatusError,
)
from millstream_server.runtime.rpc.call import CertificateName
from millstream_server.runtime.rpc.served_call import CallOverError, ServedCall
from millstream_server.runtime.rpc.serving import Method
from millstream_server.runtime.rpc.status import to_trailers
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.transport.headers import RequestHead, ok_headers, status_headers
from millstream_server.runtime.transport.inbox import END, Inbox
from millstream_server.runtime.transport.intake import MESSAGE_S, REQUEST_S
from millstream_server.runtime.transport.output import Sender

if TYPE_CHECKING:
    from millstream_server.runtime.transport.connection import Connection

log = get_log(__name__)

_TWO_MESSAGES = (
    "this method takes one request message, and there are more; check the client's stubs"
)


class Life(enum.Enum):
    """How far an RPC is."""

    NEW = enum.auto()
    """Its first frames are being taken."""
    WAITS = enum.auto()
    """The layers are entered; a task follows with its first message or the end of its requests."""
    SERVED = enum.auto()
    """A task runs its handler."""
    OVER = enum.auto()
    """The status was sent, or the stream was reset: nothing can be sent any more. A task that still
    runs is cancelled, or about to end."""


class Stream(ServedCall):
    """A `Call` on an HTTP/2 stream. All calls come from the event loop's thread.

    It ends in one of two ways: its handler does (`complete`, `abort`), or it is cut: by `fail`,
    which a handler learns first, and by the caller's deadline or because the caller has gone.
    """

    __slots__ = ("_connection", "_context", "_deadline_s", "_life", "_method",
                 "_timer", "begun_s", "certificate_names", "id", "inbox", "limit_s",
                 "metadata", "peer", "read", "ready", "send_from", "sender", "write")  # fmt: skip

    END: ClassVar[Any] = END

    metadata: Sequence[tuple[str, str | bytes]]
    peer: str
    certificate_names: Sequence[CertificateName] | None
    inbox: Inbox
    sender: Sender

    def __init__(
        self, connection: Connection, stream_id: int, head: RequestHead, method: Method
    ) -> None:
        """Serve an RPC of ``method``; `start` it when its first frames have been taken."""
        super().__init__(head.path)
        self.id = stream_id
        self.metadata = head.metadata
        self.peer = connection.peer
        self.caller_key = connection.caller_key
        self.certificate_names = connection.certificate_names
        self.begun_s = connection.loop.time()
        self.limit_s = method.first_message_s or connection.options.first_message_s
        """Longest wait for its first message; None: for ever."""
        self._make_parts(connection, head, method)
        self.read, self.write = self.inbox.read, self.sender.write  # no call in between
        self.send_from, self.ready = self.sender.send_from, self.sender.ready
        self._life = Life.NEW
        self._connection = connection
        self._method = method
        self._deadline_s = None if head.timeout_s is None else self.begun_s + head.timeout_s
        self._timer: asyncio.TimerHandle | None = None
        self._context = contextvars.copy_context()  # what layers set is for this RPC only

    def _make_parts(self, connection: Any, head: RequestHead, method: Method) -> None:
        most = method.max_request_bytes or connection.options.max_receive_bytes
        self.inbox = Inbox(connection, self.id, head.encoding, most, method.parse)
        self.inbox.descriptor = method.descriptor
        self.sender = Sender(connection, connection.h2.streams[self.id], self.id, method.serialize)

    @property
    def time_left_s(self) -> float | None:
        if self._deadline_s is None:
            return None
        return max(0.0, self._deadline_s - self._connection.loop.time())

    def start(self) -> None:
        """Begin it, unless it is over; serve it, but see `Method.waits`."""
        if self._life is Life.OVER:
            return
        if self._deadline_s is not None:
            self._timer = self._connection.loop.call_at(self._deadline_s, self._deadline_passed)
        self._life = Life.WAITS
        try:
            self._context.run(self._method.begin, self)
        except Exception as error:  # noqa: BLE001 - it becomes the status
            self._cut(error)
            return
        if self.failure is not None:
            self._cut(self.failure)
            return
        silent = self.inbox.silent
        if not (silent and self._method.waits):
            self._serve()
        if silent and self.limit_s is not None:
            self._connection.awaits_message(self.id)

    def _serve(self) -> None:
        self._life = Life.SERVED
        serving = self._method.serve(self, begun=True)
        self._task = self._connection.loop.create_task(serving, context=self._context)
        self._task.add_done_callback(self._served)

    def _served(self, task: asyncio.Task[Any]) -> None:
        # The task knows this object: without the cycle both go now, not at a garbage collection.
        self._task = None
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("an RPC's handler failed after its end", error=error, method=self.method)
        if not self.ending:  # it was cancelled before its first step
            self._leave(self.failure or asyncio.CancelledError())
        if self._life is not Life.OVER:
            self._end()
            self.sender.reset()

    def fail(self, failure: Failure) -> None:
        """See `ServedCall`; without a handler its status is sent now, or behind the layers."""
        if self.ending:
            return
        self._take_no_more()
        self.inbox.drop()
        self.sender.drop()
        if self._life is Life.SERVED:
            super().fail(failure)
        elif self._life is Life.NEW:
            self.failure = self.failure or failure
        else:
            self._cut(failure)

    def lost(self) -> None:
        self._cut(asyncio.CancelledError())

    def _deadline_passed(self) -> None:
        self._deadline_s = 0.0
        self._cut(DeadlinePassedError("the caller's deadline passed"))

    def _cut(self, error: BaseException) -> None:
        """End it now, whatever its handler does: with the status of ``error``, if it has one."""
        if self._life is Life.WAITS:
            self._leave(error)
        elif isinstance(error, (ServingError, StatusError)):
            self._send_failure(error)
        if self._life is not Life.OVER:
            self._end()
        if self._task is not None:
            self._task.cancel()

    def _leave(self, error: BaseException) -> None:
        """Leave the layers of an RPC that no handler has served, and send the status."""
        self._context.run(self._method.give_up, self, error, self._send_failure)

    def _send_failure(self, failure: Failure) -> None:
        if self._life is not Life.OVER:
            trailers = (*self.trailers, *to_trailers(failure))
            self.sender.send_trailers(status_headers(failure.code, failure.message, trailers))
            self._end()

    def _end(self) -> None:
        """Note that nothing can be sent any more; forget what wasn't read and what wasn't sent."""
        self._life = Life.OVER
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.inbox.close()
        self.sender.close()
        if self.inbox.silent:
            self._connection.heard(self.id, message=False)
        self._connection.over(self.id)

    # ---- requests --------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether nothing can be sent any more."""
        return self._life is Life.OVER

    @property
    def all_read(self) -> bool:
        return self.inbox.ended and not self.inbox

    @property
    def has_request(self) -> bool:
        return bool(self.inbox)

    def received(self, data: bytes, nbytes: int) -> None:
        """Take a DATA frame that used ``nbytes`` of the window."""
        inbox = self.inbox
        if inbox.ended or self._life is Life.OVER:
            return
        try:
            completed = inbox.feed(data, nbytes)
        except (ServingError, StatusError) as error:
            # Its traceback knows this object and the message, of megabytes: a cycle.
            self.fail(error.with_traceback(None))
            return
        if completed:
            self._connection.work_begun_s += completed * MESSAGE_S
            if self._method.lone and (completed > 1 or inbox.begun):
                self.fail(MalformedMessageError(_TWO_MESSAGES))
                return
            if not inbox.begun:
                inbox.begun = True
                self._connection.work_begun_s += REQUEST_S
                self._connection.heard(self.id, message=True)
            self._wake()
        inbox.count()
        inbox.credit()

    def closed_by_client(self) -> None:
        if not self.inbox.ended:
            self._take_no_more()
            self.inbox.end()
        self._wake()

    def _body_came(self) -> None:
        """Note that a body is whole which is one message."""
        self.inbox.end()
        self._connection.work_begun_s += REQUEST_S
        self._connection.heard(self.id, message=True)
        self.inbox.ended = True

    def _take_no_more(self) -> None:
        if self.inbox.silent:
            self._connection.heard(self.id, message=False)
        self.inbox.ended = True

    def _wake(self) -> None:
        if self._life is Life.WAITS:
            self._serve()
        else:
            self.inbox.wake()

    def complete(self) -> None:
        if self._life is not Life.OVER:
            self.sender.send_trailers(ok_headers(self.trailers))
            self._end()

    async def abort(self, failure: Failure) -> None:
        if self._life is Life.OVER:
            raise CallOverError
        self._send_failure(failure)
