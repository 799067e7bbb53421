"""Load reports on the wire: what is in the trailers, and when the streams speak."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.duration_pb2 import Duration
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from millstream.orca import service_pb2, service_pb2_grpc
from millstream.v1 import worker_pb2
from millstream_server.runtime.lifecycle.server import Server, ServerOptions
from millstream_server.runtime.rpc import orca
from millstream_server.runtime.rpc.auth import AuthPolicy, PeerIdentities
from millstream_server.runtime.security.api_keys import ApiKeys
from millstream_server.runtime.telemetry.counts import LoadMeter, LoadSnapshot
from millstream_testing.waiting import until
from tests.support.wire import transports
from tests.support.wire.failures import refusal
from tests.support.wire.reporting import (
    LOAD,
    Curl,
    buf_curl,
    call_named,
    channel_to,
    reason_in,
    report_in,
    served,
)

pytestmark = pytest.mark.both_transports


@pytest.fixture(scope="module")
def curl(tmp_path_factory: pytest.TempPathFactory) -> Curl:
    return Curl(tmp_path_factory.mktemp("schema"))


# ---- the wire


def test_a_report_has_the_bytes_of_the_open_interface() -> None:
    def double(number: int, value: float) -> bytes:
        return bytes([number << 3 | 1]) + struct.pack("<d", value)

    by_hand = double(1, 0.25) + double(2, 0.125) + double(6, 8) + double(7, 2) + double(9, 0.5)
    assert orca._to_message(LOAD).SerializeToString() == by_hand
    assert orca.SERVICE == "xds.service.orca.v3.OpenRcaService"


async def test_reflection_resolves_the_service() -> None:
    async with served("A") as running, channel_to(running.port) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        ask = reflection_pb2.ServerReflectionRequest(file_containing_symbol=orca.SERVICE)
        call = stub.ServerReflectionInfo(iter([ask]))
        files = (await call.read()).file_descriptor_response.file_descriptor_proto
        found = {file.package for file in map(FileDescriptorProto.FromString, files)}
        assert {"xds.service.orca.v3", "xds.data.orca.v3"} <= found
        call.cancel()


# ---- trailers


@pytest.mark.parametrize(
    ("method", "answers"), [("unary", 1), ("client_stream", 1), ("generator", 2), ("bidi", 2)]
)
async def test_every_kind_of_rpc_carries_a_report(curl: Curl, method: str, answers: int) -> None:
    async with served("A") as running:
        for _ in range(2):  # the second call meets the cached handler
            trailers = await curl(running.port, method)
            assert trailers["Grpc-Status"] == "0"
            assert trailers["answers"] == answers
            report = report_in(trailers)
            assert report.application_utilization == 0.5
            assert report.cpu_utilization == 0.25
            assert report.mem_utilization == 0.125
            assert report.rps_fractional == 8
            assert report.eps == 2


async def test_a_failure_carries_its_details_and_the_report_and_other_trailers(curl: Curl) -> None:
    async with served("A") as running:
        trailers = await curl(running.port, "refuses")
        assert trailers["Grpc-Status"] == "8"
        assert trailers["Grpc-Message"] == "no room for this test"
        assert reason_in(trailers) == "OVERLOADED"
        assert report_in(trailers).application_utilization == 0.5
        assert trailers["Own"] == "kept"

        async with channel_to(running.port) as channel:
            failed = await refusal(call_named(channel, "refuses"))
            assert failed.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert failed.retry_delay_s == 2


async def test_a_stream_that_breaks_carries_one_too(curl: Curl) -> None:
    async with served("A") as running:
        trailers = await curl(running.port, "breaks_midway")
        assert trailers["answers"] == 1
        assert trailers["Grpc-Status"] == "13"
        assert reason_in(trailers) == "INTERNAL"
        assert report_in(trailers).rps_fractional == 8


async def test_a_status_without_a_reason_of_ours_carries_one_too(curl: Curl) -> None:
    async with served("A") as running:
        trailers = await curl(running.port, "raises_a_status")
        assert trailers["Grpc-Status"] == "15"
        assert trailers["Grpc-Message"] == "gone"
        assert report_in(trailers).rps_fractional == 8


async def test_a_handlers_own_trailers_stay(curl: Curl) -> None:
    async with served("A") as running:
        trailers = await curl(running.port, "own_trailer")
        assert trailers["Own"] == "kept"
        assert report_in(trailers).rps_fractional == 8


async def test_health_carries_none() -> None:
    async with served("A") as running:
        trailers = await buf_curl(f"{running.port}/grpc.health.v1.Health/Check", "{}")
        assert trailers["Grpc-Status"] == "0"
        assert "Endpoint-Load-Metrics-Bin" not in trailers


async def test_what_a_process_reports_besides_is_on_streams_only(curl: Curl) -> None:
    load = LoadSnapshot(rps=1, named={"queued_requests": 3})
    async with served("A", lambda: load) as running, channel_to(running.port) as channel:
        assert not report_in(await curl(running.port, "unary")).named_metrics
        stub: Any = service_pb2_grpc.OpenRcaServiceStub(channel)
        call = stub.StreamCoreMetrics(service_pb2.OrcaLoadReportRequest())
        assert dict((await call.read()).named_metrics) == {"queued_requests": 3}
        call.cancel()


async def test_a_stream_reports_the_load_of_its_end(
    curl: Curl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orca, "_REPORT_LIFE_S", 0)
    load = LoadSnapshot(application_utilization=0.1, rps=1)
    async with served("A", lambda: load) as running:
        called = asyncio.ensure_future(curl(running.port, "holds"))
        await until(lambda: running.named.holding)
        load = LoadSnapshot(application_utilization=0.9, rps=1)
        running.named.held.set_result(None)
        assert report_in(await called).application_utilization == 0.9


async def test_many_rpcs_share_a_report() -> None:
    asked = 0

    def source() -> LoadSnapshot:
        nonlocal asked
        asked += 1
        return LOAD

    async with served("A", source) as running, channel_to(running.port) as channel:
        began = time.monotonic()
        for _ in range(100):
            await call_named(channel, "unary")
        assert 1 <= asked <= 2 + (time.monotonic() - began) / 0.1


async def test_a_load_that_cannot_be_told_harms_no_rpc(
    curl: Curl, caplog: pytest.LogCaptureFixture
) -> None:
    def source() -> LoadSnapshot:
        return LoadSnapshot(application_utilization=1 / 0)

    async with served("A", source) as running:
        trailers = await curl(running.port, "unary")
        assert trailers["Grpc-Status"] == "0"
        assert trailers["answers"] == 1
    assert "load unknown" in caplog.text
    assert "ZeroDivisionError" in caplog.text


async def test_a_meter_is_a_source(curl: Curl) -> None:
    meter = LoadMeter(lambda: 0.25)
    async with served("A", meter.read) as running:

        async def reported() -> bool:
            meter.finished()
            report = report_in(await curl(running.port, "unary"))
            assert report.application_utilization == 0.25
            assert report.mem_utilization > 0
            return bool(report.rps_fractional > 0 and report.cpu_utilization > 0)

        await until(reported)


# ---- streams of reports


def _ask(channel: grpc.aio.Channel, interval_s: float | None = None) -> Any:
    request = service_pb2.OrcaLoadReportRequest()
    if interval_s is not None:
        request.report_interval.FromMilliseconds(int(interval_s * 1000))
    stub: Any = service_pb2_grpc.OpenRcaServiceStub(channel)
    return stub.StreamCoreMetrics(request)


@pytest.mark.parametrize(
    ("asked", "given_s"),
    [
        pytest.param(None, 30, id="not set"),
        pytest.param(Duration(), 0.5, id="zero"),
        pytest.param(Duration(nanos=100_000_000), 0.5, id="short"),
        pytest.param(Duration(seconds=1, nanos=500_000_000), 1.5, id="as asked"),
        pytest.param(Duration(seconds=-5), 0.5, id="negative"),
        pytest.param(Duration(seconds=315_576_000_000), 3600, id="ten thousand years"),
    ],
)
def test_intervals_have_a_floor_a_ceiling_and_a_default(
    asked: Duration | None, given_s: float
) -> None:
    request = service_pb2.OrcaLoadReportRequest(report_interval=asked)
    assert orca._interval_s(request) == given_s


async def test_the_first_report_comes_at_once_and_the_next_after_the_interval() -> None:
    made: list[float] = []

    def source() -> LoadSnapshot:
        made.append(time.monotonic())
        return LoadSnapshot(rps=len(made))

    async with served("A", source) as running, channel_to(running.port) as channel:
        call = _ask(channel, 0.6)
        assert [(await call.read()).rps_fractional for _ in range(3)] == [1, 2, 3]
        assert made[1] - made[0] >= 0.6
        assert made[2] - made[1] >= 0.6
        long = _ask(channel)
        assert (await long.read()).rps_fractional >= 3
        for left in (call, long):
            left.cancel()


async def test_closing_ends_streams_and_refuses_new_ones_and_lets_the_server_stop() -> None:
    async with served("A") as running, channel_to(running.port) as channel:
        calls = [_ask(channel, 3600) for _ in range(3)]
        for call in calls:
            assert (await call.read()).rps_fractional == 8
        running.orca.close()
        for call in calls:
            ended = await refusal(call)
            assert ended.code is grpc.StatusCode.UNAVAILABLE  # grpc-go logs an error after OK
            assert "reports its load no longer" in ended.message
        failed = await refusal(_ask(channel))
        assert failed.code is grpc.StatusCode.UNAVAILABLE
        assert failed.reason == "UNAVAILABLE"
        assert failed.retryable
        assert "shutting down" in failed.message
        async with asyncio.timeout(20):
            await running.server.stop(60)


async def test_clients_that_leave_leave_nothing_behind() -> None:
    async with served("A") as running, channel_to(running.port) as channel:
        async with asyncio.timeout(20):
            kept = _ask(channel, 3600)
            await kept.read()
            before = len(asyncio.all_tasks())
            calls = [_ask(channel, 3600) for _ in range(50)]
            for call in calls:
                await call.read()
            assert len(asyncio.all_tasks()) >= before + 50
            for call in calls:
                call.cancel()
            del call
            calls.clear()
            await until(lambda: len(asyncio.all_tasks()) <= before)
        assert not kept.done()
        kept.cancel()


# ---- callers without a key


@contextlib.asynccontextmanager
async def _guarded(policy: AuthPolicy) -> AsyncIterator[int]:
    """Serve with reports, and with keys that the callers do not have."""
    meter = LoadMeter(lambda: 0.5)
    options = ServerOptions(
        max_receive_bytes=4096, clients=transports.clients(4096), auth=policy, load=meter
    )
    server = Server((worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name,), options)
    try:
        yield await server.listen("127.0.0.1:0")
    finally:
        await server.stop(0)


async def test_who_has_no_key_is_told_the_load_and_nothing_of_what_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(orca, "MAX_STREAMS", 2)
    keys = AuthPolicy(keys=ApiKeys(inline=f"alice:{'k' * 32}"))
    async with _guarded(keys) as port, channel_to(port) as channel:
        # gRPC's own client of this stream can't send a key.
        call = _ask(channel, 3600)
        assert (await call.read()).application_utilization == 0.5
        refused = await refusal(_ask(channel))
        assert (refused.code, refused.reason) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "OVERLOADED",
        )
        call.cancel()
        known, unknown = [
            await buf_curl(f"{port}/{method}", "{}", "--schema", "proto")
            for method in (
                "millstream.v1.WorkerService/GetWorkerInfo",
                "millstream.v1.ProcessorService/ListModels",
            )
        ]
    for trailers in (known, unknown):
        assert reason_in(trailers) == "UNAUTHENTICATED"
        assert "Endpoint-Load-Metrics-Bin" not in trailers
    assert known == unknown


async def test_where_certificates_are_asked_for_the_load_is_not_open() -> None:
    peers = AuthPolicy(peers=PeerIdentities(["*"]))
    async with _guarded(peers) as port, channel_to(port) as channel:
        assert (await refusal(_ask(channel))).reason == "UNAUTHENTICATED"
