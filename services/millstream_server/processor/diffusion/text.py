"""DiffusionService.GenerateText at the Processor: token ids in, token ids out, one address.

`generation.worker.session.WorkerSession` runs the stream, as it does at a worker. In place of an
engine it has a `TextForwarder`, which admits each request, routes it, and passes it to a worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

from millstream_server.control.engine import Role, Task
from millstream_server.generation.output import (
    Finish,
    FinishReason,
    OutputSink,
    TokenLogprob,
    logprob_bytes,
    output_bytes,
)
from millstream_server.generation.request import GenerationRequest
from millstream_server.generation.validation import check_request
from millstream_server.links.unread import UnreadOutput, overflow
from millstream_server.processor.admission import Admission
from millstream_server.processor.front import Front, FrontRequest
from millstream_server.processor.leg import Workers
from millstream_server.processor.losses import LOSSES, begins_again, told_of
from millstream_server.processor.models import ServedModel
from millstream_server.processor.requests import most_tokens, too_large
from millstream_server.processor.telemetry import NO_SPAN, RequestSpan, TurnTelemetry, Usage
from millstream_server.routing.plan import RoutingRequest
from millstream_server.runtime.drain import OpenWork
from millstream_server.runtime.errors import (
    InternalError,
    InvalidRequestError,
    RepeatedLossError,
    ServingError,
    UnsupportedFeatureError,
)
from millstream_server.runtime.priority import Priority
from millstream_server.runtime.request_id import check_length
from millstream_server.runtime.rpc.auth import caller
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)


class TextForwarder:
    """Runs requests on the workers of their models; a `generation.worker.session.RequestRunner`."""

    role = Role.DIFFUSION

    def __init__(self, front: Front, workers: Workers, unread: UnreadOutput) -> None:
        self.work = front.work
        self.streams = OpenWork()
        """Not awaited in a drain: the server ends streams without requests."""
        self.unread = unread
        self._front = front
        self._workers = workers
        self._open: dict[str, _TextRequest] = {}

    def context_length_of(self, model: str) -> int:
        return self._served(model).engine.context_length

    def submit(self, request: GenerationRequest, sink: OutputSink) -> str:
        """Check a request, admit it and send it to a worker, at once or later.

        Raises:
            ServingError: it was refused.
        """
        with FrontRequest(self._front, Task.GENERATE_TEXT, request.trace) as asked:
            request = self._checked(request, asked)
            self._front.repeated.check(caller().key, request)
            self._front.router.require(request.model)
            tokens, left_s = most_tokens(request, 1), request.time_left_s
            admission = asked.enter(1, tokens, Priority.NORMAL, left_s, prompt=len(request.prompt))
        forwarded = _TextRequest(
            self._front,
            self._workers,
            request,
            sink,
            admission=admission,
            telemetry=asked.telemetry,
        )
        forwarded.ended = lambda: self._open.pop(request.engine_id, None)
        self._open[request.engine_id] = forwarded
        forwarded.begin()
        return request.engine_id

    def cancel(self, engine_id: str) -> None:
        forwarded = self._open.get(engine_id)
        if forwarded is not None:
            forwarded.cancel()

    def _checked(self, request: GenerationRequest, asked: FrontRequest) -> GenerationRequest:
        served = self._served(request.model)
        asked.known(served.name, served.engine.engine)
        request = replace(request, model=served.name)
        check_length(request.request_id)
        if violations := too_large(request, 1, self._front.limits, ""):
            raise InvalidRequestError.of_all(violations)
        check_request(request, served.engine, Role.DIFFUSION)
        asked.telemetry.request_known(request, 1)
        return request

    def _served(self, name: str) -> ServedModel:
        """Look up a diffusion language model; an empty name means the default."""
        models = self._front.models
        served = models.served(name or models.name_of("", Task.GENERATE_TEXT))
        if not self._front.router.runs_in(served.name, Role.DIFFUSION):
            raise UnsupportedFeatureError.of(
                "model", f"{served.name!r} is no diffusion language model: it chats"
            )
        return served


class _TextRequest:
    """One request: it waits, runs on a worker, ends once. The worker's output comes here."""

    def __init__(
        self,
        front: Front,
        workers: Workers,
        request: GenerationRequest,
        sink: OutputSink,
        *,
        admission: Admission,
        telemetry: TurnTelemetry,
    ) -> None:
        self.ended: Callable[[], object] = lambda: None
        """Called at the end."""
        self._front = front
        self._workers = workers
        self._request = request
        self._sink = sink
        self._admission = admission
        self._telemetry = telemetry
        self._span: RequestSpan = NO_SPAN
        self._cancel: Callable[[], None] | None = None
        self._waiting: asyncio.Task[None] | None = None
        self._address = ""
        """Of the worker that runs it."""
        self._started = False
        self._cancelled = False
        self._lost: ServingError | None = None
        """How it lost its first worker; it has a second one."""
        self._caller_key = caller().key
        front.work.begin()

    def begin(self) -> None:
        """Run it now if it is admitted, else when it is."""
        if self._admission.waits:
            self._waiting = asyncio.ensure_future(self._wait())
        else:
            self._launch()

    def cancel(self) -> None:
        self._cancelled = True
        if self._cancel is None:
            self._admission.cancel()
        else:
            self._cancel()

    async def _wait(self) -> None:
        try:
            await self._admission.admitted()
        except ServingError as error:
            self.fail(error)
            return
        if self._admission.runs:
            self._launch()
        else:
            tokens = len(self._request.prompt)
            self.finish(
                Finish(reason=FinishReason.CANCELLED, prompt_tokens=tokens, completion_tokens=0)
            )

    def _launch(self) -> None:
        request = self._request
        try:
            plan = self._front.router.plan(
                RoutingRequest(
                    model=request.model,
                    token_ids=request.token_ids,
                    adapter=request.adapter,
                    avoid=(self._address,),
                )
            )
            (leg,) = plan.legs
            address = self._address = leg.place.address
            request = replace(
                request, dp_rank=leg.place.dp_rank, expected_cached_tokens=leg.cached_tokens
            )
            self._span = self._telemetry.leg(leg.role, address)
            request = replace(request, trace=self._span.carry(request.trace))
            self._cancel = self._workers.generate(address, request, self).cancel
        except ServingError as error:
            self._fail_soon(error)
        except Exception as error:  # noqa: BLE001 - a bug must not leave the request open for ever
            internal = InternalError.with_id()
            log.error("a request can't be sent", error_id=internal.error_id, error=error)
            self._fail_soon(internal)

    def _fail_soon(self, error: ServingError) -> None:
        """Fail later: the caller of `submit` doesn't have the request's id yet."""
        asyncio.get_running_loop().call_soon(self.fail, error)

    def emit(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> None:
        if not self._started:
            self._started = True
            self._telemetry.first_token()
        self._sink.emit(token_ids, logprobs)

    def finish(self, finish: Finish) -> None:
        self._leave()
        self._sink.finish(finish)
        self._front.count(None)
        self._span.ended()
        usage = Usage(
            prompt_tokens=finish.prompt_tokens,
            completion_tokens=finish.completion_tokens,
            cached_tokens=finish.cached_tokens,
        )
        self._telemetry.ended(usage, [finish.reason], "", 1)

    def fail(self, error: ServingError) -> None:
        """End it; or start it again elsewhere, once, if its worker is lost and gave nothing."""
        self._span.failed(error)
        if self._may_start_again(error):
            self._lost, self._span = error, NO_SPAN
            begins_again(self._request.model, self._address, error)
            self._launch()
            return
        if self._lost is not None and not self._started:
            error = told_of(self._request.model, self._lost, error)
            if isinstance(error, RepeatedLossError):
                self._front.repeated.add(self._caller_key, self._request)
        self._leave()
        self._sink.fail(error)
        self._front.count(error)
        usage = Usage(len(self._request.prompt), 0, 0)
        self._telemetry.ended(usage, [], error.reason, 1)

    def _may_start_again(self, error: ServingError) -> bool:
        fresh = not (self._started or self._cancelled or self._lost)
        ran = bool(self._address) and isinstance(error, LOSSES)
        return fresh and ran and self._front.redispatch

    def _leave(self) -> None:
        self._admission.leave()
        self.ended()
        self._front.work.end()


class CountedTexts:
    """Runs a stream's requests and counts their output until it is taken to be sent.

    A `generation.worker.slot.RequestRunner`, and a `links.unread.Gathering`.
    """

    def __init__(
        self,
        runner: TextForwarder,
        unread: UnreadOutput,
        caller_key: Hashable,
        end_call: Callable[[ServingError], None],
    ) -> None:
        """Run requests with ``runner``; ``end_call`` ends the stream if too much gathers."""
        self.role = runner.role
        self.work = runner.work
        self.streams = runner.streams
        self.context_length_of = runner.context_length_of
        self.cancel = runner.cancel
        self.caller_key = caller_key
        self._runner = runner
        self._unread = unread
        self._end_call = end_call
        self._nbytes = 0
        self._closed = False

    def submit(self, request: GenerationRequest, sink: OutputSink) -> str:
        return self._runner.submit(request, _CountedSink(sink, self.add))

    def add(self, nbytes: int) -> None:
        if not self._closed:
            self._nbytes += nbytes
            self._unread.add(self, nbytes)

    def taken(self, left: int) -> None:
        """Note that a message was taken to be sent; ``left`` bytes wait for the next ones."""
        sent, self._nbytes = self._nbytes - left, left
        self._unread.remove(self, sent)

    def close(self) -> None:
        self._closed = True
        self.taken(0)

    def overflowed(self) -> None:
        self.close()
        self._end_call(overflow())


class _CountedSink:
    __slots__ = ("_add", "_sink")

    def __init__(self, sink: OutputSink, add: Callable[[int], None]) -> None:
        self._sink = sink
        self._add = add

    def emit(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> None:
        self._sink.emit(token_ids, logprobs)
        self._add(output_bytes(token_ids, logprobs))

    def finish(self, finish: Finish) -> None:
        self._sink.finish(finish)
        self._add(logprob_bytes(finish.prompt_logprobs))

    def fail(self, error: ServingError) -> None:
        self._sink.fail(error)
