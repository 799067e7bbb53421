"""What telemetry must leave alone, and what served RPCs must not leave behind."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from grpc_channelz.v1 import channelz_pb2_grpc
from grpc_health.v1 import health_pb2_grpc

from millstream_server.runtime.lifecycle.admin import Channelz
from millstream_server.runtime.rpc import health, orca, reflection
from millstream_server.runtime.rpc.server_telemetry import TelemetryLayer
from millstream_server.runtime.telemetry.counts import LoadSnapshot
from millstream_testing.waiting import EOF, until
from tests.support.telemetry.spans import Samples, SpanLog
from tests.support.wire.rpc_kinds import SERVICE, Kinds, serving

pytestmark = pytest.mark.both_transports

SERVED = [f"/{SERVICE}/Unary", f"/{SERVICE}/Chat"]


async def test_what_machines_ask_all_the_time_is_left_alone() -> None:
    """The stock one has a filter for that, which works, and by default none."""
    spans, measured = SpanLog(), Samples()

    def add(server: Any) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(()), server)
        channelz_pb2_grpc.add_ChannelzServicer_to_server(Channelz(), server)
        reflection.add_reflection(server, [health.SERVICE_NAME])
        orca.add_orca(server, LoadSnapshot)

    telemetry = TelemetryLayer(spans.tracing, served=SERVED)
    async with serving(Kinds(), [telemetry], extra=add) as client:
        for method in (
            f"{health.SERVICE_NAME}/Check",
            f"{health.SERVICE_NAME}/Watch",
            f"{reflection.V1}/ServerReflectionInfo",
            f"{reflection.V1ALPHA}/ServerReflectionInfo",
            "grpc.channelz.v1.Channelz/GetServers",
            f"{orca.SERVICE}/StreamCoreMetrics",
        ):
            call = client.channel.stream_stream(f"/{method}")(iter([b""]))
            assert await call.read() is not EOF, method
            call.cancel()
        await client.unary(b"")
    assert [span.name for span in spans.ended] == [f"{SERVICE}/Unary"]
    assert measured.grown("rpc_server_call_duration_seconds_count") == 1
    assert measured.grown("millstream_rpc_server_open") == 0


async def test_ended_rpcs_wait_for_no_collector() -> None:
    kinds, telemetry = Kinds(), TelemetryLayer(SpanLog().tracing, served=SERVED)
    async with serving(kinds, [telemetry]) as client:
        gc.collect()
        before = _alive("_ServedRpc")  # other tests' failures, which pytest keeps with their frames
        gc.disable()
        try:
            for _ in range(20):
                await client.unary(b"")
                call = client.chat()
                await call.write(b"hang")
                await until(lambda: kinds.entered == 2 * (kinds.cancelled + 1))
                call.cancel()
                await until(lambda: kinds.entered == 2 * kinds.cancelled)
            await until(lambda: _alive("_ServedRpc") <= before)
        finally:
            gc.enable()


def _alive(name: str) -> int:
    return sum(type(found).__name__ == name for found in gc.get_objects())
