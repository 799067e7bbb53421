"""Images and videos on real SGLang, on the CPU: Encode → Prefill → Decode, and aggregated."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from millstream.v1 import processor_pb2_grpc
from tests.support.models.vision_models import make_vision_model
from tests.support.processes.ports import free_port
from tests.support.processes.suite import ServiceProcess, running
from tests.support.telemetry.otlp_collector import Collector, collecting
from tests.support.telemetry.scraping import Scrape, scrape

NAME = "tiny"
# Prompts are cut in pieces of 16 tokens, in the middle of images too.
_CHUNKED = "--chunked-prefill-size 16"
# Spans leave soon, not after five seconds.
_SOON = {"OTEL_BSP_SCHEDULE_DELAY": "100", "SGLANG_OTLP_EXPORTER_SCHEDULE_DELAY_MILLIS": "100"}


@dataclass
class Suite:
    """The running services; both fronts have the same encode worker."""

    model: Path
    collector: Collector
    encode: ServiceProcess
    prefill: ServiceProcess
    decode: ServiceProcess
    aggregated: ServiceProcess
    front: ServiceProcess
    front_aggregated: ServiceProcess

    async def scrape(self) -> Scrape:
        """Read the encode worker's metrics."""
        return await scrape(int(str(self.encode.flags["metrics_listen"]).rpartition(":")[2]))


def make_suite(model: Path, collector: Collector, logs: Path) -> Suite:
    """Make the services, and start none."""
    sent = {"otlp_endpoint": f"http://{collector.address}"}
    common = {**sent, "model_path": model, "model_name": NAME}
    engine = {**common, "max_total_tokens": 16384, "engine_args": _CHUNKED}
    metrics = f"127.0.0.1:{free_port()}"

    def service(name: str, module: str, flags: dict[str, Any]) -> ServiceProcess:
        return ServiceProcess(f"millstream_server.{module}", flags, logs / f"{name}.log", env=_SOON)

    encode = service("encode", "encode", {**common, "metrics_listen": metrics})
    prefill = service("prefill", "prefill", {**engine, "bootstrap_port": free_port()})
    decode = service("decode", "decode", {**engine, "mode": "disaggregated"})
    aggregated = service("aggregated", "decode", engine)

    def front(name: str, *workers: ServiceProcess) -> ServiceProcess:
        addresses = ",".join(worker.address for worker in workers)
        flags = {**sent, "models": f"{NAME}={model}", "workers": addresses}
        return service(name, "processor", flags)

    return Suite(
        model=model,
        collector=collector,
        encode=encode,
        prefill=prefill,
        decode=decode,
        aggregated=aggregated,
        front=front("front", encode, prefill, decode),
        front_aggregated=front("front-aggregated", encode, aggregated),
    )


@pytest.fixture(scope="package")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    """Qwen3-VL: of the families the one with the most to get wrong."""
    model = make_vision_model(tmp_path_factory.mktemp("model") / "tiny", "qwen3_vl")
    with collecting() as collector:
        made = make_suite(model, collector, tmp_path_factory.mktemp("logs"))
        engines = (made.encode, made.prefill, made.decode, made.aggregated)
        with running(*engines, made.front, made.front_aggregated):
            yield made


@contextlib.asynccontextmanager
async def talking(address: str) -> AsyncIterator[Any]:
    """Open a channel to a Processor."""
    async with grpc.aio.insecure_channel(address) as channel:
        await channel.channel_ready()  # a test's deadline is spent on the request alone
        yield processor_pb2_grpc.ProcessorServiceStub(channel)


@pytest.fixture
async def stub(suite: Suite) -> AsyncIterator[Any]:
    """The Processor of Encode → Prefill → Decode."""
    async with talking(suite.front.address) as one:
        yield one


@pytest.fixture(params=["front", "front_aggregated"])
async def either(request: pytest.FixtureRequest, suite: Suite) -> AsyncIterator[Any]:
    """Each Processor in turn."""
    async with talking(getattr(suite, request.param).address) as one:
        yield one
