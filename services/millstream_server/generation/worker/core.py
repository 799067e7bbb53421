"""How a worker starts a text request: check it, admit it, submit it to the engine."""

from __future__ import annotations

from dataclasses import replace

from millstream_server.control.engine import Role
from millstream_server.generation.generator import Generator, GeneratorInfo
from millstream_server.generation.output import Finish, OutputSink, usage_attributes
from millstream_server.generation.request import GenerationRequest
from millstream_server.generation.ticket import Ticket, TicketGate
from millstream_server.generation.validation import check_request
from millstream_server.generation.worker.fetching import Fetcher, FetchThenSubmit
from millstream_server.runtime.errors import (
    InvalidRequestError,
    ServingError,
    UnsupportedFeatureError,
)
from millstream_server.runtime.request_id import check_length
from millstream_server.runtime.telemetry.metrics import TICKETS_REFUSED
from millstream_server.worker.host import WorkerHost
from millstream_server.worker.open_requests import CountedRequest, OpenRequests


class GenerationWorker:
    """Runs requests on one engine; satisfies `generation.worker.session.RequestRunner`."""

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
        if fetcher is not None:
            fetcher.tracing = host.tracing
        self._fetches = FetchThenSubmit(fetcher, engine) if fetcher else None
        self._requests = host.requests
        self.role = host.plan.role
        self.work = host.work
        self.streams = host.streams

    def context_length_of(self, model: str) -> int:
        """See `RequestRunner.context_length_of`; 0 until the model is loaded."""
        info = self._host.info
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
            info = self._host.loaded()
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
