"""A suite for images and video on simulated engines, each service a process of its own."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from millstream.v1 import processor_pb2, processor_pb2_grpc, worker_pb2, worker_pb2_grpc
from millstream_testing.waiting import until
from tests.support.media.embeddings import names_in_shared_memory
from tests.support.media.media_suite import chunk
from tests.support.processes.ports import free_port
from tests.support.processes.suite import ServiceProcess, running
from tests.support.processor.chats import Conversation, options, start, until_connected
from tests.support.telemetry.scraping import scrape

MODEL = "tiny"
CONTEXT_LENGTH = 8192
_VOCAB_SIZE = 1024
CHUNK_BYTES = 1 << 20
_DECODER = "millstream_server.media.decoding.child"


@dataclass
class MediaProcesses:
    """Services in front of one model; nothing runs before `running`."""

    folder: Path
    model: Path
    """Directory of a model that takes images."""
    services: dict[str, ServiceProcess] = field(default_factory=dict)

    def add_encode(self, name: str = "encode", **flags: object) -> ServiceProcess:
        """Add an encode worker with a simulated tower."""
        return self._add(name, "encode", {**self._common, "engine": "simulated", **flags})

    def add_prefill(self, **flags: object) -> ServiceProcess:
        """Add a prefill worker."""
        return self._add_engine("prefill", {"bootstrap_port": free_port(), **flags})

    def add_decode(self, **flags: object) -> ServiceProcess:
        """Add a decode worker, aggregated unless a flag says otherwise; its steps take 10 ms."""
        return self._add_engine("decode", {"simulated_step_s": 0.01, **flags})

    def add_pair(self) -> None:
        """Add prefill and decode apart."""
        self.add_prefill()
        self.add_decode(mode="disaggregated")

    def add_processor(self, name: str = "processor", **flags: object) -> ServiceProcess:
        """Add a Processor in front of all workers added so far."""
        workers = [s.address for s in self.services.values() if not s.module.endswith("processor")]
        settings = {"models": f"{MODEL}={self.model}", "workers": ",".join(workers)}
        return self._add(name, "processor", {"log_level": "warning", **settings, **flags})

    @property
    def _common(self) -> dict[str, object]:
        return {"model_path": self.model, "model_name": MODEL, "log_level": "warning"}

    def _add_engine(self, name: str, flags: dict[str, object]) -> ServiceProcess:
        engine = {
            "engine": "simulated",
            "context_length": CONTEXT_LENGTH,
            "simulated_vocab_size": _VOCAB_SIZE,
        }
        return self._add(name, name, {**self._common, **engine, **flags})

    def _add(self, name: str, module: str, flags: dict[str, object]) -> ServiceProcess:
        metrics = f"127.0.0.1:{free_port()}"
        service = ServiceProcess(
            f"millstream_server.{module}",
            {"metrics_listen": metrics, **flags},
            self.folder / f"{name}.log",
        )
        self.services[name] = service
        return service

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Start all, wait until they serve, stop all."""
        with running(*self.services.values()):
            yield

    @contextlib.asynccontextmanager
    async def client(self, processor: str = "processor") -> AsyncIterator[Any]:
        """Open a channel to a Processor, once it has every worker; yield a stub."""
        async with grpc.aio.insecure_channel(self.services[processor].address) as channel:
            stub: Any = processor_pb2_grpc.ProcessorServiceStub(channel)
            workers = [s for s in self.services.values() if not s.module.endswith("processor")]
            await until_connected(stub, len(workers))
            yield stub

    def shared_names(self) -> set[str]:
        """Return the names in /dev/shm that a service or a killed process has."""
        return names_in_shared_memory(s.pid for s in self.services.values() if s.alive)

    async def expect_nothing_left(self, pid: int, names: Collection[str]) -> None:
        """Wait until nothing is left of a killed service but the ``names`` of before."""
        await until(lambda: not decoders_of(pid))
        await until(lambda: self.shared_names() <= set(names))


async def open_requests(worker: ServiceProcess) -> int:
    """Ask a worker how many requests or items it has open."""
    async with grpc.aio.insecure_channel(worker.address) as channel:
        stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
        watch = stub.WatchLoad(worker_pb2.WatchLoadRequest())
        load = (await watch.read()).load
        watch.cancel()
        return int(load.running_requests + load.queued_requests)


async def metric(service: ServiceProcess, series: str, **labels: str) -> float:
    """Read one series."""
    port = int(str(service.flags["metrics_listen"]).rpartition(":")[2])
    return (await scrape(port)).value(series, **labels)


def decoders_of(pid: int) -> list[int]:
    """Find the processes that decode files for a service, also after its end."""
    found = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it has ended while we looked
            if process.name.isdigit():
                command = (process / "cmdline").read_text().split("\0")
                if _DECODER in command and command[command.index(_DECODER) + 1] == str(pid):
                    found.append(int(process.name))
    return found


def upload(upload_id: str, data: bytes, tail: bytes = b"") -> Iterator[processor_pb2.ChatRequest]:
    """Make the messages that send a file, ``data`` and ``tail``, in chunks."""
    total = len(data) + len(tail)
    for begin in range(0, len(data), CHUNK_BYTES):
        yield chunk(upload_id, data[begin : begin + CHUNK_BYTES], total)
    if tail:
        yield chunk(upload_id, tail, total)


async def text_chat(stub: Any, tokens: int) -> Conversation:
    """Start a chat without media, and read its first token."""
    chat = Conversation(stub)
    await chat.say(start("hi", opts=options(tokens, ignore_eos=True)))
    await chat.read()
    return chat
