"""Which failures say that a worker is lost, and how a request that it ran as a whole starts again.

What goes on in the middle of an answer is in `processor.redispatch`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

from millstream_server.control.engine import EngineInfo
from millstream_server.processor.redispatch_ways import Way
from millstream_server.runtime.errors import (
    EngineFailedError,
    KvTransferError,
    NoWorkerError,
    RepeatedLossError,
    ServingError,
    WorkerDrainingError,
    WorkerLostError,
)
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.telemetry.metrics import REDISPATCHES

if TYPE_CHECKING:
    from millstream_server.processor.front import Fit, FrontRequest
    from millstream_server.runtime.priority import Priority

log = get_log(__name__)

T = TypeVar("T")

LOSSES = (WorkerLostError, EngineFailedError, WorkerDrainingError, KvTransferError)
"""The request no longer runs at its worker. One that is slow, silent or paused still runs it."""
MOST_LOSSES = 2
"""So many workers lost on one request, one after the other, end it."""


_OUTCOMES = (*(way.value.lower() for way in Way), "refused", "no_worker", "repeated_loss")


def count_from_zero(models: Iterable[str]) -> None:
    """Make the series of every outcome: a rate needs the zero before the first loss."""
    for model in models:
        for outcome in _OUTCOMES:
            REDISPATCHES.labels(model, outcome)


def was_leaving(error: ServingError) -> bool:
    """Return whether a worker was lost because it shuts down: not by what it ran."""
    return isinstance(error, WorkerDrainingError) or (
        isinstance(error, WorkerLostError) and error.was_leaving
    )


def repeated_loss(workers: int) -> RepeatedLossError:
    """Make the error of a request that may be what ends workers."""
    return RepeatedLossError(
        f"{workers} workers were lost, one after the other, while they ran this request: it may be "
        "what ends them, so it is not sent to another one"
    )


def begins_again(model: str, address: str, error: ServingError) -> None:
    """Count and log that a request starts again elsewhere, since ``error`` lost its worker."""
    REDISPATCHES.labels(model, "again").inc()
    log.info("a request starts again elsewhere", lost=address, reason=error.reason)


def told_of(model: str, before: ServingError, error: ServingError) -> ServingError:
    """Return what the client is told of a failure behind a first loss, ``before``."""
    if isinstance(error, NoWorkerError):
        REDISPATCHES.labels(model, "no_worker").inc()
        return before
    if not isinstance(error, LOSSES) or was_leaving(before) or was_leaving(error):
        return error
    REDISPATCHES.labels(model, "repeated_loss").inc()
    return repeated_loss(MOST_LOSSES)


async def run_on_a_worker(
    asked: FrontRequest,
    fit: Fit,
    priority: Priority,
    attempt: Callable[[str, EngineInfo], Awaitable[T]],
) -> T:
    """Call ``attempt`` with a worker's address and engine; once more if this worker is lost.

    Not if something was given to the client (`FrontRequest.given`), or no other worker is there.

    Raises:
        ServingError: it failed.
    """
    address, engine = asked.pick(fit, priority)
    try:
        return await attempt(address, engine)
    except LOSSES as error:
        if asked.given or not asked.may_start_again:
            raise
        try:
            other, engine = asked.pick(fit, priority, avoid=address)
        except NoWorkerError as none:
            raise told_of(asked.model, error, none) from None
        asked.lost(error)
        begins_again(asked.model, address, error)
        before = error
    try:
        return await attempt(other, engine)
    except LOSSES as error:
        told = told_of(asked.model, before, error)
        if told is error:
            raise
        raise told from error
