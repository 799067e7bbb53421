"""Start real service processes on loopback and stop them again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TICKET_KEY = secrets.token_hex(32)


def free_port() -> int:
    """Find a port nobody uses just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class ServiceProcess:
    """One service in its own process and process group, its log in a file."""

    module: str
    flags: Mapping[str, object]
    log: Path
    port: int = field(default_factory=free_port)
    env: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    _terminating: bool = False

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> ServiceProcess:
        self._terminating = False
        command = [sys.executable, "-m", self.module, "--listen", self.address]
        for name, value in self.flags.items():
            command += ["--" + name.replace("_", "-"), str(value)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env={
                    # Several engines at once, on few cores.
                    "OMP_NUM_THREADS": "1",
                    **os.environ,
                    "MILLSTREAM_TICKET_KEY": TICKET_KEY,
                    **self.env,
                },
                start_new_session=True,
            )
        return self

    def wait_serving(self, timeout_s: float = 120) -> None:
        """Wait until health says SERVING; fails with the log when the process ends first."""
        deadline = time.monotonic() + timeout_s
        with grpc.insecure_channel(self.address) as channel:
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
        message = f"{self.module} is not serving:\n{self.log.read_text()[-4000:]}"
        raise AssertionError(message)

    async def until_serving(self, timeout_s: float = 120) -> None:
        await asyncio.to_thread(self.wait_serving, timeout_s)

    def terminate(self) -> None:
        """SIGTERM, once: a second one would cut the drain short."""
        assert self.process is not None
        self._terminating = True
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

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
def running(*services: ServiceProcess) -> Iterator[None]:
    """Start services at once, wait for all, stop them in reverse order."""
    try:
        for service in services:
            service.start()
        for service in services:
            service.wait_serving()
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
