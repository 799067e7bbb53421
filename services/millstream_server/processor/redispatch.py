"""Choices that have lost their workers go on at others: docs/adr/0045.

What a choice has given out stays, and its text and events go on unbroken: only the request at a
worker is another one. Which way is right is in `processor.redispatch_ways`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from millstream_server.control.engine import Role
from millstream_server.generation.generator import GeneratorInfo
from millstream_server.generation.output import Finish, FinishReason
from millstream_server.generation.sampling import Ability
from millstream_server.processor.losses import (
    LOSSES,
    MOST_LOSSES,
    MOST_SUSPECTS,
    RepeatedLosses,
    counts,
    is_death,
    repeated_loss,
    was_leaving,
)
from millstream_server.processor.redispatch_ways import Lost, Way, way_of
from millstream_server.processor.successor import Loss, Successor
from millstream_server.routing.plan import Plan, RoutingRequest, weights_of
from millstream_server.routing.workers import info_of, known
from millstream_server.runtime.errors import KvTransferError, ServingError
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.telemetry.metrics import REDISPATCHES

if TYPE_CHECKING:
    from millstream_server.processor.choice import Choice
    from millstream_server.processor.leg import Leg
    from millstream_server.processor.turn import Turn
    from millstream_server.routing.workers import Candidate, WorkerView

log = get_log(__name__)

_LEAST_AT_ONCE = 8
_MOST_IN_ALL = 5
"""Losses of one request, counted against it or not: what kills late ends, too."""
_SHARE = 10
"""One in so many running requests may compute its prompt again at once."""
_LONGEST_S = 10.0
"""So long one of them counts at most: what waits must not wait for a worker that hangs."""


class Redispatcher:
    """Finds workers for choices that have lost theirs; one per process.

    At most a tenth of the running requests compute their prompt again at once, and at least 8. The
    others wait, in order, so that the workers that are left go on with their own tokens meanwhile.

    Of those whose worker has died one may be what ended it. Where more than 8 ran there, none is
    blamed, and 8 at a time compute their prompts elsewhere: a second death then counts against the
    few that it hits before their first token.
    """

    def __init__(
        self,
        plan: Callable[[RoutingRequest], Plan],
        running: Callable[[], int],
        repeated: RepeatedLosses,
    ) -> None:
        """``plan`` is `Router.plan`; ``running`` counts the requests that run."""
        self._plan = plan
        self._repeated = repeated
        self._running = running
        self._computing: dict[Successor, asyncio.TimerHandle] = {}
        self._waiting: deque[Successor] = deque()

    def take_over(self, turn: Turn, choice: Choice, leg: Leg, error: ServingError) -> bool:
        """Go on elsewhere with a choice whose ``leg`` has failed; False: ``error`` ends it."""
        before = choice.successor
        if not isinstance(error, LOSSES) or leg.place is None or (before and before.refused):
            return False
        if before is not None:
            self.computed(before)  # what it waited for may be the part that wasn't lost
        if (end := _missed_end(turn, choice)) is not None:
            choice.reopen(turn, before)
            choice.finish(end)
            return True
        blamed_at, losses, handoffs = _losses(before, error, leg.place.address)
        if max(len(blamed_at), handoffs) >= MOST_LOSSES or losses >= _MOST_IN_ALL:
            self._end(turn, error, blamed_at, losses)
            return True
        way = way_of(_lost(turn, choice, leg.place.worker))
        if way is None:
            self._count(turn, "refused")
            return False
        if not choice.received:
            way = Way.AGAIN  # there is nothing to continue
        weights = weights_of(leg.place.worker)
        if weights is None:  # never: it has run this request
            return False
        avoided = _avoided(choice, leg.place, error)
        loss = Loss(avoided, weights, error, blamed_at, losses, handoffs)
        successor = Successor(turn, choice, loss, way, self)
        choice.reopen(turn, successor)
        if way is Way.AGAIN:
            choice.drop()
        self._waiting.append(successor)
        self._begin()
        return True

    def _end(self, turn: Turn, error: ServingError, blamed_at: Sequence[str], losses: int) -> None:
        """End a turn that goes nowhere else: by its losses, or by hand-offs that failed."""
        repeated = len(blamed_at) >= MOST_LOSSES
        if not repeated and losses < _MOST_IN_ALL:
            self._count(turn, "refused")
            turn.fail(error)
            return
        self._count(turn, "repeated_loss")
        turn.fail(repeated_loss(losses))
        if repeated and is_death(error):
            self._repeated.add(turn.output.caller_key, turn.request)

    def computed(self, successor: Successor) -> None:
        """Let others begin: its prompt is computed, it is cancelled, or it has ended.

        They begin a moment later: a turn that is cancelled first takes back those that wait.
        """
        if (timer := self._computing.pop(successor, None)) is not None:
            timer.cancel()
            if self._waiting:
                asyncio.get_running_loop().call_soon(self._begin)

    def forget(self, successor: Successor) -> None:
        """Let it wait no longer."""
        if successor in self._waiting:
            self._waiting.remove(successor)

    def _begin(self) -> None:
        """Start those that wait, as far as there is room."""
        while self._waiting and len(self._computing) < self._most(self._waiting[0]):
            successor = self._waiting.popleft()
            loop = asyncio.get_running_loop()
            timer = loop.call_later(_LONGEST_S, self.computed, successor)
            self._computing[successor] = timer
            try:
                successor.start(self._plan)
            except ServingError as error:
                self.computed(successor)
                self._count(successor.turn, "no_worker")
                log.info(
                    "a choice can't go on elsewhere",
                    request=successor.turn.request.request_id,
                    reason=error.reason,
                )
                successor.give_up()
            else:
                self._count(successor.turn, successor.way.value.lower())

    def _most(self, successor: Successor) -> int:
        if is_death(successor.loss.error):
            return MOST_SUSPECTS
        return max(_LEAST_AT_ONCE, self._running() // _SHARE)

    @staticmethod
    def _count(turn: Turn, outcome: str) -> None:
        REDISPATCHES.labels(turn.request.model, outcome).inc()


def _avoided(choice: Choice, lost: Candidate, error: ServingError) -> tuple[str, ...]:
    """Return where a choice doesn't go next; of a failed hand-off where the prompt was, first."""
    ends = [choice.prompt.place, choice.place] if isinstance(error, KvTransferError) else [lost]
    return tuple(dict.fromkeys(place.address for place in ends if place)) or (lost.address,)


def _missed_end(turn: Turn, choice: Choice) -> Finish | None:
    """Return the end that the lost worker didn't come to tell; None: more is to come."""
    request, tokens = turn.request, choice.received
    sampling = request.sampling
    reason, matched = None, None
    if turn.cancelled:
        reason = FinishReason.CANCELLED
    elif not tokens or (request.logprobs is not None and request.logprobs.prompt):
        return None
    elif len(tokens) >= sampling.max_new_tokens:
        reason = FinishReason.LENGTH
    ends = () if sampling.ignore_eos else turn.text_model.eos_token_ids
    if reason is not FinishReason.CANCELLED and len(tokens) >= sampling.min_new_tokens:
        last = tokens[-1]
        if last in sampling.stop_token_ids or last in ends:
            reason, matched = FinishReason.STOP, last
    if reason is None:
        return None
    return Finish(
        reason=reason,
        prompt_tokens=len(request.prompt),
        completion_tokens=len(tokens),
        matched_token_id=matched,
    )


def _losses(
    before: Successor | None, error: ServingError, address: str
) -> tuple[tuple[str, ...], int, int]:
    """Return where losses count against the request, all of its losses, and failed hand-offs.

    A death counts where few requests ran, or where this one was among the few that computed their
    prompts again behind a death before. A worker that was leaving counts only if the request came
    no further there: else one that is refused everywhere would be sent around for ever.
    """
    blamed_at, lost, handoffs = (
        (before.loss.blamed_at, before.loss.count, before.loss.handoffs) if before else ((), 0, 0)
    )
    if isinstance(error, KvTransferError):
        return blamed_at, lost, handoffs + 1  # no worker has died of it
    no_further = before is not None and not before.has_tokens
    if was_leaving(error):
        blames = no_further
    else:
        one_of_few = before is not None and no_further and is_death(before.loss.error)
        blames = counts(error) or (one_of_few and is_death(error))
        lost += 1
    if blames and address not in blamed_at:
        blamed_at = (*blamed_at, address)
    return blamed_at, max(lost, len(blamed_at)), handoffs


def _lost(turn: Turn, choice: Choice, worker: WorkerView) -> Lost:
    description = known(worker)
    engine = info_of(description, GeneratorInfo)
    media = turn.media
    return Lost(
        request=turn.request,
        role=description.role if description else Role.AGGREGATED,
        engine=engine.engine if engine else "",
        seed=turn.seed,
        seed_is_clients="seed" in turn.options.sampling,
        given=bool(choice.token_ids),
        resumes=engine is not None and Ability.RESUMED_OUTPUT in engine.abilities,
        media_held=media is not None and not media.held_at,
    )
