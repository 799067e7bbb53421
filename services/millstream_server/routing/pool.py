"""The workers a Processor knows, and the route a request takes through them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from millstream_server.engines.base import Ability, EngineInfo, Role
from millstream_server.routing.policy import Policy
from millstream_server.runtime.errors import NoWorkerError
from millstream_server.worker_stream.client import WorkerConnection


@dataclass(frozen=True, slots=True)
class Route:
    """Where one request runs: on ``decode`` alone, or with its prompt on ``prefill``."""

    decode: WorkerConnection
    prefill: WorkerConnection | None = None


class WorkerPool:
    """Static discovery: a fixed list of addresses, each kept connected as long as it answers."""

    def __init__(
        self,
        addresses: Sequence[str],
        make_policy: Callable[[], Policy],
        on_change: Callable[[], None],
    ) -> None:
        """Know ``addresses``; each role picks by a policy of its own."""
        self._connections = [WorkerConnection(address, on_change) for address in addresses]
        self._policies = {role: make_policy() for role in Role}
        self._tasks: list[asyncio.Task[None]] = []

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

    def connected(self, model: str) -> Counter[Role]:
        """Count a model's connected workers by role."""
        return Counter(
            c.description.role
            for c in self._connections
            if c.description and c.description.model == model
        )

    def models(self) -> set[str]:
        """Name the models that connected workers serve."""
        return {c.description.model for c in self._connections if c.description}

    def ready(self, model: str) -> bool:
        """Tell whether every role that a request needs is there."""
        roles = self.connected(model)
        return bool(roles[Role.AGGREGATED] or (roles[Role.PREFILL] and roles[Role.DECODE]))

    def engine(self, model: str) -> EngineInfo | None:
        """Describe the engine that limits requests for a model, None without workers."""
        workers = [
            c.description
            for c in self._connections
            if c.description and c.description.model == model
        ]
        if not workers:
            return None
        prompts = [w.engine for w in workers if w.role is not Role.DECODE]
        tokens = [w.engine for w in workers if w.role is not Role.PREFILL]
        abilities = frozenset.intersection(*(e.abilities for e in tokens or prompts))
        # Prompt logprobs are the business of those that run prompts, all else of all.
        if all(Ability.PROMPT_LOGPROBS in engine.abilities for engine in prompts or tokens):
            abilities |= {Ability.PROMPT_LOGPROBS}
        return replace(
            min((w.engine for w in workers), key=lambda engine: engine.context_length),
            abilities=abilities,
        )

    def route(self, model: str, preferred: Route | None = None) -> Route:
        """Pick the workers for a request: a prefill and a decode worker, or an aggregated one.

        Raises:
            NoWorkerError: a role that it takes has no worker.
        """
        roles = self.connected(model)
        if roles[Role.PREFILL] and roles[Role.DECODE]:
            return Route(
                decode=self._pick(model, Role.DECODE, preferred.decode if preferred else None),
                prefill=self._pick(model, Role.PREFILL, preferred.prefill if preferred else None),
            )
        if roles[Role.AGGREGATED]:
            return Route(
                decode=self._pick(model, Role.AGGREGATED, preferred.decode if preferred else None)
            )
        missing = next(
            (r.value for r in (Role.PREFILL, Role.DECODE) if not roles[r] and roles.total()),
            "decode",
        )
        raise NoWorkerError(
            f"no {missing} worker for this model is connected; retry in a moment", retry_delay_s=1.0
        )

    def _pick(self, model: str, role: Role, preferred: WorkerConnection | None) -> WorkerConnection:
        candidates = [
            c
            for c in self._connections
            if c.description and c.description.role is role and c.description.model == model
        ]
        return self._policies[role].pick(candidates, preferred)
