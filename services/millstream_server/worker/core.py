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
from millstream_server.runtime.errors import (
    InvalidRequestError,
    ServingError,
    UnavailableError,
    WorkerDrainingError,
)
from millstream_server.transfer.ticket import Ticket, TicketGate
from millstream_server.worker_stream.start import MAX_REQUEST_ID_BYTES, GenerationStart

_CROSSING_S = 0.5
"""How long starts are still taken after the streams were told: they may be on the way already."""


class WorkerCore:
    """One engine's front; satisfies `worker_stream.server.Generator`."""

    def __init__(self, engine: Engine, role: Role, gate: TicketGate | None) -> None:
        """Serve from ``engine``; ``gate`` checks tickets, None in an aggregated worker."""
        self._engine = engine
        self._role = role
        self._gate = gate
        self._info: EngineInfo | None = None
        self._open = 0
        self._leaving = False
        self._draining = False
        self._on_drain: set[Callable[[], None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and completion; 0 until the model is loaded."""
        return self._info.context_length if self._info else 0

    def ready(self, info: EngineInfo) -> None:
        """The engine is loaded and warm: take requests from now on."""
        self._info = info

    def submit(self, start: GenerationStart, sink: OutputSink) -> str:
        """Check and start a request; answers the id to cancel it by.

        Raises:
            WorkerDrainingError: the worker is shutting down.
            UnavailableError: the model is still loading.
            InvalidRequestError: the request or its ticket is bad.
        """
        if self._draining:
            raise WorkerDrainingError("this worker is shutting down; retry on another one")
        if self._info is None:
            raise UnavailableError("this worker is still loading its model", retry_delay_s=1.0)
        if len(start.request_id.encode()) > MAX_REQUEST_ID_BYTES:
            raise InvalidRequestError.of("request_id", f"at most {MAX_REQUEST_ID_BYTES} bytes")
        engine_id = new_engine_id()
        request = GenerationRequest(
            engine_id=engine_id,
            token_ids=start.token_ids,
            sampling=start.sampling,
            logprobs=start.logprobs,
            handoff=_handoff(start.ticket),
            trace_headers=_trace_headers(start),
        )
        check_request(request, self._info, self._role)
        self._admit_ticket(start.ticket)
        self._open += 1
        self._idle.clear()
        self._engine.submit(request, _Counted(self, sink))
        return engine_id

    def cancel(self, engine_id: str) -> None:
        """Stop a request at any stage."""
        if engine_id:
            self._engine.abort(engine_id)

    def watch_drain(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Have ``callback`` called when the drain begins, or has begun; answers how to undo it."""
        if self._leaving:
            callback()
        self._on_drain.add(callback)
        return lambda: self._on_drain.discard(callback)

    async def drain(self, limit_s: float) -> None:
        """Tell the streams, refuse new requests, wait for the open ones, at most ``limit_s``."""
        self._leaving = True
        for callback in self._on_drain:
            callback()
        await asyncio.sleep(_CROSSING_S)
        self._draining = True
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        except TimeoutError:
            pass

    def _admit_ticket(self, ticket: Ticket | None) -> None:
        if ticket is None:
            return  # check_request has refused its absence where one is needed
        if self._gate is None:
            raise InvalidRequestError.of(
                "ticket", "this worker is aggregated and runs prompts itself; leave it out"
            )
        self._gate.admit(ticket)

    def _ended(self) -> None:
        self._open -= 1
        if not self._open:
            self._idle.set()


class _Counted:
    """Passes output on and tells the core when the request is over."""

    __slots__ = ("_core", "_sink", "emit")

    def __init__(self, core: WorkerCore, sink: OutputSink) -> None:
        self._core = core
        self._sink = sink
        self.emit = sink.emit  # the token path goes straight through

    def finish(self, finish: Finish) -> None:
        self._core._ended()  # noqa: SLF001 - same module
        self._sink.finish(finish)

    def fail(self, error: ServingError) -> None:
        self._core._ended()  # noqa: SLF001 - same module
        self._sink.fail(error)


def _handoff(ticket: Ticket | None) -> KvHandoff | None:
    if ticket is None:
        return None
    return KvHandoff(
        ticket.bootstrap_host, ticket.bootstrap_port, ticket.room, ticket.prefill_dp_rank
    )


def _trace_headers(start: GenerationStart) -> dict[str, str]:
    headers = {"traceparent": start.trace.traceparent, "tracestate": start.trace.tracestate}
    return {name: value for name, value in headers.items() if value}
