"""The workers a Processor knows, and the route a request takes through them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from millstream_server.engines.base import Ability, EngineInfo, Role
from millstream_server.routing.policy import Policy
from millstream_server.runtime.errors import NoWorkerError
from millstream_server.runtime.tls import ClientTls
from millstream_server.runtime.tracing import Tracing
from millstream_server.worker_stream.client import WorkerConnection
from millstream_server.worker_stream.description import WorkerDescription


@dataclass(frozen=True, slots=True)
class Route:
    """Where one request runs: on ``decode`` alone, or with its prompt on ``prefill``."""

    decode: WorkerConnection
    prefill: WorkerConnection | None = None


@dataclass(frozen=True, slots=True)
class _Fleet:
    """One model's connected workers, as of the last change."""

    by_role: Mapping[Role, Sequence[WorkerConnection]]
    engine: EngineInfo | None
    leaving: Sequence[WorkerConnection] = ()
    """Workers that end what they run and take nothing more, or are away."""

    @property
    def disaggregated(self) -> bool:
        return bool(self.by_role[Role.PREFILL] and self.by_role[Role.DECODE])

    @property
    def answering(self) -> Sequence[WorkerConnection]:
        """Those that new requests' tokens come from; none while a role is missing."""
        return self.by_role[Role.DECODE if self.disaggregated else Role.AGGREGATED]


class WorkerPool:
    """Static discovery: a fixed list of addresses, each kept connected as long as it answers."""

    def __init__(
        self,
        addresses: Sequence[str],
        make_policy: Callable[[], Policy],
        on_change: Callable[[], None],
        *,
        tls: ClientTls | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """Know ``addresses``; each role picks by a policy of its own."""
        self._on_change = on_change
        self._connections = [
            WorkerConnection(address, self._changed, tls=tls, tracing=tracing)
            for address in sorted(set(addresses))
        ]
        self._policies = {role: make_policy() for role in Role}
        self._tasks: list[asyncio.Task[None]] = []
        self._fleets: dict[str, _Fleet] = {}
        self._known: dict[WorkerConnection, WorkerDescription] = {}
        """What each worker was when it was last connected."""
        self._watchers: list[Callable[[], None]] = []

    def open(self) -> None:
        """Start connecting."""
        self._tasks = [asyncio.ensure_future(c.run()) for c in self._connections]

    async def close(self) -> None:
        """Disconnect; requests still open fail."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def connected(self, model: str) -> dict[Role, int]:
        """Count a model's connected workers by role."""
        workers = self._fleet(model).by_role
        return {role: len(found) for role, found in workers.items() if found}

    def ready(self, model: str) -> bool:
        """Tell whether every role that a request needs is there."""
        return bool(self._fleet(model).answering)

    def watch(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called whenever a worker came or went."""
        self._watchers.append(callback)

    def capacity(self, model: str) -> int:
        """Count the requests that a model's workers run at once; 0 when a needed role is missing.

        A worker that drains counts with what it still runs: those hold no place on the others. What
        was cancelled there has given its place back, even if the worker never ends it.
        """
        fleet = self._fleet(model)
        running = sum(
            connection.description.engine.max_running_requests
            for connection in fleet.answering
            if connection.description
        )
        return running and running + sum(connection.in_use for connection in fleet.leaving)

    def require(self, model: str) -> None:
        """See that a request could be routed now.

        Raises:
            NoWorkerError: a role that it takes has no worker.
        """
        fleet = self._fleet(model)
        if not fleet.answering:
            missing = "prefill" if fleet.by_role[Role.DECODE] else "decode"
            raise NoWorkerError(
                f"no {missing} worker for this model is connected; retry in a moment",
                retry_delay_s=1.0,
            )

    def engine(self, model: str) -> EngineInfo | None:
        """Describe the engine that limits requests for a model, None without workers."""
        return self._fleet(model).engine

    def route(self, model: str, preferred: Route | None = None) -> Route:
        """Pick the workers for a request: a prefill and a decode worker, or an aggregated one.

        Raises:
            NoWorkerError: a role that it takes has no worker.
        """
        self.require(model)
        fleet = self._fleet(model)
        decode = preferred.decode if preferred else None
        prefill = preferred.prefill if preferred else None
        if fleet.disaggregated:
            return Route(
                decode=self._pick(fleet, Role.DECODE, decode),
                prefill=self._pick(fleet, Role.PREFILL, prefill),
            )
        return Route(decode=self._pick(fleet, Role.AGGREGATED, decode))

    def _pick(
        self, fleet: _Fleet, role: Role, preferred: WorkerConnection | None
    ) -> WorkerConnection:
        candidates = fleet.by_role[role]
        if len(candidates) == 1:
            return candidates[0]
        return self._policies[role].pick(candidates, preferred)

    def _changed(self) -> None:
        self._fleets.clear()
        for connection in self._connections:
            if connection.description:
                self._known[connection] = connection.description
        self._on_change()
        for callback in self._watchers:
            callback()

    def _fleet(self, model: str) -> _Fleet:
        """Look a served model's workers up; counted anew only after one came or went."""
        fleet = self._fleets.get(model)
        if fleet is None:
            workers: dict[Role, list[WorkerConnection]] = {role: [] for role in Role}
            for connection in self._connections:
                description = connection.description
                if description and description.model == model:
                    workers[description.role].append(connection)
            leaving = [
                connection
                for connection, known in self._known.items()
                if not connection.description
                and known.model == model
                and known.role is not Role.PREFILL
            ]
            fleet = self._fleets[model] = _Fleet(workers, _limits(workers), leaving)
        return fleet


def _limits(workers: Mapping[Role, Sequence[WorkerConnection]]) -> EngineInfo | None:
    """Join what a model's engines can do to what a request may ask for."""
    engines = {
        role: [c.description.engine for c in found if c.description]
        for role, found in workers.items()
    }
    aggregated = engines[Role.AGGREGATED]
    prompts = aggregated + engines[Role.PREFILL]
    tokens = aggregated + engines[Role.DECODE]
    if not (prompts or tokens):
        return None
    abilities = frozenset.intersection(*(e.abilities for e in tokens or prompts))
    # Prompt logprobs are the business of those that run prompts, all else of those that draw.
    if all(Ability.PROMPT_LOGPROBS in engine.abilities for engine in prompts or tokens):
        abilities |= {Ability.PROMPT_LOGPROBS}
    shortest = min(prompts + tokens, key=lambda engine: engine.context_length)
    return replace(shortest, abilities=abilities)
