"""Workers of vLLM and of SGLang, and Processors over them, in processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil

from millstream.v1 import processor_pb2_grpc
from tests.support.processes.ports import free_port
from tests.support.processes.suite import ServiceProcess, stop_all
from tests.support.processor.chats import until_connected
from tests.support.wire.long_streams import LoadWatch, load_of

_STARTS_S = 120.0


@dataclass
class Fleet:
    """A pair and a worker of each engine, and a Processor over the pairs, both or vLLM's alone."""

    workers: dict[str, ServiceProcess]
    fronts: dict[str, ServiceProcess]

    @contextlib.asynccontextmanager
    async def front(self, name: str) -> AsyncIterator[Any]:
        async with grpc.aio.insecure_channel(self.fronts[name].address) as channel:
            await channel.channel_ready()  # deadlines are spent on requests alone
            yield processor_pb2_grpc.ProcessorServiceStub(channel)

    @contextlib.asynccontextmanager
    async def loads(self) -> AsyncIterator[tuple[LoadWatch, LoadWatch]]:
        """Follow vLLM's prefill and decode worker; both are idle."""
        prefill, decode = (self.workers[name] for name in ("vllm prefill", "vllm decode"))
        async with load_of(prefill.address) as first, load_of(decode.address) as second:
            await asyncio.gather(first.idle(30), second.idle(30))
            yield first, second

    @contextlib.asynccontextmanager
    async def restarted(self, name: str) -> AsyncIterator[None]:
        """Start a worker after the block, which kills it; wait until the Processors have it."""
        try:
            yield
        finally:
            self.workers[name].kill()
            self.workers[name].start()
            await self.workers[name].until_serving(_STARTS_S)
            for front, count in (("vllm", 2), ("all of vllm", 3)):
                async with self.front(front) as stub:
                    await until_connected(stub, count)

    @contextlib.asynccontextmanager
    async def frozen(self, *names: str) -> AsyncIterator[None]:
        """Stop the engines of these workers, so that no request there ends during the block."""
        parents = [psutil.Process(self.workers[name].pid) for name in names]
        stopped = [each for parent in parents for each in parent.children(recursive=True)]
        try:
            for each in stopped:
                each.suspend()
            yield
        finally:
            for each in stopped:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.resume()


def _worker(model: Path, log: Path, engine: str, role: str) -> ServiceProcess:
    flags: dict[str, object] = {
        "engine": engine,
        "model_path": model,
        "model_name": "tiny",
        "max_total_tokens": 8192,
        "log_level": "warning",
        "metrics_listen": f"127.0.0.1:{free_port()}",
    }
    if role == "prefill":
        flags["bootstrap_port"] = free_port()
        if engine == "vllm":
            flags["engine_args"] = "--max-num-batched-tokens 16 --no-enable-prefix-caching"
    elif role == "decode":
        flags["mode"] = "disaggregated"
    module = "prefill" if role == "prefill" else "decode"
    return ServiceProcess(f"millstream_server.{module}", flags, log / f"{engine}-{role}.log")


@contextlib.contextmanager
def started_fleet(model: Path, log: Path) -> Iterator[Fleet]:
    """Start the fleet, with its logs in a folder."""
    workers = {
        f"{engine} {role}": _worker(model, log, engine, role)
        for engine in ("vllm", "sglang")
        for role in ("prefill", "decode", "whole")
    }
    addresses = {name: worker.address for name, worker in workers.items()}
    fronts = {
        name: ServiceProcess(
            "millstream_server.processor",
            {
                "models": f"tiny={model}",
                "workers": ",".join(at for who, at in addresses.items() if who in which),
                "policy": "kv_aware",
                "log_level": "warning",
                "metrics_listen": f"127.0.0.1:{free_port()}",
            },
            log / f"front-{name}.log",
        )
        for name, which in {
            "pairs": {who for who in workers if "whole" not in who},
            "whole": {"vllm whole", "sglang whole"},
            "vllm": {"vllm prefill", "vllm decode"},
            "all of vllm": {"vllm prefill", "vllm decode", "vllm whole"},
        }.items()
    }
    everything = [*workers.values(), *fronts.values()]
    try:
        for service in everything:
            service.start()
        for service in everything:
            service.wait_serving(timeout_s=240)
        yield Fleet(workers, fronts)
    finally:
        stop_all(*everything)
