"""Where spans go: to the collector, or nowhere, and never in the way."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

from millstream_server.runtime.settings import SettingsError
from millstream_server.runtime.telemetry.tracing import Tracing
from tests.support.telemetry.otlp_collector import collecting


async def test_spans_arrive_at_the_collector_before_the_process_ends() -> None:
    with collecting() as collector:
        tracing = Tracing.from_settings(
            f"http://{collector.address}",
            1.0,
            service_name="millstream-decode",
            attributes={"millstream.role": "decode"},
        )
        assert tracing is not None
        tracing.tracer.start_span("a").end()
        await tracing.shutdown()
        (span,) = collector.spans
    assert (span.name, span.service) == ("a", "millstream-decode")
    assert span.resource["millstream.role"] == "decode"
    assert len(span.trace_id) == 32


def test_the_environment_wins_over_our_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "theirs")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    tracing = Tracing.from_settings("http://127.0.0.1:1", 0.0, service_name="ours")
    assert tracing is not None
    said = tracing._provider.resource.attributes
    assert (said["service.name"], said["deployment.environment"]) == ("theirs", "test")


def test_without_an_endpoint_there_is_no_tracing() -> None:
    assert Tracing.from_settings("", 1.0, service_name="x") is None


def test_a_ratio_that_is_none_stops_the_process_with_a_sentence() -> None:
    with pytest.raises(SettingsError, match=r"--trace-sample-ratio: 2 is not from 0 to 1"):
        Tracing.from_settings("", 2.0, service_name="x")


@pytest.mark.parametrize(("scheme", "insecure"), [("https", False), ("http", True)])
def test_https_means_tls(scheme: str, *, insecure: bool) -> None:
    tracing = Tracing.from_settings(f"{scheme}://127.0.0.1:1", 0.0, service_name="x")
    assert tracing is not None
    assert isinstance(tracing._exporter, OTLPSpanExporter)
    assert tracing._exporter._insecure is insecure


@pytest.mark.parametrize("silent", [True, False], ids=["takes nothing", "is not there"])
async def test_a_dead_collector_holds_up_nothing_and_is_one_log_line(
    caplog: pytest.LogCaptureFixture, *, silent: bool
) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        if silent:
            held.listen()  # connects, and never answers
        address = f"http://127.0.0.1:{held.getsockname()[1]}"
        tracing = Tracing.from_settings(address, 1.0, service_name="x")
        assert tracing is not None
        for _ in range(600):  # more than a batch, so that an export is under way
            tracing.tracer.start_span("a").end()
        began = time.monotonic()
        free = asyncio.ensure_future(_longest_hold_up())
        await tracing.shutdown()
        took = time.monotonic() - began
        free.cancel()
    assert took < 3
    assert len([r for r in caplog.records if r.name.startswith("opentelemetry")]) <= 1
    assert await free < 0.5


async def _longest_hold_up() -> float:
    """Measure, until cancelled, for how long at most the event loop was held up."""
    longest, last = 0.0, time.monotonic()
    try:
        while True:
            await asyncio.sleep(0.01)
            now = time.monotonic()
            longest, last = max(longest, now - last), now
    except asyncio.CancelledError:
        return longest
