"""Workers in virtual time, with the simulated engine's real prefix cache, and the real router.

A worker computes one prompt after the other and generates all answers meanwhile, which slows it
down. Blocks of a prompt are cached when it is computed, those of an answer at its end; the events
reach the router some time later. It is deterministic.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from millstream_server.control.engine import EngineLoad, RankLoad
from millstream_server.engines.simulated.prefix_cache import HeldBlocks, PrefixCache
from millstream_server.kv_cache.events import KvEvent
from millstream_server.routing.kv_aware import make_policy
from millstream_server.routing.plan import RoutingRequest
from millstream_server.routing.policy import (
    BestOfTwo,
    PolicyName,
    RoutingPolicy,
)
from millstream_server.routing.prefix.prefixes import REQUEST_TOKENS, Prefixes
from millstream_server.routing.router import Router
from millstream_server.routing.workers import Candidate, WorkerView
from tests.support.processor.routing_traffic import BLOCK_SIZE, Arrival
from tests.support.processor.views import view

ORACLE = "oracle"
_MODEL = "m"
_TOKENS_PER_S = 10_000
_PROMPT_S = 0.005
_TOKEN_S = 0.02
_MOST_RUNNING = 64
_CACHE_BLOCKS = 6_000
_EVENT_DELAY_S = 0.02
_REPORT_S = 1.0
_DRAIN_S = 120.0


class Clock:
    """Virtual time: what happens when."""

    def __init__(self) -> None:
        """Start at 0."""
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Plan an action."""
        heapq.heappush(self._due, (self.now + seconds, next(self._numbers), action))

    def run(self, until_s: float) -> None:
        """Do all that is planned up to a time."""
        while self._due and self._due[0][0] <= until_s:
            self.now, _, action = heapq.heappop(self._due)
            action()


@dataclass(slots=True)
class Job:
    """A request on a worker."""

    arrival: Arrival
    expected: int
    """Prompt tokens that the router expects to be computed."""
    uncached: int
    """Those that really will, as far as is known before it begins."""
    held: HeldBlocks | None = None


@dataclass(slots=True)
class Outcome:
    """What was measured."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    first_token_s: list[float] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        """Cached tokens of all prompts' tokens."""
        return self.cached_tokens / max(self.prompt_tokens, 1)

    def ttft_s(self, quantile: float) -> float:
        """Return a quantile of the time to the first token."""
        ordered = sorted(self.first_token_s)
        return ordered[min(int(quantile * len(ordered)), len(ordered) - 1)]


class SimulatedWorker:
    """One worker in virtual time."""

    def __init__(self, number: int, clock: Clock, outcome: Outcome, warm_s: float) -> None:
        """Start idle; requests that arrive before ``warm_s`` don't count."""
        self.view = view(
            f"worker{number:04}:1",
            block_size=BLOCK_SIZE,
            tells_kv=True,
            max_running_requests=_MOST_RUNNING,
        )
        self.cache = PrefixCache(_CACHE_BLOCKS)
        self.queue: deque[Job] = deque()
        """The first one is being computed if `_busy`."""
        self.ahead: Counter[int] = Counter()
        """Blocks of the prompts in the queue."""
        self.running = 0
        self._busy = False
        self._clock, self._outcome, self._warm_s = clock, outcome, warm_s

    @property
    def waiting_tokens(self) -> int:
        """Tokens of its queue that really are to be computed."""
        return sum(job.uncached for job in self.queue)

    def coming(self, arrival: Arrival) -> int:
        """Return how many tokens of a prompt will be cached once its queue is computed."""
        hashes = arrival.prompt_hashes
        blocks = self.cache.count_cached(hashes)
        while blocks < len(hashes) and self.ahead[hashes[blocks]]:
            blocks += 1
        return min(blocks * BLOCK_SIZE, len(arrival.prompt) - 1)

    def submit(self, arrival: Arrival, expected_cached: int) -> None:
        """Queue a request."""
        length = len(arrival.prompt)
        job = Job(arrival, length - expected_cached, length - self.coming(arrival))
        self._count(1, job.expected)
        self.queue.append(job)
        self.ahead.update(arrival.prompt_hashes)
        self._start()

    def report(self) -> None:
        """Report the load, and again after a while."""
        rank = RankLoad(
            running_requests=self.running + self._busy,
            queued_requests=len(self.queue) - self._busy,
            queued_tokens=sum(job.uncached for job in list(self.queue)[self._busy :]),
            used_blocks=0,
            total_blocks=1,
        )
        self.view.report(
            EngineLoad(
                running_requests=rank.running_requests,
                queued_requests=rank.queued_requests,
                used_blocks=0,
                total_blocks=1,
                ranks=(rank,),
            )
        )
        self._clock.after(_REPORT_S, self.report)

    def _start(self) -> None:
        if self._busy or not self.queue or self.running >= _MOST_RUNNING:
            return
        job = self.queue[0]
        arrival = job.arrival
        blocks = -(-(len(arrival.prompt) + len(arrival.answer)) // BLOCK_SIZE)
        job.held = self.cache.acquire(arrival.prompt_hashes, blocks)
        if job.held is None:
            return
        self._busy = True
        length = len(arrival.prompt)
        cached = min(job.held.cached * BLOCK_SIZE, length - 1)
        job.uncached = length - cached
        if arrival.at_s >= self._warm_s:
            self._outcome.prompt_tokens += length
            self._outcome.cached_tokens += cached
        slower = 1 + self.running / _MOST_RUNNING
        self._clock.after(
            _PROMPT_S + job.uncached / _TOKENS_PER_S * slower, lambda: self._computed(job)
        )

    def _computed(self, job: Job) -> None:
        arrival = job.arrival
        self.queue.popleft()
        self.ahead.subtract(arrival.prompt_hashes)
        self._busy = False
        self.running += 1
        assert job.held
        self.cache.store(job.held, arrival.prompt_hashes)
        self._count(0, -job.expected)
        if arrival.at_s >= self._warm_s:
            self._outcome.first_token_s.append(self._clock.now - arrival.at_s)
        slower = 1 + self.running / _MOST_RUNNING
        self._clock.after(len(arrival.answer) * _TOKEN_S * slower, lambda: self._ended(job))
        self._start()

    def _ended(self, job: Job) -> None:
        assert job.held
        self.cache.store(job.held, job.arrival.hashes)
        self.cache.release(job.held)
        self.running -= 1
        self._count(-1, 0)
        self._start()

    def _count(self, requests: int, tokens: int) -> None:
        self.view.in_flight += requests
        self.view.pending_tokens += tokens
        self.view.on_load(self.view)


class Oracle:
    """Knows every cache, and every prompt that is computed before; the same cost as `kv_aware`."""

    def __init__(self, workers: Sequence[SimulatedWorker]) -> None:
        """Look into ``workers``."""
        self._workers = {worker.view: worker for worker in workers}
        self.arrival: Arrival | None = None
        """The request that is routed."""

    def pick(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Candidate | None:
        """See `RoutingPolicy.pick`."""
        return min(candidates, key=self._cost)

    def _cost(self, place: Candidate) -> float:
        worker = self._workers[place.worker]
        assert self.arrival
        uncached = len(self.arrival.prompt) - worker.coming(self.arrival)
        requests = worker.running + len(worker.queue)
        full = 1e9 if requests >= _MOST_RUNNING else 0
        return uncached + worker.waiting_tokens + REQUEST_TOKENS * requests + full


def simulate(
    policy: PolicyName | str, workers: int, arrivals: Sequence[Arrival], warm_s: float
) -> Outcome:
    """Run a policy on some traffic; requests before ``warm_s`` fill the caches and don't count."""
    clock, outcome = Clock(), Outcome()
    fleet = [SimulatedWorker(number, clock, outcome, warm_s) for number in range(workers)]
    by_view = {worker.view: worker for worker in fleet}
    oracle = Oracle(fleet)
    prefixes = None
    if policy is PolicyName.KV_AWARE:
        prefixes = Prefixes(now=lambda: clock.now, rng=random.Random(1))
    router = Router(lambda: _policy(policy, oracle, prefixes), prefixes=prefixes)
    for number, worker in enumerate(fleet):
        router.add(worker.view)
        clock.after(_REPORT_S * number / workers, worker.report)
    router.require(_MODEL)
    if prefixes:
        _tell(prefixes, fleet, clock)

    def arrive(arrival: Arrival) -> None:
        oracle.arrival = arrival
        plan = router.plan(RoutingRequest(model=_MODEL, token_ids=arrival.prompt))
        (leg,) = plan.legs
        by_view[leg.place.worker].submit(arrival, leg.cached_tokens)

    for arrival in arrivals:
        clock.after(arrival.at_s, lambda arrival=arrival: arrive(arrival))  # type: ignore[misc]
    clock.run(arrivals[-1].at_s + _DRAIN_S)
    return outcome


def _policy(
    policy: PolicyName | str, oracle: RoutingPolicy, prefixes: Prefixes | None
) -> RoutingPolicy:
    if policy == ORACLE:
        return oracle
    if policy is PolicyName.POWER_OF_TWO:
        return BestOfTwo(random.Random(1))
    return make_policy(PolicyName(policy), prefixes)


def _tell(prefixes: Prefixes, fleet: Sequence[SimulatedWorker], clock: Clock) -> None:
    index = prefixes.of(_MODEL).index

    def follow(worker_view: WorkerView, cache: PrefixCache) -> None:
        def tell(events: Sequence[KvEvent]) -> None:
            clock.after(_EVENT_DELAY_S, lambda: index.apply(worker_view.member, events))

        cache.follow(tell)

    for worker in fleet:
        follow(worker.view, worker.cache)
