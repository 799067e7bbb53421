"""What an open request counts for at the place where it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millstream_server.engines.base import Role
from millstream_server.generation.output import Finish, OutputSink, TokenLogprob
from millstream_server.generation.request import GenerationRequest
from millstream_server.routing.workers import Place, WorkerView
from millstream_server.runtime.errors import ServingError, WorkerLostError
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request in a slot of a worker's stream.

    It stands in for the request's sink until the first token, and then puts the sink in its place:
    later tokens take the same way as without it.
    """

    sinks: list[OutputSink | None]
    slot: int
    sink: OutputSink
    view: WorkerView
    place: Place
    """The view, or one of its ranks."""
    pending_tokens: int
    """Prompt tokens that are still to be computed there, as expected."""
    prompt_tokens: int
    """All of them."""
    cancelled: bool = False

    def begin(self) -> None:
        """Count it."""
        view, place = self.view, self.place
        view.in_flight += 1
        view.in_use += 1
        if place is not view:
            place.in_flight += 1
        place.pending_tokens += self.pending_tokens
        place.on_load(place)

    def end(self) -> None:
        """Count it no more."""
        view, place = self.view, self.place
        view.in_flight -= 1
        if not self.cancelled:
            view.in_use -= 1
        if place is not view:
            place.in_flight -= 1
        place.pending_tokens -= self.pending_tokens
        self.pending_tokens = 0
        place.on_load(place)

    def emit(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> None:
        """Pass the first tokens on: the prompt is computed."""
        self.sinks[self.slot] = self.sink
        place = self.place
        place.pending_tokens -= self.pending_tokens
        self.pending_tokens = 0
        place.on_load(place)
        self.sink.emit(token_ids, logprobs)

    def finish(self, finish: Finish) -> None:
        """Pass the end on."""
        self.sink.finish(finish)

    def fail(self, error: ServingError) -> None:
        """Pass the failure on."""
        self.sink.fail(error)


class _Discard:
    """The sink of a request that has failed here, until its worker ends it."""

    def emit(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> None:
        pass

    def finish(self, finish: Finish) -> None:
        pass

    def fail(self, error: ServingError) -> None:
        pass


DISCARD = _Discard()


def not_asked_for(worker: str, sent: str) -> WorkerLostError:
    """Log that a worker sent what was not asked for; return the failure of its request."""
    log.error("a worker sent what was not asked for", worker=worker, sent=sent)
    return WorkerLostError(
        "the worker sent something else than what was asked for; send the request again"
    )


def place_of(view: WorkerView, request: GenerationRequest) -> Place:
    """Return the rank that a request names, or the worker."""
    ranks = view.ranks
    return next((r for r in ranks if r.dp_rank == request.dp_rank), view) if ranks else view


def pending_tokens(role: Role, request: GenerationRequest) -> int:
    """Return how many prompt tokens a worker probably has to compute."""
    if role is Role.DECODE:
        return 0
    return max(len(request.prompt) - request.expected_cached_tokens, 1)
