"""Starts and stops an `sgl.Engine` without blocking this process or changing its handlers."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib
import logging
import multiprocessing
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, TypeVar

from millstream_server.control.engine import Role
from millstream_server.engines.adapter import not_started
from millstream_server.engines.sglang import cpu as sglang_cpu
from millstream_server.engines.sglang.config import (
    SglangEngineConfig,
    engine_arguments,
    engine_environment,
)
from millstream_server.engines.sglang.importing import import_sglang
from millstream_server.engines.sglang.metrics import FILES
from millstream_server.runtime.errors import EngineFailedError


@contextlib.contextmanager
def replaced(module: Any, name: str, value: Callable[..., None]) -> Iterator[None]:
    """Replace a function of ``module`` during the ``with`` block."""
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


def keep_our_logging(*_args: object, **_options: object) -> None:
    """Take the place of SGLang's `configure_logger`, which replaces the root logger's handlers."""


T = TypeVar("T")
_PLUGIN = str(Path(__file__).parent / "resume" / "on_path")
_SCHEDULING = str(Path(__file__).parent / "scheduling" / "on_path")
_MEETING = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
_GROUP = contextlib.ExitStack()
"""The file by which SGLang's group of one process is made."""
_ENDING_POLL_S = 0.2
_DEATH_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """A running `sgl.Engine` and the values that the adapter reads from it."""

    engine: Any
    version: str
    vocab_size: int
    context_length: int
    total_tokens: int
    server_args: dict[str, Any]
    """As SGLang resolved them."""
    fake_bootstrap_host: str


class EngineThread:
    """The thread that builds an engine and runs as long as the engine.

    Building takes seconds to minutes, so it must not run on the event loop. And SGLang's processes
    get SIGKILL when their parent *thread* ends (PR_SET_PDEATHSIG), so a pool's thread doesn't work.

    `build` and `follow` raise EngineFailedError: it failed, and no process is left running.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="sglang")
        self._ended = threading.Event()
        self._build: asyncio.Future[Any] | None = None
        self._engine: Any = None

    async def build(self, config: SglangEngineConfig) -> BuiltEngine:
        """Import SGLang, start its processes and load the model."""
        return await self._run(config, _describe)

    async def follow(self, config: SglangEngineConfig) -> list[int]:
        """Do the same for a rank above 0; return its processes' ids."""
        return await self._run(config, lambda engine: list(engine.get_all_child_pids()))

    async def _run(self, config: SglangEngineConfig, read: Callable[[Any], T]) -> T:
        loop = asyncio.get_running_loop()
        building = loop.run_in_executor(self._executor, self._build_here, config, read, loop)
        self._build = building
        return await asyncio.shield(building)

    def _build_here(
        self,
        config: SglangEngineConfig,
        read: Callable[[Any], T],
        loop: asyncio.AbstractEventLoop,
    ) -> T:
        # SGLang binds its objects to the thread's event loop, which must be the caller's.
        asyncio.set_event_loop(loop)
        try:
            self._engine = _build(config, self._ended)
            return read(self._engine)
        except EngineFailedError:
            _clear_away()
            raise
        except Exception as error:  # SGLang may raise anything
            _clear_away()
            raise not_started("SGLang") from error
        finally:
            asyncio.set_event_loop(None)

    async def end(self) -> None:
        """Stop SGLang's processes, also during their start; then end the thread."""
        self._ended.set()
        if self._build is not None:
            while not self._build.done():
                # The constructor fails when the processes it waits for have ended.
                await asyncio.to_thread(kill_children)
                await asyncio.wait([self._build], timeout=_ENDING_POLL_S)
            if not self._build.cancelled() and self._build.exception() is None:
                await asyncio.to_thread(_shut_down, self._engine)
        self._executor.shutdown(wait=False)


def _build(config: SglangEngineConfig, ended: threading.Event) -> Any:
    os.environ.update(engine_environment(config))
    if config.computes_alone and _MEETING not in os.environ:
        _meet_in_a_file()
    if config.role is Role.PREFILL and config.node_rank == 0:
        config.check_bootstrap_port()  # SGLang would register with the server that has it
    if config.may_resume:
        _put_on_path(_PLUGIN)
    if config.engine_tokenizer or config.role.hands_off:
        _put_on_path(_SCHEDULING)
    device = config.resolved_device()
    engine_module = import_sglang("sglang.srt.entrypoints.engine", device)
    if device == "cpu":
        sglang_cpu.patch_sglang()
    fields = importlib.import_module("sglang.srt.server_args").ServerArgs.__struct_fields__
    arguments = engine_arguments(config, fields)
    if ended.is_set():
        raise EngineFailedError("The engine was closed while it started.")
    if config.metrics:
        FILES.open()
    logging.getLogger("sglang").setLevel(config.log_level.upper())
    with replaced(engine_module, "configure_logger", keep_our_logging):
        return engine_module.Engine(**arguments)


def _meet_in_a_file() -> None:
    """Let SGLang make its group of one process by a file: torch's store listens on all interfaces.

    Whoever reaches that may read and write it.
    """
    folder = tempfile.TemporaryDirectory(prefix="millstream-group-", ignore_cleanup_errors=True)
    os.environ[_MEETING] = f"file://{_GROUP.enter_context(folder)}/group"
    _GROUP.callback(os.environ.pop, _MEETING, None)


def _put_on_path(folder: str) -> None:
    """Let this process and those that it spawns from now on import from a folder."""
    inherited = os.environ.get("PYTHONPATH", "")
    if folder not in inherited.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, inherited)))
    if folder not in sys.path:
        sys.path.append(folder)


def _describe(engine: Any) -> BuiltEngine:
    scheduler = engine._scheduler_init_result.scheduler_infos[0]  # noqa: SLF001 - no other way
    utils = importlib.import_module("sglang.srt.disaggregation.utils")
    return BuiltEngine(
        engine=engine,
        version=str(importlib.import_module("sglang").__version__),
        vocab_size=int(engine.tokenizer_manager.model_config.vocab_size),
        # SGLang silently shortens max_new_tokens to max_req_len - prompt - 1, where max_req_len is
        # max_req_input_len + 5. The context length reported here avoids that.
        context_length=int(scheduler["max_req_input_len"]) + 4,
        total_tokens=int(scheduler["max_total_num_tokens"]),
        server_args=engine.server_args.resolved_dict(),
        fake_bootstrap_host=str(utils.FAKE_BOOTSTRAP_HOST),
    )


def _clear_away() -> None:
    kill_children()
    FILES.close()
    _GROUP.close()


def kill_children() -> None:
    """Kill every process this one has started, except Python's resource tracker.

    When this process ends, that tracker removes the killed processes' semaphores in /dev/shm.
    """
    psutil = importlib.import_module("psutil")
    tracker = resource_tracker._resource_tracker._pid  # type: ignore[attr-defined]  # noqa: SLF001
    children = [
        child for child in psutil.Process().children(recursive=True) if child.pid != tracker
    ]
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    for process in multiprocessing.active_children():
        process.join(_DEATH_TIMEOUT_S)
    psutil.wait_procs(children, timeout=_DEATH_TIMEOUT_S)


def _shut_down(engine: Any) -> None:
    atexit.unregister(engine.shutdown)
    manager = engine.tokenizer_manager  # None: of a rank above 0
    contexts = []
    if manager is not None:
        contexts = [engine.send_to_rpc.context, manager.recv_from_detokenizer.context]
    module = importlib.import_module("sglang.srt.entrypoints.engine")
    with replaced(module, "kill_process_tree", lambda *_args, **_kwargs: kill_children()):
        engine.shutdown()
    bootstrap_server = getattr(manager, "bootstrap_server", None)
    if bootstrap_server is not None:
        bootstrap_server.close()
    for context in contexts:
        context.destroy(linger=0)
    for path in _left_behind(engine):
        path.unlink(missing_ok=True)
    FILES.close()
    _GROUP.close()


def _left_behind(engine: Any) -> Iterator[Path]:
    """Yield the files that SGLang doesn't remove: a load snapshot and its IPC sockets."""
    reader = getattr(engine.tokenizer_manager, "load_snapshot_reader", None)
    snapshot = getattr(reader, "path", None)
    if snapshot is not None:
        yield Path(snapshot)
    ports = engine.port_args
    for name in dir(ports):
        value = getattr(ports, name)
        if isinstance(value, str) and value.startswith("ipc://"):
            yield Path(value.removeprefix("ipc://"))
