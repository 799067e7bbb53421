"""Ordinary gRPC clients with `weighted_round_robin` balance by our load reports."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from typing import Any

import grpc
import pytest

from millstream_server.runtime.rpc import orca
from millstream_server.runtime.telemetry.counts import LoadSnapshot
from millstream_testing.waiting import until
from tests.support.wire.reporting import call_named, channel_to, served


def _weighted(**policy: Any) -> dict[str, Any]:
    weights = {"blackoutPeriod": "0s", "weightUpdatePeriod": "0.1s", **policy}
    return {"loadBalancingConfig": [{"weighted_round_robin": weights}]}


PER_CALL = _weighted(enableOobLoadReport=False)
OUT_OF_BAND = _weighted(enableOobLoadReport=True, oobReportingPeriod="0.5s")


async def _share_of_a(channel: grpc.aio.Channel, calls: int = 100) -> float:
    answers = [(await call_named(channel, "unary")).value for _ in range(calls)]
    return answers.count("A") / calls


@pytest.mark.parametrize(
    ("config", "trailers"),
    [pytest.param(PER_CALL, True, id="per call"), pytest.param(OUT_OF_BAND, False, id="oob")],
)
async def test_a_plain_client_sends_more_to_the_idler_server(
    config: dict[str, Any], *, trailers: bool
) -> None:
    idle, busy = (LoadSnapshot(application_utilization=u, rps=50) for u in (0.1, 0.9))
    async with (
        served("A", lambda: idle, trailers=trailers) as a,
        served("B", lambda: busy, trailers=trailers) as b,
        channel_to(a.port, b.port, config=config) as channel,
    ):

        async def leans_to_a() -> bool:
            return await _share_of_a(channel) >= 0.7

        await until(leans_to_a, within_s=20)
        assert 0.8 <= await _share_of_a(channel, 200) < 1  # nine tenths, but B isn't forgotten

        idle, busy = busy, idle  # and it follows when the load moves

        async def leans_to_b() -> bool:
            return await _share_of_a(channel) <= 0.3

        await until(leans_to_b, within_s=20)


@pytest.mark.parametrize(
    ("method", "kind"), [("refuses", "unary_unary"), ("generator", "unary_stream")]
)
async def test_failures_and_streams_weigh_as_well(method: str, kind: str) -> None:
    idle, busy = (LoadSnapshot(application_utilization=u, rps=50) for u in (0.1, 0.9))
    at_a: Counter[str] = Counter()
    async with (
        served("A", lambda: idle, seen=at_a) as a,
        served("B", lambda: busy) as b,
        channel_to(a.port, b.port, config=PER_CALL) as channel,
    ):

        async def leans_to_a() -> bool:
            at_a.clear()
            for _ in range(100):
                call = call_named(channel, method, kind)
                with contextlib.suppress(grpc.aio.AioRpcError):
                    _ = [await call] if kind.endswith("unary") else [one async for one in call]
            return at_a.total() >= 70

        await until(leans_to_a, within_s=20)


async def test_the_same_client_without_reports_shares_evenly() -> None:
    """What the other tests see is the reports' doing."""
    seen: Counter[str] = Counter()
    async with (
        served("A", trailers=False, seen=seen) as a,
        served("B", trailers=False, seen=seen) as b,
        channel_to(a.port, b.port, config=PER_CALL) as channel,
    ):

        async def both() -> bool:
            return 0 < await _share_of_a(channel, 10) < 1

        await until(both)
        assert 0.4 <= await _share_of_a(channel) <= 0.6
    assert f"/{orca.SERVICE}/StreamCoreMetrics" not in seen


async def test_a_balancing_client_backs_off_while_the_server_drains() -> None:
    """It comes back at once to a stream that ended after a report: only a bare refusal slows it."""
    seen: Counter[str] = Counter()
    stream = f"/{orca.SERVICE}/StreamCoreMetrics"
    async with (
        served("A", seen=seen) as running,
        channel_to(running.port, config=OUT_OF_BAND) as channel,
    ):
        await call_named(channel, "unary")
        await until(lambda: seen[stream] == 1)
        running.orca.close()
        await until(lambda: seen[stream] == 2)  # at once, and is refused
        refused_at = time.monotonic()
        await until(lambda: seen[stream] > 2)
        assert time.monotonic() - refused_at >= 0.5
        assert seen[stream] == 3
