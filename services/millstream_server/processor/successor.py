"""What stands in for a choice's lost worker: its request elsewhere, and what comes of it."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from millstream_server.generation.output import Finish, FinishReason, TokenLogprob
from millstream_server.generation.request import GenerationRequest, Prompt
from millstream_server.generation.sampling import new_seed
from millstream_server.processor.dispatch import Dispatch
from millstream_server.processor.redispatch_ways import DRAWS_BY_POSITION, Way
from millstream_server.routing.plan import Plan, RoutingRequest, Weights
from millstream_server.runtime.errors import (
    InvalidRequestError,
    ReplayDifferedError,
    ServingError,
)
from millstream_server.runtime.frozen import changed, dataclass
from millstream_server.runtime.telemetry.log import get_log

if TYPE_CHECKING:
    from millstream_server.processor.choice import Choice
    from millstream_server.processor.redispatch import Redispatcher
    from millstream_server.processor.turn import Turn

log = get_log(__name__)


@dataclass(frozen=True, slots=True)
class Redispatched:
    """A choice that went on at another worker."""

    index: int
    tokens: int
    """How many it had."""
    reason: str
    """Of the failure."""
    way: Way


@dataclass(frozen=True, slots=True)
class Loss:
    """How a choice lost its worker."""

    avoid: tuple[str, ...]
    """Where it doesn't go next: of a hand-off that failed either end can be the cause. If there are
    no other workers for it, one of them is avoided, the first that leaves some."""
    weights: Weights
    """The worker's: a restarted one may have others."""
    error: ServingError
    """What the choice would have ended with."""
    blamed_at: tuple[str, ...]
    """Where losses count against the request."""
    count: int
    """Workers that it has lost so far, one after the other, but for those that were leaving."""
    handoffs: int
    """Hand-offs of it that have failed."""


class Successor:
    """The sink of a choice that goes on; before `start` also its `leg.Running`.

    Of a replay it drops the tokens that the choice has, which must come again.
    """

    __slots__ = ("_choice", "_queue", "_replayed", "_tokens", "_waits", "has_tokens", "loss",
                 "refused", "turn", "way")  # fmt: skip

    def __init__(
        self, turn: Turn, choice: Choice, loss: Loss, way: Way, queue: Redispatcher
    ) -> None:
        """Wait until ``queue`` starts it."""
        self.turn = turn
        self.loss = loss
        self.way = way
        self.has_tokens = False
        """Whether the new worker has sent any."""
        self.refused = False
        """It can't go on: the error that it was made for ends the choice."""
        self._choice = choice
        self._queue = queue
        self._tokens = array("I") if way is Way.AGAIN else choice.received
        self._replayed = 0 if way is Way.REPLAY else len(self._tokens)
        """How many of these have come again; all, if none is to."""
        self._waits = True

    # ---- to the workers

    def start(self, plan: Callable[[RoutingRequest], Plan]) -> None:
        """Send the request to other workers, as ``plan`` finds them.

        Raises:
            ServingError: there are none.
        """
        self._waits = False
        turn, choice, tokens, loss = self.turn, self._choice, self._tokens, self.loss
        request = turn.request
        resumes = self.way is Way.CONTINUE_WITH_STATE
        if resumes or self.way is Way.CONTINUE:
            request = _continued(request, tokens, resumed=len(tokens) if resumes else 0)
        asked = changed(
            turn.routed(turn.workers),
            {"token_ids": request.token_ids, "weights": loss.weights, "resumes": resumes},
        )
        found = _planned(plan, asked, loss.avoid)
        Dispatch(request, found, turn.parts.ticket_key, self._seed).start(choice, turn.media)
        turn.workers = found.places
        reason = loss.error.reason
        done = Redispatched(choice.index, len(tokens), reason, self.way)
        turn.redispatches = (*turn.redispatches, done)
        log.info(
            "a choice goes on elsewhere",
            request=request.request_id,
            choice=choice.index,
            tokens=len(tokens),
            lost=loss.avoid[0],
            reason=reason,
            way=self.way.value,
        )

    @property
    def _seed(self) -> int | None:
        """Choice 0's. A generator that begins anew with the client's text would repeat itself."""
        seed, engine = self.turn.seed, self.loss.weights.engine
        continues = bool(self._tokens) and self.way is not Way.REPLAY
        as_before = seed is None or engine in DRAWS_BY_POSITION or not continues
        return seed if as_before else new_seed()

    def give_up(self) -> None:
        """End the choice with the error of its lost worker."""
        self.refused = True
        self._choice.reopen(self.turn, self)
        self._choice.fail(self.loss.error)

    # ---- from the choice

    def cancel(self) -> None:
        """End the choice if it waits to be started; the worker ends it else."""
        self._queue.computed(self)
        if self._waits:
            self.abandon()
            self._choice.finish(
                Finish(
                    reason=FinishReason.CANCELLED,
                    prompt_tokens=len(self.turn.request.prompt),
                    completion_tokens=len(self._tokens),
                )
            )

    def abandon(self) -> None:
        self._waits = False
        self._queue.forget(self)

    # ---- from the worker

    def emit(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> None:
        """Pass tokens on; of a replay only those that the choice doesn't have."""
        if not self.has_tokens:
            self.has_tokens = True
            self._queue.computed(self)
        if self._replayed < len(self._tokens):
            expected = self._tokens[self._replayed : self._replayed + len(token_ids)]
            count = len(expected)
            if list(token_ids[:count]) != expected.tolist():
                self._differs()
                return
            self._replayed += count
            token_ids, logprobs = token_ids[count:], logprobs[count:]
            if not token_ids:
                return
        self._choice.emit(token_ids, logprobs)

    def finish(self, finish: Finish) -> None:
        self._queue.computed(self)
        if self._replayed < len(self._tokens) and finish.reason is not FinishReason.CANCELLED:
            self._differs()
        else:
            self._choice.finish(finish)

    def fail(self, error: ServingError) -> None:
        self._queue.computed(self)
        if isinstance(error, InvalidRequestError):  # what was right for the first worker
            self.give_up()
        else:
            self._choice.fail(error)

    def _differs(self) -> None:
        choice = self._choice
        choice.reopen(self.turn, self)
        choice.fail(
            ReplayDifferedError(
                f"the worker was lost after {len(self._tokens)} tokens, and another one, which ran "
                f"the request again, drew another token after {self._replayed} of them; send it "
                "again"
            )
        )


def _planned(
    plan: Callable[[RoutingRequest], Plan], asked: RoutingRequest, avoid: Sequence[str]
) -> Plan:
    tried = [avoid, *((address,) for address in avoid)] if len(avoid) > 1 else [avoid]
    *first, last = tried
    for addresses in first:
        with contextlib.suppress(ServingError):
            return plan(changed(asked, {"avoid": addresses}))
    return plan(changed(asked, {"avoid": last}))


def _continued(
    request: GenerationRequest, tokens: Sequence[int], resumed: int
) -> GenerationRequest:
    """Return the request of what is missing after some tokens; see `resumed_tokens` there."""
    if not tokens:
        return request
    sampling, prompt, count = request.sampling, request.prompt, len(tokens)
    changes: dict[str, Any] = {
        "prompt": Prompt([*prompt.token_ids, *tokens], prompt.media),
        "resumed_tokens": resumed,
        "sampling": changed(
            sampling,
            {
                "max_new_tokens": sampling.max_new_tokens - count,
                "min_new_tokens": max(0, sampling.min_new_tokens - count),
            },
        ),
    }
    return changed(request, changes)
