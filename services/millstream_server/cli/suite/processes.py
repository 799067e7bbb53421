"""A suite's processes: starts, checks, restarts and drains them, and reads their logs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millstream_server.cli.client import connect
from millstream_server.cli.flags import Destination
from millstream_server.cli.suite.launching import Process
from millstream_server.cli.suite.plan import PlannedService

Launch = Callable[[Sequence[str], Mapping[str, str], IO[bytes]], Awaitable[Process]]
"""Starts a command with an environment and a file for its output, in a session of its own."""
TAIL_LINES = 15
# As `runtime.telemetry.log` writes it; no other line can look like this.
_PHASE = re.compile(r'^\S+ \S+ [A-Z]+ [\w.]+: phase phase=(?:"([^"]*)"|(\S+))', re.MULTILINE)
_HEALTH_TIMEOUT_S = 1.0
# signals.PORT_FAILED: its module needs packages that may be missing where `doctor` uses this one.
_MEANING = {
    4: "a request that gRPC can't read, with a :path that isn't UTF-8, ended its port "
    "(docs/troubleshooting.md)"
}
_BROKEN_BY_SIGNAL = {
    signal.SIGKILL: "killed by SIGKILL, by a user or because the machine ran out of memory",
    signal.SIGSEGV: "crashed (SIGSEGV)",
    signal.SIGABRT: "aborted itself (SIGABRT)",
}
_TICK_S = 0.25
_RESTART_DELAYS_S = (1.0, 2.0, 4.0, 8.0, 10.0)
_STEADY_S = 60.0
"""After serving this long a service's restart back-off is reset."""
_ABANDON_GRACE_S = 5.0
_DRAIN_LIMIT_S = 90.0
"""For hung processes: services end running requests themselves before that (--drain-s)."""


class Child:
    """A service's process; it can be started again after its end.

    It leads its own session: Ctrl-C in the terminal doesn't reach it, and its children can be
    killed with it. It is killed when this process ends.
    """

    def __init__(
        self,
        service: PlannedService,
        command: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        launch: Launch,
    ) -> None:
        """Prepare; ``launch`` starts ``command``, which begins with the program's full path."""
        self.service = service
        self.log = log
        self.phase = ""
        self.serving = False
        self.started_s = 0.0
        self.exit_code: int | None = None
        self._command = tuple(command)
        self._env = dict(env)
        self._launch = launch
        self._process: Process | None = None
        self._log_offset = 0

    def set_old_log_aside(self) -> None:
        """Rename the last run's log; an older one is replaced."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        if self.log.exists():
            self.log.replace(self.log.with_suffix(".log.old"))

    async def start(self) -> None:
        """Start the process; its output is appended to the log file."""
        self.phase, self.serving, self.exit_code = "starting", False, None
        self.started_s = time.monotonic()
        self._process = None
        with self.log.open("ab") as output:
            self._log_offset = output.tell()
            self._process = await self._launch(self._command, self._env, output)

    @property
    def pid(self) -> int:
        """Process id, 0 before the start."""
        return self._process.pid if self._process is not None else 0

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def ended(self) -> bool:
        """Whether it has ended since it was started."""
        return self._process is not None and self._process.returncode is not None

    async def wait(self) -> int:
        """Wait for the end, then kill its remaining children; return the exit code."""
        if self._process is None:
            return 0
        self.exit_code = await self._process.wait()
        self.serving = False
        self._signal_group(signal.SIGKILL)
        return self.exit_code

    def terminate(self) -> None:
        """Send SIGTERM: the process drains and stops its own children."""
        if self.running and self._process is not None:
            self._process.terminate()

    def kill(self) -> None:
        """Kill it and all its children."""
        if self.running:
            self._signal_group(signal.SIGKILL)

    def _signal_group(self, number: signal.Signals) -> None:
        # There may be no process left (EPERM on macOS).
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    async def check(self) -> None:
        self._read_log()
        self.serving = self.running and await is_serving(self.service.client_address)

    def _read_log(self) -> None:
        """Read the last phase from the log's new lines."""
        with self.log.open("rb") as file:
            file.seek(self._log_offset)
            new = file.read()
        complete = new[: new.rfind(b"\n") + 1]
        self._log_offset += len(complete)
        for match in _PHASE.finditer(complete.decode(errors="replace")):
            self.phase = match[1] or match[2] or ""

    def tail(self) -> list[str]:
        with self.log.open(encoding="utf-8", errors="replace") as file:
            return [line.rstrip("\n") for line in deque(file, maxlen=TAIL_LINES)]

    def ending(self) -> str:
        if self.exit_code is None or self.exit_code >= 0:
            why = _MEANING.get(self.exit_code or 0)
            return f"exited with code {self.exit_code}" + (f": {why}" if why else "")
        number = signal.Signals(-self.exit_code)
        return _BROKEN_BY_SIGNAL.get(number, f"was ended by {number.name}")


async def is_serving(address: str) -> bool:
    """Return whether grpc.health.v1 reports the whole server as SERVING."""
    try:
        async with connect(Destination(address)) as client:
            answer = await health_pb2_grpc.HealthStub(client.channel).Check(
                health_pb2.HealthCheckRequest(), timeout=_HEALTH_TIMEOUT_S
            )
    except (ValueError, grpc.aio.AioRpcError):  # the address may be none
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


class StartError(Exception):
    """A process ended before the suite served."""

    def __init__(self, child: Child) -> None:
        super().__init__(f"{child.service.name} {child.ending()}")
        self.child = child


class Suite:
    """A suite's processes, workers first and the Processor last.

    Call `start`, then `watch` until cancelled, then `drain`; or `abandon` after a start that failed
    or was interrupted.
    """

    def __init__(self, children: Sequence[Child], notify: Callable[[str], None]) -> None:
        self.children = tuple(children)
        self._notify = notify

    async def start(self, show: Callable[[Sequence[Child]], None]) -> None:
        """Start all at once and wait until all serve; ``show`` is called a few times a second.

        Raises:
            StartError: one of them ended.
        """
        for child in self.children:
            child.set_old_log_aside()
        starts = [asyncio.create_task(child.start()) for child in self.children]
        try:
            while not all(child.serving for child in self.children):
                await asyncio.sleep(_TICK_S)
                await self._check(show)
                for start in starts:
                    if start.done():
                        start.result()
        finally:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)

    async def _check(self, show: Callable[[Sequence[Child]], None]) -> None:
        await asyncio.gather(*(child.check() for child in self.children if child.pid))
        show(self.children)
        for child in self.children:
            if child.ended:
                await child.wait()
                raise StartError(child)

    async def watch(self) -> None:
        """Restart processes that end, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for child in self.children:
                group.create_task(self._keep_running(child))

    async def _keep_running(self, child: Child) -> None:
        failures = 0
        while True:
            served_since = time.monotonic()
            await child.wait()
            if time.monotonic() - served_since > _STEADY_S:
                failures = 0
            delay_s = _RESTART_DELAYS_S[min(failures, len(_RESTART_DELAYS_S) - 1)]
            failures += 1
            what = f"{child.service.name} {child.ending()}; starting it again in {delay_s:g} s"
            self._notify(f"{what}. Last lines of {child.log}:")
            for line in child.tail():
                self._notify(f"  {line}")
            await asyncio.sleep(delay_s)
            await child.start()
            await self._wait_until_serving(child)

    async def _wait_until_serving(self, child: Child) -> None:
        """Wait until it serves or has ended again."""
        while child.running:
            await child.check()
            if child.serving:
                took_s = time.monotonic() - child.started_s
                self._notify(f"{child.service.name} serves again after {took_s:.1f} s")
                return
            await asyncio.sleep(_TICK_S)

    async def drain(self, force: asyncio.Event) -> bool:
        """Let running requests finish: first the Processor, then all workers.

        ``force`` kills the rest. Return whether all ended by themselves.
        """
        *workers, front = self.children
        clean = await self._end([front], force, "waiting for the processor to finish what it runs")
        names = ", ".join(worker.service.name for worker in workers)
        return await self._end(workers, force, f"waiting for {names} to end") and clean

    async def _end(self, children: Sequence[Child], force: asyncio.Event, doing: str) -> bool:
        running = [child for child in children if child.running]
        if not running:
            return True
        if not force.is_set():
            self._notify(f"{doing} (Ctrl-C again kills)")
            for child in running:
                child.terminate()
        ended = asyncio.gather(*(child.wait() for child in running))
        forced = asyncio.ensure_future(force.wait())
        either: list[asyncio.Future[Any]] = [ended, forced]
        await asyncio.wait(either, timeout=_DRAIN_LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
        forced.cancel()
        clean = ended.done()
        for child in running:
            if child.running:
                self._notify(f"killing {child.service.name}")
                child.kill()
        await ended
        return clean

    async def abandon(self) -> None:
        """End a suite that doesn't serve yet: it has no requests, so a short grace is enough."""
        running = [child for child in self.children if child.running]
        for child in running:
            child.terminate()
        ended = asyncio.gather(*(child.wait() for child in running))
        await asyncio.wait([ended], timeout=_ABANDON_GRACE_S)
        for child in running:
            child.kill()
        await ended
