"""Images, videos and vectors on a link: entries to whoever reads them; and Rerank calls."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from millstream.v1 import diffusion_pb2, embedding_pb2
from millstream_server.diffusion import wire as diffusion
from millstream_server.diffusion.request import Chunk, DiffusionRequest, Finished, Kind, Progress
from millstream_server.embedding.request import (
    EmbedFinished,
    EmbedRequest,
    Ranking,
    RerankRequest,
    Vectors,
)
from millstream_server.embedding.wire import (
    embed_content,
    embed_to_proto,
    ranking_from_proto,
    rerank_to_proto,
)
from millstream_server.links.channel import CallError, Metadata, Rpc, rpc_of
from millstream_server.links.slot_stream import Connection, OpenRequest, SlotStream
from millstream_server.links.unread import UnreadOutput, overflow
from millstream_server.runtime.errors import (
    InvalidRequestError,
    RequestCancelledError,
    ServingError,
    WorkerLostError,
)
from millstream_server.runtime.rpc.channel import MAX_WORKER_MESSAGE_BYTES
from millstream_server.runtime.rpc.slot_session import EndT, EntryT, SlotContent
from millstream_server.runtime.telemetry.counts import RequestCounts
from millstream_server.runtime.telemetry.trace_context import TraceContext
from millstream_server.runtime.telemetry.tracing import reason_of

RequestT = TypeVar("RequestT")

_ENTRY_BYTES = 512
"""Of an entry without its content."""


@dataclass(frozen=True, slots=True)
class EntryRpc(Generic[RequestT, EntryT, EndT]):
    """What differs between the RPCs whose entries gather."""

    rpc: Rpc
    start: Callable[[int, RequestT], Any]
    """Makes the message that starts a request in a slot."""
    content: Callable[[Any], SlotContent[EntryT, EndT]]
    """Converts a message of the worker."""
    nbytes: Callable[[EntryT], int]
    """Returns what an entry's content takes."""


def _file_bytes(entry: Progress | Chunk) -> int:
    return len(entry.preview if isinstance(entry, Progress) else entry.data)


DIFFUSION: dict[Kind, EntryRpc[DiffusionRequest, Progress | Chunk, Finished]] = {
    kind: EntryRpc(
        rpc_of(diffusion_pb2.DESCRIPTOR, f"DiffusionService/{method}"),
        to_proto,
        diffusion.content_from_proto,
        _file_bytes,
    )
    for kind, method, to_proto in (
        (Kind.IMAGE, "GenerateImage", diffusion.image_to_proto),
        (Kind.VIDEO, "GenerateVideo", diffusion.video_to_proto),
    )
}


EMBED: EntryRpc[EmbedRequest, Vectors, EmbedFinished] = EntryRpc(
    rpc_of(embedding_pb2.DESCRIPTOR, "EmbeddingService/Embed"),
    embed_to_proto,
    embed_content,
    lambda vectors: len(vectors.values),
)
_RERANK = rpc_of(embedding_pb2.DESCRIPTOR, "EmbeddingService/Rerank")


class SlotCall(OpenRequest, Generic[EntryT, EndT]):
    """A request whose entries gather until they are read.

    Read `entries` to their end, then `end`.
    """

    def __init__(self, stream: SlotStream[Any], slot: int, unread: UnreadOutput) -> None:
        """Use `EntryStream.start` to make one."""
        super().__init__(stream, slot, stream.view)
        self._unread = unread
        self._taken_bytes = 0
        """Of the entry that was taken last; its reader may still have it."""
        self._entries: deque[tuple[EntryT, bool, int]] = deque()
        self._wake = asyncio.Event()
        self._end: EndT | None = None
        self._error: ServingError | None = None
        self._ended = False
        self._on_end: Callable[[], None] | None = None

    def when_ended(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when the worker has ended the request, also if nobody reads entries."""
        self._on_end = callback
        if self._ended:
            callback()

    async def entries(self) -> AsyncIterator[tuple[EntryT, bool]]:
        """Yield entries as they come, and whether only the latest is of interest.

        Of several of these in a row that wait to be read, the last one is kept.

        Raises:
            ServingError: the request failed.
        """
        while True:
            while self._entries:
                entry, latest, self._taken_bytes = self._entries.popleft()
                yield entry, latest
                self._read()
            if self._error is not None:
                raise self._error
            if self._ended:
                return
            self._wake.clear()
            await self._wake.wait()

    @property
    def end(self) -> EndT:
        """The good end, after `entries` ended without an error."""
        if self._end is None:
            message = "the request has not ended"
            raise RuntimeError(message)
        return self._end

    @property
    def error(self) -> ServingError | None:
        """What it failed with, also before `entries` has raised it."""
        return self._error

    def cancel(self) -> None:
        """Stop the request, at any time, also twice and after the end; drop its entries.

        `entries` then raises RequestCancelledError, unless the request had ended before.
        """
        self._read()
        self._drop()
        self._stream.cancel(self)

    # ---- for the stream --------------------------------------------------------------------------

    @property
    def caller_key(self) -> SlotCall[EntryT, EndT]:
        """See `Holder`: each request by itself."""
        return self

    def add(self, entry: EntryT, *, latest: bool, nbytes: int = 0) -> None:
        """Take an entry of about ``nbytes``."""
        if self.cancelled:
            return
        if latest and self._entries and self._entries[-1][1]:
            self._unread.remove(self, self._entries.pop()[2])
        self._entries.append((entry, latest, nbytes))
        self._wake.set()
        self._unread.add(self, nbytes)

    def overflowed(self) -> None:
        self._drop()
        self._stream.cancel(self)
        self._error = self._error or overflow()
        self._wake.set()

    def finish(self, end: EndT) -> None:
        self._end = end
        self._over()

    def fail(self, error: ServingError) -> None:
        self._error = self._error or error
        self._over()

    def _read(self) -> None:
        """Count the entry that was taken last as read."""
        taken, self._taken_bytes = self._taken_bytes, 0
        self._unread.remove(self, taken)

    def _drop(self) -> None:
        self._unread.remove(self, sum(nbytes for _, _, nbytes in self._entries))
        self._entries.clear()

    def _over(self) -> None:
        self._ended = True
        self._wake.set()
        if self._on_end is not None:
            self._on_end()


class EntryStream(SlotStream[SlotCall[EntryT, EndT]], Generic[RequestT, EntryT, EndT]):
    """The stream of requests for images, videos or vectors."""

    def __init__(
        self,
        connection: Connection,
        content: EntryRpc[RequestT, EntryT, EndT],
        unread: UnreadOutput,
    ) -> None:
        super().__init__(connection, content.rpc, RequestCounts(connection.description.role.value))
        self._content = content
        self._unread = unread

    def start(self, request: RequestT) -> SlotCall[EntryT, EndT]:
        """Start a request.

        Raises:
            InvalidRequestError: it is too large for a worker.
        """
        slot = self._next_slot()
        message = self._content.start(slot, request)  # first: if it raises, no slot is used
        if (nbytes := message.ByteSize()) > MAX_WORKER_MESSAGE_BYTES:
            raise InvalidRequestError(
                f"the request has {nbytes} bytes; at most {MAX_WORKER_MESSAGE_BYTES} go to a "
                "worker: send a smaller file or fewer inputs"
            )
        self._messages.append(message)
        call = SlotCall[EntryT, EndT](self, slot, self._unread)
        self._begin(call)
        return call

    def _receive(self, message: Any) -> None:
        content = self._content.content(message)
        self._add(content.latest, latest=True)
        self._add(content.entries, latest=False)
        for slot, end in content.finished:
            if self._in_use(slot).cancelled:
                self._fail(slot, RequestCancelledError("the request was cancelled"))
            else:
                call = self._release(slot)
                self._counts.ended("OK")
                self._tell(call.finish, end)
        for slot, error in content.errors:
            self._fail(slot, error)
        if content.draining:
            self._connection.on_draining()

    def _add(self, entries: Sequence[tuple[int, EntryT]], *, latest: bool) -> None:
        for slot, entry in entries:
            nbytes = _ENTRY_BYTES + self._content.nbytes(entry)
            self._in_use(slot).add(entry, latest=latest, nbytes=nbytes)


class VectorStream(EntryStream[EmbedRequest, Vectors, EmbedFinished]):
    """The Embed stream of one connection to a worker, and its Rerank calls.

    Also to a worker that only ranks: the stream says when the worker leaves or is lost. It ends
    when neither a batch nor a call is open.
    """

    def __init__(self, connection: Connection, unread: UnreadOutput) -> None:
        super().__init__(connection, EMBED, unread)
        self._calls: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def rerank(self, request: RerankRequest) -> Ranking:
        """Score pairs of token ids; cancelling this call cancels the request at the worker.

        Raises:
            ServingError: they were not scored.
        """
        left_s = None
        if request.deadline_s is not None:
            left_s = max(0.0, request.deadline_s - time.monotonic())
        call = self._connection.channel.call(
            _RERANK,
            rerank_to_proto(request),
            timeout_s=left_s,
            metadata=_metadata(request.trace),
        )
        with self._counted(asyncio.ensure_future(call)) as task:
            try:
                return ranking_from_proto(await task)
            except CallError as error:
                raise error.failure() from error
            except asyncio.CancelledError:
                if self._closed:  # `close` has cancelled the call, and not this task
                    raise WorkerLostError(self.lost) from None
                raise

    @contextlib.contextmanager
    def _counted(self, task: asyncio.Task[Any]) -> Iterator[asyncio.Task[Any]]:
        self._calls.add(task)
        self.view.begin(self.view)
        self._counts.begun()
        outcome = "OK"
        try:
            yield task
        except BaseException as error:
            outcome = reason_of(error)
            raise
        finally:
            self._calls.discard(task)
            self.view.end(self.view)
            self._counts.ended(outcome)
            self._filled.set()

    def close(self) -> None:
        """See `SlotStream.close`; the calls fail, too."""
        self._closed = True
        for task in self._calls:
            task.cancel()
        super().close()

    @property
    def _idle(self) -> bool:
        return super()._idle and not self._calls


def _metadata(trace: TraceContext) -> Metadata:
    """Return the trace context as metadata; the channel's own, with tracing, replaces it."""
    pairs = {
        "traceparent": trace.traceparent,
        "tracestate": trace.tracestate,
        "baggage": trace.baggage,
    }
    return tuple((key, value) for key, value in pairs.items() if value)
