"""How well policies route by cached prefixes, and what a decision takes.

The first table is a simulation in virtual time (`tests.support.processor.routing_simulation`): hit
rates and times to the first token are the same on any machine. The oracle knows every cache and
every queue; it takes the place of the least cost, the same cost as kv_aware estimates. The second
table is measured here: one `Router.plan` with kv_aware, without the hashing of its prompt, which
is a column of its own.

    python -m tests.benchmarks.routing [--quick] [--json]
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from unittest import mock

from millstream_server.kv_cache.events import BlocksStored
from millstream_server.kv_cache.hashing import block_hashes
from millstream_server.routing.kv_aware import make_policy
from millstream_server.routing.plan import RoutingRequest
from millstream_server.routing.policy import PolicyName
from millstream_server.routing.prefix.prefixes import Prefixes
from millstream_server.routing.router import Router
from tests.support.processor.routing_simulation import ORACLE, simulate
from tests.support.processor.routing_traffic import BLOCK_SIZE, Traffic
from tests.support.processor.views import view

_RATE = 3.0
"""Requests per second and worker: the prompts take some two thirds of a worker's time if nothing is
cached."""
_SECONDS = {4: 240.0, 16: 120.0, 64: 60.0}
_QUICK_SECONDS = {4: 40.0, 16: 20.0, 64: 8.0}
_WARM = 0.25
_POLICIES = (*PolicyName, ORACLE)
_QUICK_POLICIES = (PolicyName.LEAST_LOADED, PolicyName.KV_AWARE, ORACLE)
_FLEETS = (4, 16, 64, 256, 1000)
_PROMPT_TOKENS, _SHARED_TOKENS = 2048, 512
_ROUND = 300


@dataclass(frozen=True, slots=True)
class Row:
    """One policy on one number of workers."""

    workers: int
    policy: str
    hit_rate: float
    of_oracle: float
    ttft_p50_ms: float
    ttft_p99_ms: float


@dataclass(frozen=True, slots=True)
class Decision:
    """What one decision takes, in microseconds; ``cpu``: without waiting for a core.

    ``p99_us`` is over all decisions; ``round_p99_us`` is the median of the p99s of rounds of 300,
    which other processes on the machine disturb less.
    """

    workers: int
    p50_us: float
    p99_us: float
    round_p99_us: float
    cpu_p99_us: float
    hashing_p50_us: float


def rows(*, quick: bool = False) -> list[Row]:
    """Run the simulations."""
    found = []
    for workers, seconds in (_QUICK_SECONDS if quick else _SECONDS).items():
        arrivals = Traffic(workers).arrivals(seconds, _RATE)
        policies = _QUICK_POLICIES if quick else _POLICIES
        outcomes = {p: simulate(p, workers, arrivals, _WARM * seconds) for p in policies}
        best = outcomes[ORACLE].hit_rate
        found += [
            Row(
                workers=workers,
                policy=policy.value if isinstance(policy, PolicyName) else policy,
                hit_rate=outcome.hit_rate,
                of_oracle=outcome.hit_rate / best,
                ttft_p50_ms=1000 * outcome.ttft_s(0.5),
                ttft_p99_ms=1000 * outcome.ttft_s(0.99),
            )
            for policy, outcome in outcomes.items()
        ]
    return found


def decision(workers: int, count: int) -> Decision:
    """Measure ``count`` decisions on prompts of 2,048 tokens; all workers know a quarter of it."""
    rng = random.Random(1)
    prefixes = Prefixes()
    router = Router(lambda: make_policy(PolicyName.KV_AWARE, prefixes), prefixes=prefixes)
    for number in range(workers):
        router.add(view(f"w{number:04}:1", block_size=BLOCK_SIZE, tells_kv=True))
    router.require("m")
    shared = [[rng.randrange(32_000) for _ in range(_SHARED_TOKENS)] for _ in range(4)]
    _fill(prefixes, shared, rng)
    requests = []
    hashes = {}
    hashing = []
    for _ in range(count):
        rest = [rng.randrange(32_000) for _ in range(_PROMPT_TOKENS - _SHARED_TOKENS)]
        tokens = rng.choice(shared) + rest
        begun = time.perf_counter()
        hashes[id(tokens)] = block_hashes(tokens, BLOCK_SIZE)
        hashing.append(time.perf_counter() - begun)
        requests.append(RoutingRequest(model="m", token_ids=tokens))
    with mock.patch(
        "millstream_server.routing.prefix.prefixes.block_hashes",
        lambda tokens, *_: hashes[id(tokens)],
    ):
        wall = _times(router, requests[: count // 2], time.perf_counter)
        cpu = _times(router, requests[count // 2 :], time.thread_time)
    return Decision(
        workers=workers,
        p50_us=_quantile(wall, 0.5),
        p99_us=_quantile(wall, 0.99),
        round_p99_us=_round_p99(wall),
        cpu_p99_us=_quantile(cpu, 0.99),
        hashing_p50_us=_quantile(hashing, 0.5),
    )


def _fill(prefixes: Prefixes, shared: Sequence[Sequence[int]], rng: random.Random) -> None:
    """Give every worker the shared prefixes, 500 blocks of its own, and some load."""
    model = prefixes.of("m")
    for place in model.places.values():
        for prefix in shared:
            hashes = block_hashes(prefix, BLOCK_SIZE)
            own = [rng.getrandbits(64) for _ in range(125)]
            model.index.apply(place.member, [BlocksStored(hashes), BlocksStored(own, hashes[-1])])
        place.in_flight = rng.randrange(4)
        place.pending_tokens = rng.choice([0, 0, 100, 2000, 10_000])
        place.on_load(place)


def _times(
    router: Router, requests: Sequence[RoutingRequest], clock: Callable[[], float]
) -> list[float]:
    times = []
    gc.collect()
    gc.freeze()
    for request in requests:
        begun = clock()
        router.plan(request)
        times.append(clock() - begun)
    gc.unfreeze()
    return times[len(times) // 10 :]


def _quantile(seconds: Sequence[float], quantile: float) -> float:
    ordered = sorted(seconds)
    return 1e6 * ordered[int(quantile * (len(ordered) - 1))]


def _round_p99(seconds: Sequence[float]) -> float:
    rounds = [seconds[at : at + _ROUND] for at in range(0, len(seconds), _ROUND)]
    return statistics.median(_quantile(one, 0.99) for one in rounds)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="shorter traffic, three policies")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    policies = rows(quick=args.quick)
    decisions = [decision(workers, 1000 if args.quick else 4000) for workers in _FLEETS]
    if args.json:
        found = {
            "policies": [asdict(row) for row in policies],
            "decisions": [asdict(row) for row in decisions],
        }
        print(json.dumps(found))  # noqa: T201
    else:
        print("\n".join(_tables(policies, decisions)))  # noqa: T201


def _tables(policies: Sequence[Row], decisions: Sequence[Decision]) -> Iterator[str]:
    yield "workers policy        hit rate  of oracle  TTFT p50   p99 ms"
    for row in policies:
        yield (
            f"{row.workers:7} {row.policy:12} {row.hit_rate:9.1%} {row.of_oracle:10.1%}"
            f" {row.ttft_p50_ms:9.0f} {row.ttft_p99_ms:8.0f}"
        )
    yield ""
    yield "workers  decision p50   p99 us  p99 of rounds  CPU p99  hashing p50"
    for one in decisions:
        yield (
            f"{one.workers:7} {one.p50_us:13.0f} {one.p99_us:8.0f} {one.round_p99_us:14.0f}"
            f" {one.cpu_p99_us:8.0f} {one.hashing_p50_us:12.0f}"
        )


if __name__ == "__main__":
    main()
