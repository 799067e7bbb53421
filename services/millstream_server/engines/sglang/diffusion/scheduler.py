"""SGLang's diffusion engine and its scheduler processes: started, watched, killed, replaced."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import logging
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from typing import Any

from millstream_server.engines.adapter import not_started
from millstream_server.engines.sglang import cpu as sglang_cpu
from millstream_server.engines.sglang.diffusion import child
from millstream_server.engines.sglang.diffusion.child import StepReport, Stop
from millstream_server.engines.sglang.diffusion.config import (
    SglangDiffuserConfig,
    generator_arguments,
)
from millstream_server.engines.sglang.importing import import_sglang
from millstream_server.engines.sglang.launch import keep_our_logging, replaced
from millstream_server.runtime.errors import EngineFailedError
from millstream_server.runtime.telemetry.log import get_log


class Channel:
    """One pipe to each rank; the first rank's brings the reports.

    The pipes end with the processes: replaced ones get a new channel.
    """

    def __init__(
        self,
        ranks: int,
        loop: asyncio.AbstractEventLoop,
        on_report: Callable[[StepReport], None],
    ) -> None:
        """Open the pipes; ``on_report`` is called on ``loop``."""
        pairs = [Pipe() for _ in range(ranks)]
        self._ours: list[Connection] = [ours for ours, _ in pairs]
        self.theirs: list[Connection] = [theirs for _, theirs in pairs]
        """The scheduler processes' ends, in the order of their ranks."""
        self._loop = loop
        self._on_report = on_report
        self._thread = threading.Thread(target=self._read, name="sglang-steps", daemon=True)

    def listen(self) -> None:
        """Receive reports; to be called once the processes have their ends."""
        self._close_theirs()
        self._thread.start()

    def _close_theirs(self) -> None:
        for connection in self.theirs:
            connection.close()

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                report = self._ours[0].recv()
                try:
                    self._loop.call_soon_threadsafe(self._on_report, report)
                except RuntimeError:  # the loop is closed
                    return

    def stop(self, stop: Stop) -> None:
        """End a request. It never blocks: a message is small, and there is one per request."""
        for connection in self._ours:
            with contextlib.suppress(BrokenPipeError, ConnectionError):  # the process has ended
                connection.send(stop)

    def close(self) -> None:
        """Close the pipes; the processes have ended, or never got theirs."""
        self._close_theirs()
        if self._thread.ident is not None:
            self._thread.join()
        for connection in self._ours:
            connection.close()


_RUNTIME = "sglang.multimodal_gen.runtime"
_GENERATOR = f"{_RUNTIME}.entrypoints.diffusion_generator"
_PROCESS_NAME = "sglang-diffusionWorker-"
_ENDING_POLL_S = 0.2
_DEATH_TIMEOUT_S = 60.0

log = get_log(__name__)


class Scheduler:
    """A `DiffGenerator` and its processes.

    One thread starts them and lives as long as they do: they get SIGKILL when their parent thread
    ends (PR_SET_PDEATHSIG). So they also end with the worker, however it ends.

    `start`, `supervise` and `usable` raise EngineFailedError: the processes couldn't be started, so
    that none is left, or ended too often, or it was closed.
    """

    def __init__(
        self,
        config: SglangDiffuserConfig,
        on_report: Callable[[StepReport], None],
        on_loss: Callable[[], None],
    ) -> None:
        """Start nothing yet. Both are called on the event loop; ``on_loss`` once per start."""
        self._config = config
        self._on_report = on_report
        self._on_loss = on_loss
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="sglang-diffusion")
        self._ended = threading.Event()
        self._launch: asyncio.Future[None] | None = None
        self._channel: Channel | None = None
        self._pidfds: list[int] = []
        self._usable = asyncio.Event()
        self._losses: deque[float] = deque()
        self._restart: asyncio.Task[None] | None = None
        self._on_failure: Callable[[EngineFailedError], Awaitable[None]] | None = None
        self.fault: EngineFailedError | None = None
        """Why it runs no more jobs."""
        self.generator: Any = None
        """The `DiffGenerator`, once started."""

    async def start(self) -> None:
        """Start the processes and load the model."""
        loop = asyncio.get_running_loop()
        await self.kill()
        self._launch = loop.run_in_executor(self._executor, self._start_here, loop)
        await asyncio.shield(self._launch)
        for process in self.generator.local_scheduler_process:
            self._watch(process.pid)

    def _watch(self, pid: int) -> None:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError as error:
            raise EngineFailedError("SGLang's process ended at once.") from error
        self._pidfds.append(descriptor)
        asyncio.get_running_loop().add_reader(descriptor, self._lost, pid)

    def supervise(self, on_failure: Callable[[EngineFailedError], Awaitable[None]]) -> None:
        """Let jobs come, and start the processes again when one ends, but not too often."""
        if self.fault is not None:
            raise self.fault
        self._on_failure = on_failure
        self._usable.set()

    async def usable(self) -> None:
        """Wait until the processes are there."""
        await self._usable.wait()
        if self.fault is not None:
            raise self.fault

    def _lost(self, pid: int) -> None:
        log.warning("a process of SGLang ended", pid=pid)
        self._unwatch()
        self._usable.clear()
        self._on_loss()
        if self._on_failure is None:
            self.fault = EngineFailedError("A process of the engine ended while it started.")
        elif self.fault is None:
            self._restart = asyncio.ensure_future(self._start_again(self._on_failure))

    async def _start_again(
        self, on_failure: Callable[[EngineFailedError], Awaitable[None]]
    ) -> None:
        limit, window_s = self._config.max_restarts, self._config.restart_window_s
        now_s = asyncio.get_running_loop().time
        while True:
            self._losses.append(now_s())
            while self._losses[0] < now_s() - window_s:
                self._losses.popleft()
            if len(self._losses) > limit:
                break
            log.warning("SGLang is started again", restart=len(self._losses), of=limit)
            with contextlib.suppress(EngineFailedError):
                await self.start()
                self._usable.set()
                return
        self.fault = EngineFailedError(
            f"The engine ended more than {limit} times within {window_s:g} s."
        )
        self._usable.set()
        await on_failure(self.fault)

    def _unwatch(self) -> None:
        while self._pidfds:
            descriptor = self._pidfds.pop()
            asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)

    def _start_here(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            self._channel = Channel(self._config.num_gpus, loop, self._on_report)
            self._start_processes(self._channel)
            self._channel.listen()
        except EngineFailedError:
            self._kill_here()
            raise
        except Exception as error:  # SGLang may raise anything
            self._kill_here()
            log.warning("SGLang could not be started", error=error)
            raise not_started("SGLang") from error

    def _start_processes(self, channel: Channel) -> None:
        first = self.generator is None
        module = import_sglang(_GENERATOR, self._config.resolved_device())
        if first:
            if self._config.resolved_device() == "cpu":
                sglang_cpu.patch_diffusion()
            logging.getLogger("sglang").setLevel(self._config.log_level.upper())
        launch: Any = importlib.import_module(f"{_RUNTIME}.launch_server")
        server_args: Any = importlib.import_module(f"{_RUNTIME}.server_args.server_args")
        if self._ended.is_set():
            raise EngineFailedError("The engine was closed while it started.")
        ours = functools.partial(child.run, channel.theirs)
        with (
            replaced(launch, "bootstrap_scheduler_process", ours),
            replaced(launch, "configure_logger", keep_our_logging),
            replaced(server_args, "configure_logger", keep_our_logging),
        ):
            if first:
                registry: Any = importlib.import_module("sglang.multimodal_gen.registry")
                knows = registry.has_registered_diffusion_model_path
                arguments = generator_arguments(self._config, knows)
                self.generator = module.DiffGenerator.from_pretrained(**arguments)
            else:
                self.generator.local_scheduler_process = launch.launch_server(
                    self.generator.server_args, launch_http_server=False
                )

    def stop(self, stop: Stop) -> None:
        if self._channel is not None:
            self._channel.stop(stop)

    def kill_now(self) -> None:
        """Kill the processes without waiting for their end; ``on_loss`` will be called."""
        for process in _processes():
            process.kill()

    async def kill(self) -> None:
        """Kill the processes, and wait for their end."""
        self._unwatch()
        await asyncio.to_thread(self._kill_here)

    def _kill_here(self) -> None:
        _kill_processes()
        if self.generator is not None:
            self.generator.local_scheduler_process = None
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    async def close(self) -> None:
        """Stop the processes, also during their start; then end the thread."""
        self.fault = self.fault or EngineFailedError("The engine was closed.")
        self._on_loss()
        self._usable.set()
        if self._restart is not None:
            self._restart.cancel()
        self._ended.set()
        while self._launch is not None and not self._launch.done():
            # The launch fails when the processes it waits for have ended.
            await asyncio.to_thread(_kill_processes)
            await asyncio.wait([self._launch], timeout=_ENDING_POLL_S)
        await self.kill()
        if self.generator is not None:
            await asyncio.to_thread(self.generator.shutdown)
        self._executor.shutdown(wait=False)


def _processes() -> list[multiprocessing.process.BaseProcess]:
    return [each for each in multiprocessing.active_children() if _PROCESS_NAME in each.name]


def _kill_processes() -> None:
    """Kill the schedulers and what they have started; they are joined then."""
    psutil: Any = importlib.import_module("psutil")
    processes = _processes()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            for descendant in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    descendant.kill()
        process.kill()
    for process in processes:
        process.join(_DEATH_TIMEOUT_S)
