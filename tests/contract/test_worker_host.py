"""A worker of another ability, on the host that every worker has.

The ability is a stub: an engine with `embed`, and a servicer for it. All the rest (health, canary,
drain, info, load, limits, spans, metrics, TLS) it has because `worker.app` started it. Nothing
here imports anything of text generation; for the host's own modules import-linter checks the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.wrappers_pb2 import DoubleValue, StringValue
from prometheus_client.core import GaugeMetricFamily, Metric

from millstream.orca import service_pb2, service_pb2_grpc
from millstream.v1 import worker_pb2
from millstream_server.control.engine import EngineInfo, EngineLoad, Role
from millstream_server.runtime.errors import EngineFailedError, ServingError
from millstream_server.runtime.lifecycle.main import DRAINED, FAILED
from millstream_server.runtime.telemetry.trace_context import NOT_TRACED, TraceContext
from millstream_server.runtime.telemetry.tracing import ambient
from millstream_server.worker import app
from millstream_server.worker.host import WorkerHost, WorkerPlan
from millstream_server.worker.host_settings import HostSettings
from millstream_testing.waiting import until
from tests.support.processes.ports import free_port
from tests.support.telemetry.otlp_collector import collecting
from tests.support.telemetry.scraping import scrape
from tests.support.wire.certificates import Authority, SecretMount
from tests.support.wire.failures import refusal
from tests.support.wire.long_streams import (
    NOT_SERVING,
    SERVING,
)
from tests.support.worker.hosted_worker import HostedWorker, host_settings, hosted_worker

SERVICE = "millstream.test.EmbeddingService"
MODEL = "tiny-embedder"
INFO = EngineInfo(
    engine="stub", engine_version="7", max_running_requests=8, weight_version="a", device="cpu"
)


def _declare() -> None:
    """Make the service known to reflection, as generated code would."""
    file = descriptor_pb2.FileDescriptorProto(
        name="millstream/test/embedding.proto",
        package="millstream.test",
        dependency=["google/protobuf/wrappers.proto"],
        syntax="proto3",
    )
    file.service.add(name="EmbeddingService").method.add(
        name="Embed",
        input_type=".google.protobuf.StringValue",
        output_type=".google.protobuf.DoubleValue",
    )
    descriptor_pool.Default().Add(file)


_declare()


class EmbeddingEngine:
    """Embeds a text in one dimension: its length. Satisfies `HostedEngine` and `MetricsSource`."""

    def __init__(self) -> None:
        self.going = asyncio.Event()
        self.going.set()
        self.steps = 0
        self.open = 0
        self.parents: list[TraceContext] = []
        self.closed = False
        self.fails: EngineFailedError | None = None

    async def start(self, on_failure: Callable[[ServingError], None]) -> EngineInfo:
        if self.fails:
            raise self.fails
        self.die = on_failure
        return INFO

    async def warm_up(self) -> None:
        await self.embed("warm")

    async def load(self) -> EngineLoad:
        return EngineLoad(
            running_requests=self.open, queued_requests=0, used_blocks=0, total_blocks=0
        )

    async def close(self) -> None:
        self.closed = True

    def progress(self, dp_rank: int) -> int:
        return self.steps

    async def probe(self, dp_rank: int) -> None:
        await self.embed("probe")

    def metrics(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("stub:steps", "Steps of the stub", value=self.steps)

    async def embed(self, text: str, trace: TraceContext = NOT_TRACED) -> float:
        self.parents.append(trace)
        self.open += 1
        try:
            await self.going.wait()
        finally:
            self.open -= 1
        self.steps += 1
        return float(len(text))


def plan(engine: EmbeddingEngine) -> WorkerPlan[EngineInfo]:
    """Plan the worker: all that a new ability has to write, but for its engine."""

    def add(host: WorkerHost[EngineInfo], server: grpc.aio.Server) -> None:
        async def embed(request: StringValue, _: Any) -> DoubleValue:
            host.loaded()
            tokens = len(request.value.split())
            requests = host.requests
            with requests.running("", ambient()) as held:
                requests.check_accepts()
                requests.check(tokens)
                held.admit(tokens)
                return DoubleValue(value=await engine.embed(request.value, held.trace))

        handler = grpc.unary_unary_rpc_method_handler(
            embed, StringValue.FromString, DoubleValue.SerializeToString
        )
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"Embed": handler}),)
        )

    return WorkerPlan(
        engine=engine,
        role=Role.AGGREGATED,
        model=MODEL,
        operation="embeddings",
        services=(SERVICE,),
        add=add,
        max_open_tokens=lambda _: 10,
    )


@dataclass(kw_only=True)
class Embedder(HostedWorker):
    """A worker that runs here."""

    engine: EmbeddingEngine

    def embed(self, text: str) -> Any:
        method = self.channel.unary_unary(
            f"/{SERVICE}/Embed", StringValue.SerializeToString, DoubleValue.FromString
        )
        return method(StringValue(value=text), timeout=20)


@contextlib.asynccontextmanager
async def embedder(**changes: Any) -> AsyncIterator[Embedder]:
    engine = EmbeddingEngine()
    given: dict[str, Any] = {
        "metrics_listen": f"127.0.0.1:{free_port()}",
        "canary_interval_s": 0.1,
        "canary_timeout_s": 0.3,
    }
    async with hosted_worker(host_settings(**(given | changes)), plan(engine)) as running:
        yield Embedder(engine=engine, **running)


async def test_it_embeds_and_says_what_it_is_and_how_loaded() -> None:
    async with embedder() as one:
        assert (await one.embed("four")).value == 4
        orca: Any = service_pb2_grpc.OpenRcaServiceStub(one.channel)
        reports = orca.StreamCoreMetrics(service_pb2.OrcaLoadReportRequest())
        assert (await reports.read()).rps_fractional > 0
        reports.cancel()
        info = (await one.about.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest())).info
        assert (info.model, info.engine, info.engine_version) == (MODEL, "stub", "7")
        assert (info.max_running_requests, info.vocab_size, info.device) == (8, 0, "cpu")
        load = await one.about.WatchLoad(worker_pb2.WatchLoadRequest()).read()
        assert load.load.running_requests == 0


async def test_it_holds_no_more_than_its_limits() -> None:
    async with embedder(max_open_requests=2, canary_interval_s=0) as one:
        one.engine.going.clear()
        held = one.embed("one two three four five six seven")
        await until(lambda: one.engine.open == 1)
        failed = await refusal(one.embed("one two three four"))
        assert (failed.code, failed.reason) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "OVERLOADED",
        )
        assert "would exceed the 10 that may be open" in failed.message
        second = one.embed("one two three")
        await until(lambda: one.engine.open == 2)
        failed = await refusal(one.embed("one"))
        assert "2 requests are open" in failed.message
        assert failed.retry_delay_s is not None
        second.cancel()
        await until(lambda: one.engine.open == 1)
        one.engine.going.set()
        assert (await held).value > 0
        assert (await one.embed("one two three four five six seven eight nine ten")).value > 0


async def test_a_hang_makes_it_not_serving_until_it_works_again() -> None:
    async with embedder() as one:
        assert await one.conditions() == []
        one.engine.going.clear()
        await one.health.until(NOT_SERVING)
        assert await one.conditions() == ["stuck"]
        one.engine.going.set()
        await one.health.until(SERVING)
        assert await one.conditions() == []


async def test_its_requests_are_spans_and_its_numbers_are_scraped() -> None:
    with collecting() as collector:
        async with embedder(otlp_endpoint=f"http://{collector.address}") as one:
            await one.embed("four")
            parent = one.engine.parents[-1]
            port = int(one.settings.metrics_listen.rpartition(":")[2])
            scraped = await scrape(port)
            os.kill(os.getpid(), signal.SIGTERM)
            assert await asyncio.wait_for(one.code, 10) == DRAINED
        (span,) = [span for span in collector.spans if span.name == f"embeddings {MODEL}"]
    assert span.attributes["gen_ai.operation.name"] == "embeddings"
    assert parent.traceparent.split("-")[1:3] == [span.trace_id, span.span_id]
    labels = {"model": MODEL, "role": "aggregated"}
    assert scraped.value("millstream_engine_info", engine="stub", device="cpu", **labels) == 1
    assert scraped.value("stub:steps") >= 2
    assert scraped.value("millstream_serving", service=SERVICE) == 1
    ended = scraped.value(
        "millstream_worker_stream_requests_total", outcome="OK", role="aggregated"
    )
    assert ended >= 1
    assert scraped.value("millstream_canary_failures_total", dp_rank="0") >= 0


async def test_told_to_stop_it_finishes_what_is_open_and_takes_nothing_new() -> None:
    async with embedder(canary_interval_s=0) as one:
        watch = one.about.WatchWorkerInfo(worker_pb2.WatchWorkerInfoRequest())
        assert (await watch.read()).info.model == MODEL
        one.engine.going.clear()
        held = one.embed("four")
        await until(lambda: one.engine.open == 1)
        os.kill(os.getpid(), signal.SIGTERM)
        told = await refusal(watch)
        assert (told.code, told.reason) == (grpc.StatusCode.UNAVAILABLE, "WORKER_DRAINING")
        assert one.health.told[-1] == NOT_SERVING
        assert await one.conditions() == ["draining"]

        async def refused() -> bool:
            call = one.embed("late")
            try:
                async with asyncio.timeout(0.2):
                    return (await refusal(call)).reason == "WORKER_DRAINING"
            except TimeoutError:
                call.cancel()
                return False  # taken: load balancers may not have heard yet

        await until(refused)
        assert not one.code.done()
        one.engine.going.set()
        assert (await held).value == 4
        assert await asyncio.wait_for(one.code, 10) == DRAINED
        assert one.engine.closed


async def test_an_engine_that_dies_ends_it() -> None:
    async with embedder() as one:
        one.engine.die(EngineFailedError("it fell over"))
        assert await asyncio.wait_for(one.code, 10) == FAILED
        assert one.engine.closed


async def test_an_engine_that_does_not_start_is_closed() -> None:
    engine = EmbeddingEngine()
    engine.fails = EngineFailedError("no")
    settings = HostSettings(listen="127.0.0.1:0", metrics_listen="")
    assert await app.run(settings, plan(engine)) == FAILED
    assert engine.closed


async def test_over_tls_it_serves_only_those_who_are_named(tmp_path: Path) -> None:
    authority, mount = Authority(), SecretMount(tmp_path)
    mount.put(authority.issue("localhost"))
    port = free_port()
    settings = HostSettings(
        listen=f"localhost:{port}",
        metrics_listen="",
        tls_cert_file=mount.cert,
        tls_key_file=mount.key,
        tls_client_ca_file=mount.ca,
        allowed_peers=("processor.example",),
    )
    code = asyncio.ensure_future(app.run(settings, plan(EmbeddingEngine())))

    async def embed(name: str, text: str) -> Any:
        held = authority.issue(name)
        credentials = grpc.ssl_channel_credentials(authority.pem, held.key, held.cert)
        async with grpc.aio.secure_channel(f"localhost:{port}", credentials) as channel:
            method: Any = channel.unary_unary(
                f"/{SERVICE}/Embed", StringValue.SerializeToString, DoubleValue.FromString
            )
            call = method(StringValue(value=text), wait_for_ready=True, timeout=20)
            return await call if name == "processor.example" else await refusal(call)

    try:
        assert (await embed("processor.example", "four")).value == 4
        stranger = await embed("other.example", "four")
        assert stranger.code is grpc.StatusCode.PERMISSION_DENIED
    finally:
        code.cancel()
        await asyncio.wait({code})


async def test_what_the_worker_is_can_change_and_watchers_are_told() -> None:
    host = WorkerHost(plan(EmbeddingEngine()))
    seen: list[EngineInfo | None] = []
    undo = host.description.listen(lambda: seen.append(host.info))
    host.set_info(INFO)
    host.set_info(INFO)
    newer = replace(INFO, weight_version="b", max_running_requests=3)
    host.set_info(newer)
    assert seen == [INFO, newer]
    assert host.requests.limits.max_requests == 4 * 3
    undo()
    host.set_info(INFO)
    assert len(seen) == 2
