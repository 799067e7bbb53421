"""Which failures say that a worker is lost, and how a request that it ran as a whole starts again.

What goes on in the middle of an answer is in `processor.redispatch`.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from array import array
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from millstream_server.control.engine import EngineInfo
from millstream_server.generation.request import GenerationRequest
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
from millstream_server.runtime.rpc.auth import caller
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.telemetry.metrics import REDISPATCHES, REPEATED_LOSSES_REFUSED

if TYPE_CHECKING:
    from millstream_server.processor.front import Fit, FrontRequest
    from millstream_server.runtime.priority import Priority

log = get_log(__name__)

T = TypeVar("T")

LOSSES = (WorkerLostError, EngineFailedError, WorkerDrainingError, KvTransferError)
"""The request no longer runs at its worker. One that is slow, silent or paused still runs it."""
MOST_LOSSES = 2
"""So many losses that count against a request, at different workers, end it."""
MOST_SUSPECTS = 8
"""Where a worker ran more requests when it died, its death counts against none of them."""
_KEPT, _KEPT_S = 1024, 600.0
_OF_ONE_CALL = frozenset(("request_id", "trace", "deadline_s", "priority", "seed"))


_OUTCOMES = (*(way.value.lower() for way in Way), "refused", "no_worker", "repeated_loss")


def count_from_zero(models: Iterable[str]) -> None:
    """Make the series of every outcome: a rate needs the zero before the first loss."""
    for model in models:
        REPEATED_LOSSES_REFUSED.labels(model)
        for outcome in _OUTCOMES:
            REDISPATCHES.labels(model, outcome)


def was_leaving(error: ServingError) -> bool:
    """Return whether a worker was lost because it shuts down: not by what it ran."""
    return isinstance(error, WorkerDrainingError) or (
        isinstance(error, WorkerLostError) and error.was_leaving
    )


def is_death(error: ServingError) -> bool:
    """Return whether a worker or its engine has died outside a drain: by what it ran, maybe."""
    return isinstance(error, WorkerLostError | EngineFailedError) and not was_leaving(error)


def counts(error: ServingError) -> bool:
    """Return whether a loss counts against the request: few others ran there."""
    others = error.open_requests if isinstance(error, WorkerLostError | EngineFailedError) else 0
    return is_death(error) and others <= MOST_SUSPECTS


class RepeatedLosses:
    """Requests that ended by a repeated loss: equal ones of the same caller are refused.

    Only hashes are kept, with a key of this process, the last 1,024 for 10 minutes each.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._until_s: OrderedDict[bytes, float] = OrderedDict()

    def add(self, caller: Hashable, request: Any) -> None:
        """Refuse what is equal to ``request`` from now on."""
        digest = self._digest(caller, request)
        self._until_s.pop(digest, None)
        self._until_s[digest] = time.monotonic() + _KEPT_S
        if len(self._until_s) > _KEPT:
            self._until_s.popitem(last=False)
        log.warning("equal requests are refused from now on", request=request.request_id)

    def check(self, caller: Hashable, request: Any) -> None:
        """Let a request pass that is equal to none of these.

        Raises:
            RepeatedLossError: it is equal to one.
        """
        if not self._until_s:
            return  # nearly always
        until_s = self._until_s.get(self._digest(caller, request))
        if until_s is None or until_s < time.monotonic():
            return
        REPEATED_LOSSES_REFUSED.labels(request.model).inc()
        log.caused("refused, as an equal request was", request=request.request_id)
        raise RepeatedLossError(
            f"{MOST_LOSSES} workers were lost while they ran an equal request of this caller: it "
            f"may be what ends them, so it is refused for {_KEPT_S / 60:.0f} minutes"
        )

    def _digest(self, caller: Hashable, request: Any) -> bytes:
        """Hash what a worker sees of a request, but for its seed."""
        found = hashlib.blake2b(key=self._key, digest_size=16)
        for part in (caller, *_content(request)):
            data = _bytes(part)
            found.update(b"%d:" % len(data))
            found.update(data)
        return found.digest()


def _content(request: Any) -> Iterator[Any]:
    if isinstance(request, GenerationRequest):
        yield request.token_ids
        yield [item.digest for item in request.prompt.media]
        yield replace(request.sampling, seed=None)
        yield request.model, request.adapter, request.logprobs
        return
    for name in request.__dataclass_fields__:
        if name not in _OF_ONE_CALL:
            yield getattr(request, name)


def _bytes(part: Any) -> bytes:
    if isinstance(part, bytes):
        return part
    if isinstance(part, str):
        return part.encode(errors="surrogatepass")
    if isinstance(part, Sequence):
        if part and isinstance(part[0], int):
            return array("I", part).tobytes()
        return b",".join([b"%d:%b" % (len(data), data) for data in map(_bytes, part)])
    return repr(part).encode()


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
    if not (counts(before) and counts(error)):
        return error
    REDISPATCHES.labels(model, "repeated_loss").inc()
    return repeated_loss(MOST_LOSSES)


async def run_on_a_worker(
    asked: FrontRequest,
    fit: Fit,
    request: Any,
    attempt: Callable[[str, EngineInfo], Awaitable[T]],
) -> T:
    """Call ``attempt`` with a worker's address and engine; once more if this worker is lost.

    ``request`` has the client's own words and a priority.

    Not if something was given to the client (`FrontRequest.given`), or no other worker is there.

    Raises:
        ServingError: it failed, or an equal one has lost two workers.
    """
    asked.front.repeated.check(caller().key, request)
    priority: Priority = request.priority
    address, engine = asked.pick(fit, priority)
    try:
        return await attempt(address, engine)
    except LOSSES as error:
        if asked.given or not asked.front.redispatch:
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
        asked.front.repeated.add(caller().key, request)
        raise told from error
