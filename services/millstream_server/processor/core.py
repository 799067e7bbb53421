"""The Processor's decisions: is the request valid, may it run now, which workers run it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from millstream_server.generation.request import (
    GenerationRequest,
)
from millstream_server.processor.caller import Caller
from millstream_server.processor.conversation import Conversation, Stoppable, UserTurn
from millstream_server.processor.limits import (
    DEFAULT_LIMITS,
    RequestLimits,
    most_tokens,
)
from millstream_server.processor.media.core import ProcessorMedia
from millstream_server.processor.models import Models
from millstream_server.processor.queue.admission import Admission, AdmissionRequest
from millstream_server.processor.queue.admission_queue import AdmissionQueue
from millstream_server.processor.requests import Completion, RequestBuilder
from millstream_server.processor.telemetry import (
    CHAT,
    TEXT_COMPLETION,
    GenerationTelemetry,
)
from millstream_server.processor.turn import Rendering, Turn, TurnParts
from millstream_server.routing.request import RoutingRequest
from millstream_server.routing.router import Router
from millstream_server.runtime.errors import (
    SERVER_FAULTS,
    InvalidRequestError,
    ServingError,
    UnavailableError,
)
from millstream_server.runtime.lifecycle.drain import OpenPiece, OpenWork
from millstream_server.runtime.rpc.call import Call
from millstream_server.runtime.telemetry.load_meter import LoadMeter
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)


class ProcessorCore:
    """The Processor's logic, in plain types; one per process."""

    def __init__(
        self,
        models: Models,
        router: Router,
        parts: TurnParts,
        *,
        telemetry: GenerationTelemetry | None = None,
        media: ProcessorMedia,
        limits: RequestLimits = DEFAULT_LIMITS,
    ) -> None:
        """Serve ``models`` on the workers that ``router`` picks."""
        self.models = models
        self.media = media
        self.work = OpenWork()
        self.meter = LoadMeter(self._utilization)
        self.router = router
        self.limits = limits
        self._requests = RequestBuilder(models, limits, media)
        self.telemetry = telemetry or GenerationTelemetry()
        self._parts = parts
        self.queues = {name: _queue(name, router, limits) for name in models.names}
        """Of each model."""

    def call(self, on_drain: Callable[[], None] | None = None) -> OpenPiece:
        """Count a streaming RPC as open during a ``with`` block.

        ``on_drain`` is called if the server begins to shut down.

        Raises:
            UnavailableError: this Processor is shutting down. Turns admitted before still run.
        """
        if self.work.refusing:
            raise UnavailableError(
                "this server is shutting down; retry on another one", retry_delay_s=0.1
            )
        return self.work.track(on_drain)

    # ---- from a request to a running turn --------------------------------------------------------

    async def answer(
        self,
        conversation: Conversation,
        asked: UserTurn,
        caller: Caller,
        call: Call,
        rendering: Rendering,
    ) -> Turn:
        """Start a turn of ``conversation``, whose messages ``rendering`` makes for ``call``.

        Raises:
            ServingError: it was refused.
        """
        telemetry = self.telemetry.open(CHAT, caller.trace, conversation.number)
        options, media = conversation.options, None
        with telemetry:
            try:
                request, media = await self._requests.of_turn(
                    conversation, asked, caller, telemetry
                )
                admission = await self._admit(request, options.n, conversation.runs)
            except BaseException as error:
                if media:
                    media.release()
                self._refused(error)
                raise
            if media and media.cancelled:
                admission.leave()  # the turn then ends without having started
            _, text = self.models.text(request.model)
            turn = Turn(
                request,
                options,
                text,
                admission,
                self._parts,
                call=call,
                rendering=rendering,
                telemetry=telemetry,
                media=media,
            )
            held_at = media.held_at if media else ""
            self._launch(turn, admission, conversation.workers, held_at)
        conversation.runs(turn)
        return turn

    async def complete(
        self, completion: Completion, caller: Caller, call: Call, rendering: Rendering
    ) -> Turn:
        """Start a completion, whose messages ``rendering`` makes for ``call``.

        Raises:
            ServingError: it was refused.
        """
        telemetry = self.telemetry.open(TEXT_COMPLETION, caller.trace)
        options = completion.options
        with telemetry:
            try:
                request = await self._requests.of_completion(completion, caller, telemetry)
                admission = await self._admit(request, options.n, lambda _: None)
            except BaseException as error:
                self._refused(error)
                raise
            _, text = self.models.text(request.model)
            turn = Turn(
                request,
                options,
                text,
                admission,
                self._parts,
                call=call,
                rendering=rendering,
                telemetry=telemetry,
                continuation=True,
            )
            self._launch(turn, admission)
            return turn

    async def _admit(
        self, request: GenerationRequest, n: int, runs: Callable[[Stoppable], None]
    ) -> Admission:
        """Admit a checked request: at once if there is capacity, else after waiting.

        ``runs`` is called with an admission that waits. If it is cancelled then, the returned one
        doesn't run. A shutdown refuses nothing here: `call` and `Conversation` refuse late
        requests. When the last worker is lost while requests wait, they wait on for
        `QueueLimits.comeback_s`, and run in order after a reconnect; new requests get NO_WORKER at
        once, so that their clients can use another server.

        Raises:
            UnavailableError: a worker that it needs isn't connected.
            OverloadedError: the queue is full.
            DeadlinePassedError: the caller's deadline passed while it waited.
        """
        self.router.require(request.model)
        admission = self.queues[request.model].enter(
            AdmissionRequest(
                units=n,
                tokens=most_tokens(request, n),
                priority=request.priority,
                timeout_s=request.time_left_s,
            )
        )
        if admission.waits:
            try:
                runs(admission)
                await admission.admitted()
            except BaseException:
                admission.leave()
                raise
        return admission

    def _launch(
        self,
        turn: Turn,
        admission: Admission,
        session: tuple[str, ...] = (),
        media_at: str = "",
    ) -> None:
        """Route an admitted turn and start it on its workers, without awaiting.

        Raises:
            UnavailableError: a worker it takes is away.
        """
        request = turn.request
        try:
            if not admission.runs:  # cancelled while it waited
                turn.end_unstarted()
                return
            turn.start(
                self.router.plan(
                    RoutingRequest(
                        model=request.model,
                        token_ids=request.token_ids,
                        media_start=request.prompt.media_start,
                        session=session,
                        media_at=media_at,
                        session_key=turn.options.session,
                        adapter=request.adapter,
                        cache_salt=request.cache_salt,
                        priority=request.priority,
                    )
                )
            )
        except BaseException as error:
            if isinstance(error, ServingError):
                turn.fail(error)
            self.end(turn)
            raise

    def _refused(self, error: BaseException) -> None:
        """Count a refusal before there is a `Turn`; invalid requests don't count."""
        if isinstance(error, ServingError) and not isinstance(error, InvalidRequestError):
            self.meter.finished(failed=error.code in SERVER_FAULTS)

    def end(self, turn: Turn) -> None:
        """Close a turn in any state, and log the turn in one line, without its text."""
        turn.close()
        error, usage, request = turn.error, turn.usage(), turn.request
        self.meter.finished(failed=error is not None and error.code in SERVER_FAULTS)
        # Who only starts and cancels gets no line each.
        write = log.info if usage.completion_tokens or turn.complete else log.caused
        seed: dict[str, Any] = {} if turn.seed is None else {"seed": turn.seed}
        write(
            "turn ended",
            request=request.request_id,
            trace_id=turn.telemetry.trace_id,
            model=request.model,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            media_tokens=usage.media_tokens,
            completion_tokens=usage.completion_tokens,
            **seed,
            outcome=turn.outcome,
        )

    def _utilization(self) -> float:
        return max((queue.utilization for queue in self.queues.values()), default=0.0)


def _queue(model: str, router: Router, limits: RequestLimits) -> AdmissionQueue:
    queue = AdmissionQueue(model, limits.queue, lambda: router.capacity(model))
    router.watch(queue.changed)
    return queue
