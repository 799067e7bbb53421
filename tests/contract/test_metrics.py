"""GET /metrics: what is in it, and that it answers whatever the event loop and scrapers do."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import time
import urllib.error
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from millstream_server.control.engine import EngineLoad, Role
from millstream_server.engines.simulated.engine import SimulatedEngine
from millstream_server.processor.output import Pacer
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.runtime.errors import EngineFailedError
from millstream_server.runtime.settings import SettingsError
from millstream_server.runtime.telemetry.metrics import PACING_INTERVAL
from millstream_server.runtime.telemetry.metrics_endpoint import MetricsEndpoint
from millstream_server.worker.engine_metrics import EngineMetrics, record_canary
from millstream_testing.in_process import ALPHABET, MODEL, suite, worker
from tests.support.processor.chats import chat, options
from tests.support.telemetry.scraping import OPENMETRICS, documented, scrape, scrape_now
from tests.support.vendor import trap
from tests.support.worker.worker_streams import decode_stream

LIMIT_S = 3.0  # for a scrape that asks an engine in vain


@contextlib.asynccontextmanager
async def endpoint(*collectors: Collector) -> AsyncIterator[MetricsEndpoint]:
    serving = MetricsEndpoint("127.0.0.1:0", "test", collectors)
    try:
        yield serving
    finally:
        await serving.close()


class Named:
    """A collector of one gauge, `sglang:some_gauge`."""

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("sglang:some_gauge", "text", value=7)


# ---- the table


@pytest.mark.parametrize("accept", ["text/plain", OPENMETRICS])
async def test_what_a_suite_emits_is_what_the_table_says(
    text_model: TextModel, accept: str
) -> None:
    table = documented()
    async with suite(text_model) as (front, one):
        metrics = EngineMetrics(one.engine, Role.AGGREGATED, MODEL)
        metrics.ready(await one.load())
        async with endpoint(metrics) as serving:
            answers = [await chat(front.stub, "hi", model=MODEL) for _ in range(2)]
            assert all(answer.text for answer in answers)
            await chat(front.stub, "hi", model=MODEL, opts=options(4))
            answer = await scrape(serving.port, accept)
    emitted = {
        name + ("_total" if family.type == "counter" else ""): family
        for name, family in answer.families.items()
        if not name.startswith("sglang:")
    }
    # Each of ours is announced, with or without series: a dashboard finds it from the start.
    assert sorted(emitted) == sorted(name for name in table if not name.startswith("sglang:"))
    for name, family in emitted.items():
        row = table[name]
        assert (family.type, family.documentation) == (row.type, row.text)
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == row.labels, sample
            assert not sample.name.endswith("_created")


async def test_what_this_process_is() -> None:
    async with endpoint() as serving:
        answer = await scrape(serving.port)
    assert answer.value("millstream_build_info", service="test", version="0.1.0") == 1
    assert answer.value("process_resident_memory_bytes") > 1e6
    assert answer.value("process_cpu_seconds_total") > 0
    assert answer.value("python_info", implementation="CPython") == 1
    assert answer.value("python_gc_collections_total", generation="0") > 0


async def test_the_pacing_interval_is_the_pacers() -> None:
    pacer = Pacer(0.05)
    pacer.open()
    async with endpoint() as serving:
        pacer.interval_s = 0.04
        assert (await scrape(serving.port)).value("millstream_pacing_interval_seconds") > 0
        await pacer.close()
        assert (await scrape(serving.port)).value("millstream_pacing_interval_seconds") == 0
    assert PACING_INTERVAL._type == "gauge"


async def test_a_canary_shows_its_time_and_its_failures() -> None:
    async with endpoint() as serving:
        record_canary(7, 0.02)
        answer = await scrape(serving.port)
        # There from the first success on: a first failure must show as a rise from 0.
        assert answer.value("millstream_canary_failures_total", dp_rank="7") == 0
        record_canary(7, None)
        answer = await scrape(serving.port)
    assert answer.value("millstream_canary_failures_total", dp_rank="7") == 1
    assert answer.value("millstream_canary_duration_seconds_count", dp_rank="7") == 1
    assert answer.value("millstream_canary_duration_seconds_sum", dp_rank="7") == 0.02


# ---- the engine


async def test_the_engines_load_is_the_one_at_the_scrape() -> None:
    async with worker(replace(ALPHABET, step_s=0.005, max_running_requests=2)) as one:
        metrics = EngineMetrics(one.engine, Role.AGGREGATED, MODEL)
        async with endpoint(metrics) as serving:
            early = await scrape(serving.port)
            assert not [name for name in early.families if name.startswith("millstream_engine")]
            metrics.ready(await one.load())
            stream = decode_stream(one.decode)
            for slot in range(3):
                await stream.start(slot, [1 + slot] * 16, max_new_tokens=400)  # no block shared
            await one.until_running(2)
            busy = await scrape(serving.port)
            for slot in range(3):
                await stream.cancel(slot)
            await stream.ended(0, 1, 2)
            await one.until_idle()
            idle = await scrape(serving.port)
    whose = {"model": MODEL, "role": "aggregated"}
    for answer, running, queued, used in ((busy, 2, 1, 2 * 26), (idle, 0, 0, 0)):
        assert answer.value("millstream_engine_running_requests", **whose) == running
        assert answer.value("millstream_engine_queued_requests", **whose) == queued
        assert answer.value("millstream_engine_used_blocks", **whose) == used
        assert answer.value("millstream_engine_total_blocks", **whose) == 1 << 20
        assert answer.value("millstream_engine_load_age_seconds", **whose) < 1
        assert answer.value("millstream_engine_info", engine="simulated", engine_version="1") == 1
        assert not [name for name in answer.families if name.startswith("sglang:")]


class Moody(SimulatedEngine):
    """Answers with one load, or hangs, or has died."""

    mood = "well"

    async def load(self) -> EngineLoad:
        if self.mood == "hangs":
            await asyncio.Event().wait()
        if self.mood == "dead":
            raise EngineFailedError("gone")
        return EngineLoad(running_requests=3, queued_requests=2, used_blocks=1, total_blocks=4)


@pytest.mark.parametrize("mood", ["hangs", "dead"])
async def test_an_engine_that_does_not_answer_leaves_its_last_load_and_its_age(mood: str) -> None:
    engine = Moody(ALPHABET)
    metrics = EngineMetrics(engine, Role.DECODE, MODEL)
    metrics.ready(await engine.start(lambda _: None))
    async with endpoint(metrics) as serving:
        engine.mood = mood
        before = await scrape(serving.port)
        assert before.value("millstream_engine_info") == 1
        assert "millstream_engine_running_requests" not in before.families
        engine.mood = "well"
        well = await scrape(serving.port)
        engine.mood = mood
        began = time.monotonic()
        ill = await scrape(serving.port)
        assert time.monotonic() - began < LIMIT_S
    await engine.close()
    assert ill.value("millstream_engine_running_requests", role="decode") == 3
    assert ill.value("millstream_engine_total_blocks", role="decode") == 4
    age = "millstream_engine_load_age_seconds"
    assert ill.value(age) > well.value(age)
    assert not [task for task in asyncio.all_tasks() if "Moody.load" in repr(task)]


async def test_a_scrape_is_answered_while_the_event_loop_is_blocked() -> None:
    engine = Moody(ALPHABET)
    metrics = EngineMetrics(engine, Role.DECODE, MODEL)
    metrics.ready(await engine.start(lambda _: None))
    async with endpoint(metrics) as serving:
        await scrape(serving.port)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(scrape_now, serving.port).result(LIMIT_S)  # the loop waits for it
    await engine.close()
    assert answer.value("millstream_engine_running_requests") == 3
    assert answer.value("millstream_engine_load_age_seconds") > 1


def test_what_is_known_is_told_when_the_event_loop_has_ended() -> None:
    engine = Moody(ALPHABET)
    metrics = EngineMetrics(engine, Role.DECODE, MODEL)

    async def live() -> None:
        metrics.ready(await engine.start(lambda _: None))
        await engine.close()

    asyncio.run(live())
    told = {family.name for family in metrics.collect()}
    assert told == {"millstream_engine_info", "millstream_engine_max_running_requests"}


# ---- the endpoint


@contextlib.contextmanager
def stock() -> Iterator[int]:
    """Serve the same gauge as the library does by itself."""
    registry = CollectorRegistry()
    registry.register(Named())
    server, thread = start_http_server(0, "127.0.0.1", registry)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def ours() -> Iterator[int]:
    serving = MetricsEndpoint("127.0.0.1:0", "test", [Named()])
    try:
        yield serving.port
    finally:
        serving._close()


@pytest.mark.parametrize(
    "serving",
    [
        ours,
        pytest.param(
            stock,
            marks=trap(
                "prometheus_client 0.26 writes sglang_x for sglang:x into OpenMetrics", KeyError
            ),
        ),
    ],
)
def test_openmetrics_keeps_the_colon_in_sglangs_names(
    serving: Callable[[], contextlib.AbstractContextManager[int]],
) -> None:
    with serving() as port:
        answer = scrape_now(port, OPENMETRICS)
    assert answer.content_type.startswith("application/openmetrics-text; version=1.0.0")
    assert answer.text.endswith("# EOF\n")
    samples = dict(line.rsplit(" ", 1) for line in answer.text.splitlines() if line[0] != "#")
    assert samples["sglang:some_gauge"] == "7.0"


async def test_the_text_format_is_the_default() -> None:
    async with endpoint(Named()) as serving:
        for accept in ("text/plain", "*/*", "text/html,application/xhtml+xml"):
            answer = await scrape(serving.port, accept)
            assert answer.content_type == "text/plain; version=0.0.4; charset=utf-8"
            assert answer.value("sglang:some_gauge") == 7


async def test_a_scrape_may_name_what_it_wants() -> None:
    async with endpoint(Named()) as serving:
        names = "name[]=sglang:some_gauge&name[]=millstream_draining"
        answer = await scrape(serving.port, path=f"/metrics?{names}")
    assert sorted(answer.families) == ["millstream_draining", "sglang:some_gauge"]


@pytest.mark.parametrize("path", ["/", "/metrics/", "/metricsx", "/favicon.ico"])
async def test_another_path_is_told_the_right_one(path: str) -> None:
    async with endpoint() as serving:
        with pytest.raises(urllib.error.HTTPError) as refused:
            await scrape(serving.port, path=path)
        assert refused.value.code == http.HTTPStatus.NOT_FOUND
        assert refused.value.read() == b"The metrics are at /metrics\n"


async def test_a_taken_port_names_the_setting() -> None:
    async with endpoint() as serving:
        with pytest.raises(OSError, match="--metrics-listen") as refused:
            MetricsEndpoint(f"127.0.0.1:{serving.port}", "test")
        assert f"127.0.0.1:{serving.port}" in str(refused.value)
    async with endpoint() as again:
        assert again.port


@pytest.mark.parametrize("address", ["9464", "localhost", "localhost:", "localhost:http", ""])
def test_an_address_that_is_none_names_the_setting(address: str) -> None:
    with pytest.raises(SettingsError, match="--metrics-listen"):
        MetricsEndpoint(address, "test")


@pytest.mark.parametrize("address", ["127.0.0.1:70000", "no.such.host.invalid:9464"])
def test_an_address_nobody_has_names_the_setting(address: str) -> None:
    with pytest.raises(OSError, match=f"can't listen on {address} .--metrics-listen"):
        MetricsEndpoint(address, "test")


async def test_it_listens_on_ipv6() -> None:
    serving = MetricsEndpoint("[::1]:0", "test")
    connection = http.client.HTTPConnection("::1", serving.port, timeout=5)

    def get() -> int:
        connection.request("GET", "/metrics")
        return connection.getresponse().status

    try:
        assert await asyncio.to_thread(get) == http.HTTPStatus.OK
    finally:
        connection.close()
        await serving.close()


async def test_a_silent_client_holds_up_nobody() -> None:
    async with endpoint() as serving:
        with contextlib.ExitStack() as silent:
            for _ in range(5):
                silent.enter_context(socket.create_connection(("127.0.0.1", serving.port)))
            assert (await scrape(serving.port)).value("process_open_fds") > 0


async def test_it_is_gone_once_closed() -> None:
    async with endpoint() as serving:
        port = serving.port
        await scrape(port)
    await serving.close()  # twice
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port)).close()
    assert not serving._thread.is_alive()
    again = MetricsEndpoint(f"127.0.0.1:{port}", "test")
    await again.close()


class Broken:
    """A collector that fails."""

    def collect(self) -> Iterable[Metric]:
        message = "broken"
        raise ValueError(message)


async def test_a_collectors_fault_is_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with endpoint(Broken()) as serving:
        with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
            await scrape(serving.port)
    assert "scrape failed" in caplog.text
    assert "ValueError: broken" in caplog.text
