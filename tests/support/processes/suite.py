"""Start real service processes on loopback and stop them again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millstream_server.engines.torch_on_cpu import gpu_present
from tests.support.processes import forked
from tests.support.processes.ports import free_port

TICKET_KEY = secrets.token_hex(32)
# Many services on one machine: the port that metrics have by default would be the first one's only.
_DEFAULT_FLAGS: dict[str, object] = {"metrics_listen": ""}


@dataclass
class ServiceProcess:
    """One service in its own process and process group, its log in a file.

    It has no metrics port unless ``flags`` name one; a flag of None is left out. What is called
    engine_args goes behind `--`, and so does simulated_x, as the simulated engine's `--x`.
    """

    module: str
    flags: Mapping[str, object]
    log: Path
    port: int = field(default_factory=free_port)
    env: Mapping[str, str] = field(default_factory=dict)
    ca: bytes = b""
    """PEM of the CA whose certificate for 127.0.0.1 secures its port; empty: no TLS."""
    interpreter: bool = False
    """Start a new one, as a user's `python -m` does; else it may be forked (`processes.forked`)."""
    process: forked.Process | None = None
    _terminating: bool = False

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def channel(self) -> grpc.Channel:
        """Make a channel to its port."""
        if self.ca:
            return grpc.secure_channel(self.address, grpc.ssl_channel_credentials(self.ca))
        return grpc.insecure_channel(self.address)

    def aio_channel(self, options: Sequence[tuple[str, object]] = ()) -> grpc.aio.Channel:
        """Make a channel to its port, for asyncio."""
        if self.ca:
            trusted = grpc.ssl_channel_credentials(self.ca)
            return grpc.aio.secure_channel(self.address, trusted, options=options)
        return grpc.aio.insecure_channel(self.address, options=options)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> ServiceProcess:
        self._terminating = False
        arguments, behind = (
            ["--listen", self.address],
            str(self.flags.get("engine_args", "")).split(),
        )
        for name, value in (_DEFAULT_FLAGS | dict(self.flags)).items():
            if value is None or name == "engine_args":
                continue
            flag, to = name, arguments
            if name.startswith("simulated_"):
                flag, to = name.removeprefix("simulated_"), behind
            to += ["--" + flag.replace("_", "-"), str(value)]
        if behind:
            arguments += ["--", *behind]
        with self.log.open("ab") as log, Path(os.devnull).open("rb") as nothing:
            self.process = forked.start(
                self._kind,
                self.module,
                arguments,
                (nothing, log, log),
                {
                    # Several engines at once, on few cores.
                    "OMP_NUM_THREADS": "1",
                    # PyTorch's CUDA build, which `make setup` may have chosen, wants a GPU.
                    **({} if gpu_present() else {"MILLSTREAM_DEVICE": "cpu"}),
                    **os.environ,
                    "MILLSTREAM_TICKET_KEY": TICKET_KEY,
                    **self.env,
                },
                interpreter=self.interpreter,
            )
        return self

    @property
    def _kind(self) -> forked.Kind:
        engine = self.flags.get("engine")
        if engine == "vllm":
            return "vllm"
        return "sglang" if self.flags.get("model_path") and engine != "simulated" else "services"

    def wait_serving(self, timeout_s: float = 120) -> None:
        """Wait until health says SERVING; fails with the log when the process ends first."""
        deadline = time.monotonic() + timeout_s
        with self.channel() as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while time.monotonic() < deadline:
                assert self.process is not None
                if self.process.poll() is not None:
                    break
                with contextlib.suppress(grpc.RpcError):
                    answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=2)
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                time.sleep(0.05)
        raise AssertionError(self._not_serving())

    def _not_serving(self) -> str:
        return f"{self.module} is not serving:\n{self.log.read_text()[-12000:]}"

    async def until_serving(self, timeout_s: float = 120) -> None:
        """Do the same in a task, and touch gRPC only once the port is open.

        grpc.aio 1.85: while one channel of a busy process can't connect, calls that begin on its
        others may end with INTERNAL "Internal error from Core" or with CANCELLED.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.alive and not await self._port_is_open():
            await asyncio.sleep(0.05)
        async with self.aio_channel() as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while time.monotonic() < deadline and self.alive:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=2)
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                await asyncio.sleep(0.05)
        raise AssertionError(self._not_serving())

    async def _port_is_open(self) -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return False
        writer.close()
        return True

    def terminate(self) -> None:
        """SIGTERM, once: a second one would cut the drain short."""
        assert self.process is not None
        self._terminating = True
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    async def until_gone(self, timeout_s: float = 90) -> int:
        """Wait until the process has ended by itself; answers its exit code."""
        assert self.process is not None
        return await asyncio.to_thread(self.process.wait, timeout_s)

    def kill(self) -> None:
        """Kill -9 the whole group, as the kernel's OOM killer or a lost node would."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def stop(self, timeout_s: float = 20) -> int:
        """SIGTERM, wait; answers the exit code."""
        assert self.process is not None
        if not self._terminating:
            self.terminate()
        try:
            return self.process.wait(timeout_s)
        finally:
            self.kill()


@contextlib.contextmanager
def running(*services: ServiceProcess, timeout_s: float = 120) -> Iterator[None]:
    """Start services at once, wait for all, stop them in reverse order."""
    try:
        for service in services:
            service.start()
        for service in services:
            service.wait_serving(timeout_s=timeout_s)
        yield
    finally:
        stop_all(*services)


def stop_all(*services: ServiceProcess, timeout_s: float = 30) -> None:
    """SIGTERM to all at once, then wait for each."""
    started = [service for service in services if service.process is not None]
    for service in started:
        service.terminate()
    for service in started:
        service.stop(timeout_s)
