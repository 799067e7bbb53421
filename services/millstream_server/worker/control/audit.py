"""One line in the log for each call of an operator: who, what, with what result, how long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from millstream_server.runtime.errors import ServingError
from millstream_server.runtime.security.auth import CallerIdentity, CallerKind
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """A call of an operator."""

    operation: str
    """Name of the RPC."""
    caller: CallerIdentity
    arguments: Mapping[str, Any]
    """What the log may show of the request."""
    changes: bool = True
    """Whether it is more than a look."""


class Audit:
    """Runs calls and logs each when it has ended, which may be after its caller has gone."""

    def __init__(self) -> None:
        """Run none yet."""
        self._running: set[asyncio.Task[Any]] = set()

    def start(self, action: Action, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run ``work`` in a task of its own; cancel the task when the caller goes away."""
        began_s = time.monotonic()
        task = asyncio.create_task(work)
        self._running.add(task)

        def ended(_: asyncio.Task[T]) -> None:
            self._running.discard(task)
            _log(action, task, time.monotonic() - began_s)

        task.add_done_callback(ended)
        return task


def _log(action: Action, task: asyncio.Task[Any], took_s: float) -> None:
    caller = action.caller
    write = log.action if action.changes else log.info
    write(
        "operator action",
        operation=action.operation,
        caller=caller.name if caller.kind is CallerKind.CERTIFICATE else "local",
        outcome=_outcome(task),
        took_s=round(took_s, 3),
        caller_gone=bool(task.cancelling()),
        **action.arguments,
    )


def _outcome(task: asyncio.Task[Any]) -> str:
    if task.cancelled():
        return "undone"
    error = task.exception()
    if error is None:
        return "done"
    return error.reason if isinstance(error, ServingError) else "INTERNAL"
