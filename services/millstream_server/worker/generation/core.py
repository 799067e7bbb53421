"""How a worker starts a text request: check it, admit it, fetch its media, submit it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Protocol

from millstream_server.engines.base import Role
from millstream_server.generation.generator import Generator, GeneratorInfo
from millstream_server.generation.media_checks import check_tensors
from millstream_server.generation.output import Finish, FinishReason, OutputSink
from millstream_server.generation.request import GenerationRequest
from millstream_server.generation.span import usage_attributes
from millstream_server.generation.validation import check_request
from millstream_server.media.items import EmbeddingTicket, MediaInput
from millstream_server.media.tensor import Tensor
from millstream_server.runtime.errors import (
    InternalError,
    InvalidRequestError,
    ServingError,
    UnsupportedFeatureError,
)
from millstream_server.runtime.request_id import check_length
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.telemetry.metrics import TICKETS_REFUSED
from millstream_server.runtime.telemetry.trace_context import TraceContext
from millstream_server.transfer.ticket import Ticket, TicketGate
from millstream_server.worker.host import WorkerHost
from millstream_server.worker.open_requests import CountedRequest, OpenRequests

log = get_log(__name__)


class Fetcher(Protocol):
    """Fetches tensors from encode workers."""

    async def fetch(self, ticket: EmbeddingTicket, trace: TraceContext | None = None) -> Tensor:
        """Fetch one tensor, with a span below ``trace``; cancelling the task stops it.

        Raises:
            InvalidRequestError: the ticket is forged or expired.
            EmbeddingTransferError: the tensor didn't arrive.
        """
        ...


class FetchingSink(OutputSink, Protocol):
    """A sink that also learns what was fetched."""

    def fetched(self, nbytes: int) -> None:
        """Note that inputs of so many bytes have come."""
        ...


@dataclass(slots=True, eq=False)
class _Fetch:
    """One request whose tensors are on the way."""

    request: GenerationRequest
    sink: FetchingSink
    task: asyncio.Task[tuple[MediaInput, ...]]
    cancelled: bool = False


class FetchThenSubmit:
    """Runs requests with media on an engine, after fetching their tensors.

    Each request's sink gets exactly one end: from here until the engine has the request, then from
    the engine. All calls come from one event loop.
    """

    def __init__(self, fetcher: Fetcher, engine: Generator) -> None:
        """Fetch with ``fetcher``, then submit to ``engine``."""
        self._fetcher = fetcher
        self._engine = engine
        self._fetches: dict[str, _Fetch] = {}

    def submit(self, request: GenerationRequest, sink: FetchingSink) -> None:
        """Start fetching; ``sink`` is told of it before the engine gets the request.

        Like `Generator.submit`, it returns at once and reports failures to the sink.
        """
        task = asyncio.create_task(
            self._fetch(request.prompt.media, request.trace), name=f"fetch-{request.engine_id}"
        )
        fetch = self._fetches[request.engine_id] = _Fetch(request, sink, task)
        # Not at the end of the task: a task cancelled before its first step runs nothing at all.
        task.add_done_callback(lambda _: self._end(fetch))

    def cancel(self, engine_id: str) -> bool:
        """Stop a request whose tensors are on the way; return whether there was one."""
        fetch = self._fetches.get(engine_id)
        if fetch is None:
            return False
        fetch.cancelled = True
        fetch.task.cancel()
        return True

    async def _fetch(
        self, media: tuple[MediaInput, ...], trace: TraceContext
    ) -> tuple[MediaInput, ...]:
        """Fetch all tensors at once, each ticket's once."""
        tickets = {item.ticket for item in media if item.ticket is not None}
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {
                    ticket: group.create_task(self._fetcher.fetch(ticket, trace))
                    for ticket in tickets
                }
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        found = tuple(
            replace(item, tensor=tasks[item.ticket].result()) if item.ticket else item
            for item in media
        )
        check_tensors(found)
        return found

    def _end(self, fetch: _Fetch) -> None:
        """Hand the request to the engine, or report why not."""
        request, task = fetch.request, fetch.task
        del self._fetches[request.engine_id]
        error = None if task.cancelled() else task.exception()
        if fetch.cancelled or task.cancelled():
            fetch.sink.finish(_cancelled(request))
        elif error is not None:
            fetch.sink.fail(_reported(error))
        else:
            self._hand_over(fetch, task.result())

    def _hand_over(self, fetch: _Fetch, media: tuple[MediaInput, ...]) -> None:
        request = fetch.request
        fetch.sink.fetched(sum(item.tensor.spec.nbytes for item in media if item.tensor))
        prompt = replace(request.prompt, media=media)
        try:
            self._engine.submit(replace(request, prompt=prompt), fetch.sink)
        except Exception as error:  # noqa: BLE001 - one request's bug must not end the others
            fetch.sink.fail(_reported(error))


def _reported(error: BaseException) -> ServingError:
    """Return what the caller is told; a bug goes into the log."""
    if isinstance(error, ServingError):
        return error
    internal = InternalError.with_id()
    log.error("a request with media failed", error_id=internal.error_id, error=error)
    return internal


def _cancelled(request: GenerationRequest) -> Finish:
    return Finish(
        reason=FinishReason.CANCELLED,
        prompt_tokens=len(request.prompt),
        completion_tokens=0,
        media_tokens=request.prompt.media_tokens,
    )


class GenerationWorker:
    """Runs requests on one engine; satisfies `worker.generation.session.RequestRunner`."""

    def __init__(
        self,
        host: WorkerHost[GeneratorInfo],
        engine: Generator,
        gate: TicketGate | None,
        fetcher: Fetcher | None = None,
    ) -> None:
        """Run requests on ``engine``.

        ``gate`` checks tickets of hand-offs, None in an aggregated worker. ``fetcher`` gets the
        embeddings of images and videos, None where they can't be fetched.
        """
        self._host = host
        self._engine = engine
        self._gate = gate
        self._fetches = FetchThenSubmit(fetcher, engine) if fetcher else None
        self._requests = host.requests
        self.role = host.plan.role
        self.work = host.work
        self.streams = host.streams

    def context_length_of(self, model: str) -> int:
        """See `RequestRunner.context_length_of`; 0 until the model is loaded."""
        info = self._host.info.value
        return info.context_length if info else 0

    def submit(self, request: GenerationRequest, sink: OutputSink) -> str:
        """Check and start a request; return the id for `cancel`.

        Raises:
            UnavailableError: the model is still loading.
            InvalidRequestError: the request or its ticket is bad.
            UnsupportedFeatureError: it has media, which this worker can't fetch.
            OverloadedError: a limit on open requests would be exceeded.
        """
        opened = _OpenText(self._requests, request, sink)
        try:
            info = self._host.info.value or self._host.loaded()
            check_length(request.request_id)
            check_request(request, info, self.role)
            engine = self._engine_for(request)
            tokens = len(request.prompt)
            self._requests.check(tokens)  # before the ticket, which is valid only once
            if request.ticket is not None:
                self._admit_ticket(request.ticket)
            opened.admit(tokens)
            if opened.trace is not request.trace:
                request = replace(request, trace=opened.trace)
            engine.submit(request, opened)
        except BaseException as error:
            opened.failed(error)  # code that raises doesn't report the end
            raise
        return request.engine_id

    def cancel(self, engine_id: str) -> None:
        """Stop a request at any stage."""
        if engine_id and not (self._fetches and self._fetches.cancel(engine_id)):
            self._engine.abort(engine_id)

    def _engine_for(self, request: GenerationRequest) -> Generator | FetchThenSubmit:
        """Return what runs a request: media, but for geometry alone, have to be fetched first."""
        if not request.prompt.media or self.role is Role.DECODE:
            return self._engine
        if self._fetches is None:
            raise UnsupportedFeatureError.of(
                "media", "this worker can't fetch embeddings; send the request to one that can"
            )
        return self._fetches

    def _admit_ticket(self, ticket: Ticket) -> None:
        if self._gate is None:  # an aggregated worker: the check has already refused a ticket
            raise InvalidRequestError.of("ticket", "this worker takes no ticket; leave it out")
        try:
            self._gate.admit(ticket)
        except InvalidRequestError:
            TICKETS_REFUSED.inc()
            raise


class _OpenText(CountedRequest):
    """The engine's sink: passes output on to ``sink``; counts and reports the request's end.

    The count comes first, telemetry last: if telemetry fails, the caller still gets the end.
    """

    __slots__ = ("_sink", "emit")

    def __init__(
        self, requests: OpenRequests, request: GenerationRequest, sink: OutputSink
    ) -> None:
        super().__init__(requests, request.request_id, request.trace)
        self._sink = sink
        self.emit = sink.emit  # token path: no call in between

    def finish(self, finish: Finish) -> None:
        self.leave()
        ended = self._requests.ended
        ended.prompt += finish.prompt_tokens
        ended.cached += finish.cached_tokens
        ended.completion += finish.completion_tokens
        self._sink.finish(finish)
        if self.traced:
            self.finished(finish.reason.name, usage_attributes(finish))
        else:
            self.finished(finish.reason.name)

    def fail(self, error: ServingError) -> None:
        self.leave()
        self._sink.fail(error)
        self.failed(error)
