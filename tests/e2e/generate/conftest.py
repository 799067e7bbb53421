"""Every kind of generation on real engines, with the demo models, behind one Processor."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from millstream.v1 import diffusion_pb2_grpc
from millstream_client import NO_RETRY, Client
from millstream_testing.waiting import until
from tests.support.engines.bare_pictures import PROMPT, BarePipeline
from tests.support.processes.ports import free_port
from tests.support.processes.suite import ServiceProcess, running
from tests.support.telemetry.otlp_collector import Collector, Received, collecting
from tests.support.telemetry.scraping import scrape
from tests.support.worker.diffusion_worker import Stream

DEMO = Path(__file__).parents[3] / "demo"
DRAWING, DLLM, EMBEDDER, RERANKER = "drawing", "dllm", "embedder", "reranker"
SIZE, STEPS, GUIDANCE = 64, 6, 3.0
IMAGE: dict[str, Any] = {
    "prompt": PROMPT,
    "model": DRAWING,
    "width": SIZE,
    "height": SIZE,
    "steps": STEPS,
    "guidance_scale": GUIDANCE,
}
"""What images are made with: few steps, as a test needs no fine picture."""
# Spans leave soon, not after five seconds.
_SOON = {"OTEL_BSP_SCHEDULE_DELAY": "100", "SGLANG_OTLP_EXPORTER_SCHEDULE_DELAY_MILLIS": "100"}


def model_of(name: str) -> Path:
    """Return a demo model's directory."""
    return DEMO / name / "model"


@dataclass(frozen=True)
class Suite:
    """The running services."""

    collector: Collector
    workers: dict[str, ServiceProcess]
    """By model."""
    front: ServiceProcess

    async def steps(self) -> int:
        """Return how many denoising steps the image worker has run."""
        port = int(str(self.workers[DRAWING].flags["metrics_listen"]).rpartition(":")[2])
        return int((await scrape(port)).value("millstream_diffusion_steps_total"))

    async def spans(
        self, trace_id: str, expected: set[tuple[str, str]]
    ) -> dict[tuple[str, str], Received]:
        """Wait for spans of these services and names; return all of the trace."""

        def found() -> dict[tuple[str, str], Received]:
            spans = [span for span in self.collector.spans if span.trace_id == trace_id]
            return {(span.service, span.name): span for span in spans}

        await until(lambda: expected <= found().keys(), 30)
        return found()


def make_suite(collector: Collector, logs: Path) -> Suite:
    """Make the services, and start none."""
    sent = {"otlp_endpoint": f"http://{collector.address}"}

    def worker(name: str, module: str, **flags: object) -> ServiceProcess:
        settings = {**sent, "model_path": model_of(name), "model_name": name, **flags}
        log = logs / f"{name}.log"
        return ServiceProcess(f"millstream_server.{module}", settings, log, env=_SOON)

    text = {"kind": "text", "dllm_algorithm": "LowConfidence", "max_total_tokens": 4096}
    metrics = f"127.0.0.1:{free_port()}"
    workers = {
        DRAWING: worker(DRAWING, "diffusion", kind="image", metrics_listen=metrics),
        DLLM: worker(DLLM, "diffusion", **text),
        EMBEDDER: worker(EMBEDDER, "embedding"),
        RERANKER: worker(RERANKER, "embedding"),
    }
    models = [DRAWING, *(f"{name}={model_of(name)}" for name in (DLLM, EMBEDDER, RERANKER))]
    addresses = ",".join(one.address for one in workers.values())
    flags = {**sent, "models": ",".join(models), "workers": addresses}
    front = ServiceProcess("millstream_server.processor", flags, logs / "front.log", env=_SOON)
    return Suite(collector, workers, front)


@pytest.fixture(scope="package")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    """Four workers and a Processor."""
    with collecting() as collector:
        made = make_suite(collector, tmp_path_factory.mktemp("logs"))
        with running(*made.workers.values(), made.front):
            yield made


@pytest.fixture(scope="package")
def bare_images(suite: Suite) -> list[str]:
    """Digests of the images of the seeds 0 to 4 by the pipeline itself, without Millstream."""
    del suite  # asked for so that the pipeline is loaded while nothing else starts
    pipeline = BarePipeline(
        model_of(DRAWING), width=SIZE, height=SIZE, steps=STEPS, guidance_scale=GUIDANCE
    )
    try:
        pipeline.wait_ready()
        digests: list[str] = pipeline.make(5)["sha256"]
    finally:
        pipeline.close()
    assert len(set(digests)) == 5, "else the comparison would be worthless"
    return digests


@pytest.fixture
async def client(suite: Suite) -> AsyncIterator[Client]:
    """The client library, without retries."""
    async with Client(suite.front.address, retry=NO_RETRY) as one:
        yield one


@contextlib.asynccontextmanager
async def image_stream(suite: Suite, *, reads: bool = True) -> AsyncIterator[Stream]:
    """Open a stream of one client, with a connection of its own, to the Processor."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(suite.front.address, options) as channel:
        stream = Stream(diffusion_pb2_grpc.DiffusionServiceStub(channel))
        if reads:
            stream.read_on()
        try:
            yield stream
        finally:
            await stream.close()


@pytest.fixture
async def images(suite: Suite) -> AsyncIterator[Stream]:
    """A stream of GenerateImage to the Processor."""
    async with image_stream(suite) as stream:
        yield stream
