"""What a worker does with a request: check it, admit its ticket, pass it on, count it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from millstream_server.engines.base import (
    Engine,
    EngineInfo,
    Finish,
    GenerationRequest,
    KvHandoff,
    OutputSink,
    Role,
    new_engine_id,
)
from millstream_server.engines.validation import check_request
from millstream_server.runtime.drain import OpenWork
from millstream_server.runtime.errors import (
    InvalidRequestError,
    ServingError,
    UnavailableError,
)
from millstream_server.runtime.load_meter import LoadMeter
from millstream_server.runtime.metrics import TICKETS_REFUSED
from millstream_server.runtime.orca import OUR_FAULT
from millstream_server.transfer.ticket import Ticket, TicketGate
from millstream_server.worker.limits import DEFAULT_LIMITS, Room, WorkerLimits
from millstream_server.worker.request_telemetry import RequestTelemetry, WorkerTelemetry
from millstream_server.worker_stream.start import MAX_REQUEST_ID_BYTES, GenerationStart

_GOODBYE_S = 2.0
"""How long peers of an idle worker may take to close their streams."""


class WorkerCore:
    """One engine's front; satisfies `worker_stream.server.Generator`."""

    def __init__(
        self,
        engine: Engine,
        role: Role,
        gate: TicketGate | None,
        telemetry: WorkerTelemetry | None = None,
        *,
        limits: WorkerLimits = DEFAULT_LIMITS,
    ) -> None:
        """Serve from ``engine``; ``gate`` checks tickets, None in an aggregated worker."""
        self._engine = engine
        self.role = role
        self._telemetry = telemetry or WorkerTelemetry(role)
        self._gate = gate
        self._info: EngineInfo | None = None
        self.work = OpenWork()
        self.streams = OpenWork()
        self._room = Room(limits, self.work)
        self.meter = LoadMeter(self._utilization)

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and completion; 0 until the model is loaded."""
        return self._info.context_length if self._info else 0

    def _utilization(self) -> float:
        """Requests open over requests the engine runs at once."""
        return self.work.count / self._info.max_running_requests if self._info else 0.0

    def ready(self, info: EngineInfo) -> None:
        """The engine is loaded and warm: take requests from now on."""
        self._info = info

    def submit(self, start: GenerationStart, sink: OutputSink) -> str:
        """Check and start a request; answers the id to cancel it by.

        Raises:
            UnavailableError: the model is still loading.
            InvalidRequestError: the request or its ticket is bad.
            OverloadedError: too much is open already.
        """
        telemetry = self._telemetry.open(start)
        with telemetry:
            info = self._check_open(start)
            request = self._request(start, info, telemetry)
            self._room.check(len(start.token_ids), info)  # before the ticket: that is good once
            self._admit_ticket(start.ticket)
            leave = self._room.enter(len(start.token_ids))
            counted = _Counted(leave, sink, telemetry, self.meter)
            try:
                self._engine.submit(request, counted)
            except BaseException:
                counted.leave()  # what raised won't tell of an end
                raise
        return request.engine_id

    def _check_open(self, start: GenerationStart) -> EngineInfo:
        if self._info is None:
            raise UnavailableError("this worker is still loading its model", retry_delay_s=1.0)
        if len(start.request_id.encode()) > MAX_REQUEST_ID_BYTES:
            raise InvalidRequestError.of("request_id", f"at most {MAX_REQUEST_ID_BYTES} bytes")
        return self._info

    def _request(
        self, start: GenerationStart, info: EngineInfo, telemetry: RequestTelemetry
    ) -> GenerationRequest:
        request = GenerationRequest(
            engine_id=new_engine_id(),
            token_ids=start.token_ids,
            sampling=start.sampling,
            logprobs=start.logprobs,
            handoff=_handoff(start.ticket),
            trace_headers=telemetry.headers(start.trace),
        )
        check_request(request, info, self.role)
        return request

    def cancel(self, engine_id: str) -> None:
        """Stop a request at any stage."""
        if engine_id:
            self._engine.abort(engine_id)

    async def drain(self, propagation_s: float, limit_s: float) -> bool:
        """See the work out; answers whether all of it ended in time.

        Processors that were told close their streams when nothing of theirs is open. What is on its
        way until then, however late it comes, is taken: a request that crosses the news isn't lost.
        """
        loop = asyncio.get_running_loop()
        end_s = loop.time() + propagation_s + limit_s
        await self.work.drain(propagation_s, limit_s)
        await self.streams.until_idle(min(_GOODBYE_S, end_s - loop.time()))
        return await self.work.until_idle(end_s - loop.time())

    def _admit_ticket(self, ticket: Ticket | None) -> None:
        if ticket is None:
            return  # check_request has refused its absence where one is needed
        if self._gate is None:
            raise InvalidRequestError.of(
                "ticket", "this worker is aggregated and runs prompts itself; leave it out"
            )
        try:
            self._gate.admit(ticket)
        except InvalidRequestError:
            TICKETS_REFUSED.inc()
            raise


class _Counted:
    """Passes output on and counts the request out when it is over.

    What is told of it comes last: should that fail, nobody waits for an end that never comes.
    """

    __slots__ = ("_leave", "_meter", "_sink", "_telemetry", "emit")

    def __init__(
        self,
        leave: Callable[[], None],
        sink: OutputSink,
        telemetry: RequestTelemetry,
        meter: LoadMeter,
    ) -> None:
        self._meter = meter
        self._leave: Callable[[], None] | None = leave
        self._sink = sink
        self._telemetry = telemetry
        self.emit = sink.emit  # the token path goes straight through

    def leave(self) -> None:
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()

    def finish(self, finish: Finish) -> None:
        self.leave()
        self._sink.finish(finish)
        self._meter.finished(failed=False)
        self._telemetry.finished(finish)

    def fail(self, error: ServingError) -> None:
        self.leave()
        self._sink.fail(error)
        self._meter.finished(failed=error.code in OUR_FAULT)
        self._telemetry.failed(error)


def _handoff(ticket: Ticket | None) -> KvHandoff | None:
    if ticket is None:
        return None
    return KvHandoff(
        ticket.bootstrap_host, ticket.bootstrap_port, ticket.room, ticket.prefill_dp_rank
    )
