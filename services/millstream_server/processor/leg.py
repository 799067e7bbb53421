"""A leg of a turn: one request on one worker, and where its end goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from millstream_server.generation.output import Finish, FinishReason, OutputSink, TokenLogprob
from millstream_server.generation.request import GenerationRequest
from millstream_server.processor.telemetry import NO_SPAN, RequestSpan
from millstream_server.runtime.errors import InvalidRequestError, KvTransferError, ServingError
from millstream_server.runtime.frozen import changed
from millstream_server.runtime.telemetry.log import get_log

if TYPE_CHECKING:
    from millstream_server.processor.turn import Turn
    from millstream_server.routing.plan import PlannedLeg
    from millstream_server.routing.workers import Candidate


log = get_log(__name__)


class Running(Protocol):
    """A request on a worker (`links.slot_stream.OpenRequest`)."""

    def cancel(self) -> None:
        """Stop it, at any time, also twice and after the end."""
        ...

    def abandon(self) -> None:
        """Cancel it; what still comes of it, its end included, goes nowhere."""
        ...


class Workers(Protocol):
    """Runs requests on workers (`links.fleet.Fleet`)."""

    def generate(self, address: str, request: GenerationRequest, sink: OutputSink) -> Running:
        """Start a request on a worker.

        Raises:
            WorkerLostError: the worker isn't connected.
        """
        ...


class _NoTurn:
    """Takes the place of the turn, and of its output, in a leg that is over.

    What still comes has no effect.
    """

    gathers = False
    media = None
    scheduled = True

    @property
    def output(self) -> _NoTurn:
        return self

    def leg_ended(self, leg: Leg) -> None:
        pass


_NO_TURN: Any = _NoTurn()


class Leg:
    """One request on one worker; an `OutputSink`. By itself the prompt's of a hand-off.

    When it is over, it forgets its turn and its worker's request, which both know it: else all that
    they hold would stay until the next garbage collection.
    """

    __slots__ = ("_running", "error", "place", "result", "span", "turn")

    def __init__(self, turn: Turn) -> None:
        """Belong to ``turn``; nothing is started yet."""
        self.turn = turn
        self._running: Running | None = None
        self.place: Candidate | None = None
        """Where it was started last; None: nowhere yet."""
        self.span: RequestSpan = NO_SPAN
        self.result: Finish | None = None
        self.error: ServingError | None = None

    def start(
        self, planned: PlannedLeg, request: GenerationRequest, changes: dict[str, Any]
    ) -> None:
        """Run ``request`` with ``changes`` where it is planned.

        Raises:
            WorkerLostError: the worker isn't connected.
        """
        turn, address = self.turn, planned.place.address
        self.place = planned.place
        self.span = span = turn.telemetry.leg(planned.role, address)
        if planned.place.dp_rank is not None or planned.cached_tokens:
            changes["dp_rank"] = planned.place.dp_rank
            changes["expected_cached_tokens"] = planned.cached_tokens
        trace = span.carry(request.trace)
        if trace is not request.trace:
            changes["trace"] = trace
        try:
            self._running = turn.parts.workers.generate(
                address, changed(request, changes) if changes else request, self.sink
            )
        except ServingError as error:
            span.failed(error)
            raise

    def cancel(self) -> None:
        """Cancel at the worker; may be called at any time."""
        if self._running is not None:
            self._running.cancel()

    def abandon(self) -> None:
        """Stop it at the worker, and take nothing more from there."""
        running, self._running, self.turn = self._running, None, _NO_TURN
        if running is not None:
            running.abandon()
            self.span.ended(cancelled=True)

    def lose(self, error: ServingError) -> None:
        """Stop it at the worker, and fail it as the worker would."""
        if self._running is not None:
            self._running.abandon()
        self.sink.fail(error)

    @property
    def sink(self) -> OutputSink:
        """Where its worker's output goes."""
        return self

    @property
    def over(self) -> bool:
        return self.result is not None or self.error is not None

    def emit(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> None:
        """Drop a token of the prompt's leg: the other one sends it, too."""

    # The span comes last: if telemetry fails, the end has been reported.
    def finish(self, finish: Finish) -> None:
        """Keep the worker's good end."""
        self.result = finish
        self._ended()
        self.span.ended(cancelled=finish.reason is FinishReason.CANCELLED)

    def fail(self, error: ServingError) -> None:
        span = self.span
        self.error = error = self._not_the_clients(error)
        self._ended()  # it may be started elsewhere, with another span
        span.failed(error)

    def _not_the_clients(self, error: ServingError) -> ServingError:
        """Return a refused ticket as a failed hand-off: this server made it, and not the client."""
        found = error.violations if isinstance(error, InvalidRequestError) else ()
        refused = [each for each in found if each.field.startswith("ticket.")]
        if not refused:
            return error
        log.error(
            "a worker refuses this server's tickets; do their clocks and keys agree?",
            worker=self.place.address if self.place else "",
            reason=f"{refused[0].field} {refused[0].description}",
        )
        return KvTransferError("a worker refused the hand-off's ticket; send the request again")

    def _ended(self) -> None:
        turn, self.turn, self._running = self.turn, _NO_TURN, None
        turn.leg_ended(self)
