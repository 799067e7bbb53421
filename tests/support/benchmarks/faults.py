"""Faults of a worker: of its processes, of its connections, of the disk that its log is on."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.processes.suite import ServiceProcess
from tests.support.wire.relay import Relay

_REFUSED_S = 1.0
_STARTED_S = 300.0


class Fault(enum.Enum):
    """What happens, and what ends it."""

    KILLED = "kill -9, then started again"
    STOPPED = "SIGSTOP of all its processes until the chats have ended"
    ENGINE_STOPPED = "SIGSTOP of SGLang's scheduler until the chats have ended, or for a time"
    CUT = "connections reset, and refused for a second"
    SILENT = "connections that carry no byte until the chats have ended"
    DISK_FULL = "a full disk for all logs until the chats have ended"


@dataclass(frozen=True)
class Victim:
    """A worker, and the relay by which its Processor reaches it."""

    worker: ServiceProcess
    relay: Relay

    async def suffer(self, fault: Fault, chats_ended: asyncio.Event, stopped_s: float) -> None:
        """Return when the fault is over; a scheduler is stopped for ``stopped_s`` at most."""
        match fault:
            case Fault.KILLED:
                await self._die()
            case Fault.STOPPED:
                with _stopped(self._processes()):
                    await chats_ended.wait()
            case Fault.ENGINE_STOPPED:
                schedulers = [p for p in self._processes() if "scheduler" in " ".join(p.cmdline())]
                assert schedulers, [p.cmdline() for p in self._processes()]
                with _stopped(schedulers), contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(chats_ended.wait(), stopped_s)
            case Fault.CUT:
                self.relay.cut()
                await asyncio.sleep(_REFUSED_S)
                self.relay.flow()
            case Fault.SILENT:
                self.relay.fall_silent()
                await chats_ended.wait()
                self.relay.flow()
            case Fault.DISK_FULL:
                with _filled(self.worker.log.parent):
                    await chats_ended.wait()

    def _processes(self) -> list[psutil.Process]:
        own = psutil.Process(self.worker.pid)
        return [own, *own.children(recursive=True)]

    async def _die(self) -> None:
        os.kill(self.worker.pid, signal.SIGKILL)
        await asyncio.to_thread(self.worker.kill)  # what it has started, too
        self.worker.start()
        await self.worker.until_serving(_STARTED_S)


@contextlib.contextmanager
def _stopped(processes: Sequence[psutil.Process]) -> Iterator[None]:
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Mount 4 MiB of memory at ``folder``; give False where this process may not."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)]
    mounted = not subprocess.run(mount, check=False, capture_output=True).returncode
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def _filled(disk: Path) -> Iterator[None]:
    filler = disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(b"\0" * 512)
    assert os.statvfs(disk).f_bavail == 0, f"{disk} isn't full"
    try:
        yield
    finally:
        filler.unlink()
