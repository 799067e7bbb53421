"""A whole suite of real processes on simulated engines, each with a log of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millstream.v1 import processor_pb2, processor_pb2_grpc
from millstream_testing.waiting import until
from tests.conftest import ALPHABET_TEMPLATE
from tests.support.benchmarks.verdict import Verdict
from tests.support.models import vision_models
from tests.support.models.models import byte_level_model
from tests.support.processes.ports import free_port
from tests.support.processes.processes import Footprint, complaints
from tests.support.processes.suite import ServiceProcess, running
from tests.support.wire.long_streams import load_of

MODEL = "tiny"
CONTEXT_LENGTH = 512
VOCAB_SIZE = 440
ALPHABET = "".join(map(chr, range(ord("A"), ord("~") + 1)))
"""What every chat is answered, as far as it was asked to go."""
# Warnings that tell of a leak, and that Python keeps to itself by default.
_ENV = {"PYTHONWARNINGS": "default::ResourceWarning"}


@dataclass
class SimulatedSuite:
    """Workers and Processors; nothing runs before `running`."""

    folder: Path
    flags: Mapping[str, object] = field(default_factory=dict)
    """For every worker: the engine's timing, say."""
    env: Mapping[str, str] = field(default_factory=dict)
    services: dict[str, ServiceProcess] = field(default_factory=dict)
    models: dict[str, list[str]] = field(default_factory=dict)
    """Addresses of the workers of each model."""
    directories: dict[str, Path] = field(default_factory=dict)
    """Models with files of their own; all others share a small tokenizer."""

    def add_worker(
        self, name: str, module: str = "decode", model: str = MODEL, **flags: object
    ) -> ServiceProcess:
        """Add one; aggregated unless told otherwise."""
        settings = {
            "engine": "simulated",
            "model_name": model,
            "context_length": CONTEXT_LENGTH,
            "simulated_vocab_size": VOCAB_SIZE,
            "log_level": "warning",
        }
        worker = self._add(name, module, {**settings, **self.flags, **flags})
        self.models.setdefault(model, []).append(worker.address)
        return worker

    def add_pair(self, model: str = MODEL, *, prefill: int = 1, decode: int = 1) -> None:
        """Add workers that share the work: prefill and decode apart."""
        for i in range(prefill):
            name = f"prefill-{i + 1}"
            self.add_worker(name, "prefill", model, bootstrap_port=free_port())
        for i in range(decode):
            self.add_worker(f"decode-{i + 1}", model=model, mode="disaggregated")

    def add_encode_worker(self, name: str, **flags: object) -> ServiceProcess:
        """Add one that no Processor knows, with a simulated tower."""
        return self._add(name, "encode", {"engine": "simulated", "log_level": "warning", **flags})

    def add_embedding_worker(self, name: str, **flags: object) -> ServiceProcess:
        """Add one that no Processor knows, with a simulated model."""
        return self._add(
            name, "embedding", {"engine": "simulated", "log_level": "warning", **flags}
        )

    def add_diffusion_worker(self, name: str, **flags: object) -> ServiceProcess:
        """Add one that no Processor knows; its simulated model makes images."""
        return self._add(
            name, "diffusion", {"engine": "simulated", "log_level": "warning", **flags}
        )

    def add_media_workers(self, model: str, directory: Path) -> None:
        """Add an encode worker and an aggregated one, for a model that takes images."""
        self.directories[model] = directory
        encode = self.add_encode_worker(
            "encode-1", model_path=directory, model_name=model, **self.flags
        )
        self.models.setdefault(model, []).append(encode.address)
        self.add_worker(
            "media-1",
            model=model,
            encode_media="false",
            model_path=directory,
            simulated_vocab_size=vision_models.VOCAB_SIZE,
        )

    def add_processor(self, name: str, **flags: object) -> ServiceProcess:
        """Add one in front of all workers added so far."""
        model = self.folder / "model"
        if not model.exists():
            byte_level_model(model, tokenizer_config={"chat_template": ALPHABET_TEMPLATE})
        settings = {
            "models": ",".join(
                f"{name}={self.directories.get(name, model)}" for name in self.models
            ),
            "workers": ",".join(address for found in self.models.values() for address in found),
            "log_level": "warning",
        }
        return self._add(name, "processor", {**settings, **flags})

    def _add(self, name: str, module: str, flags: Mapping[str, object]) -> ServiceProcess:
        log = self.folder / f"{name}.log"
        service = ServiceProcess(
            f"millstream_server.{module}", flags, log, env={**_ENV, **self.env}
        )
        self.services[name] = service
        return service

    @property
    def processors(self) -> dict[str, ServiceProcess]:
        return {n: s for n, s in self.services.items() if s.module.endswith("processor")}

    @property
    def workers(self) -> dict[str, ServiceProcess]:
        return {n: s for n, s in self.services.items() if not s.module.endswith("processor")}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Start all, wait until they serve, stop all."""
        with running(*self.services.values()):
            yield

    async def until_connected(self) -> None:
        """Wait until every Processor has every worker."""
        for processor in self.processors.values():
            async with processor.aio_channel() as channel:
                stub: Any = processor_pb2_grpc.ProcessorServiceStub(channel)
                await until(lambda stub=stub: self._connected(stub), 60)  # type: ignore[misc]

    async def _connected(self, stub: Any) -> bool:
        listed = await stub.ListModels(processor_pb2.ListModelsRequest(), wait_for_ready=True)
        found = {m.name: sum(w.connected for w in m.workers) for m in listed.models}
        return found == {name: len(workers) for name, workers in self.models.items()}

    def footprints(self) -> dict[str, Footprint]:
        """Look at every process that lives."""
        return {name: Footprint.of(s.pid) for name, s in self.services.items() if s.alive}

    # ---- what must hold when the load has gone ---------------------------------------------------

    async def expect_idle(self, verdict: Verdict, within_s: float = 10.0) -> None:
        """Every worker reports that nothing runs, queues or holds a KV block."""
        for name, worker in self.workers.items():
            try:
                async with load_of(worker.address) as load:
                    await load.idle(within_s)
            except AssertionError as error:
                verdict.broken.append(f"{name} still has work: {error}")

    async def expect_no_leak(
        self, verdict: Verdict, before: Mapping[str, Footprint], slack: int = 6
    ) -> None:
        """Files, sockets and threads are back to what they were, within ``slack``."""

        def leaks() -> dict[str, str]:
            now = self.footprints()
            found = {name: now[name].leaked(before[name], slack) for name in now if name in before}
            return {name: text for name, text in found.items() if text}

        with contextlib.suppress(AssertionError):
            await until(lambda: not leaks(), 10.0)
        verdict.broken += [f"{name} holds {text}" for name, text in leaks().items()]

    def expect_no_complaints(self, verdict: Verdict) -> None:
        """No log holds a word of lost tasks, tracebacks or errors."""
        for name, service in self.services.items():
            found = complaints(service.log.read_text())
            verdict.broken += [f"log of {name}: {line}" for line in found]

    async def stop(self, verdict: Verdict) -> None:
        """SIGTERM all; each must end with exit code 0: nothing was left open."""
        for service in self.services.values():
            service.terminate()
        for name, service in self.services.items():
            code = await asyncio.to_thread(service.stop, 60)
            verdict.expect(code == 0, f"{name} ended with exit code {code}, not 0")


def aggregated(folder: Path, *, workers: int, processors: int, **flags: object) -> SimulatedSuite:
    """Make a suite whose workers run prompts and tokens both; ``flags`` are the workers'."""
    suite = SimulatedSuite(folder, flags)
    for i in range(workers):
        suite.add_worker(f"worker-{i + 1}")
    for i in range(processors):
        suite.add_processor(f"processor-{i + 1}")
    return suite


@contextlib.asynccontextmanager
async def channels_to(service: ServiceProcess, count: int) -> AsyncIterator[list[Any]]:
    """Open channels that share no connection and retry nothing; answers stubs."""
    async with contextlib.AsyncExitStack() as stack:
        stubs: list[Any] = []
        for _ in range(count):
            channel = service.aio_channel(
                [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
            )
            await stack.enter_async_context(channel)
            stubs.append(processor_pb2_grpc.ProcessorServiceStub(channel))
        yield stubs
