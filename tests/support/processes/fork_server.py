"""A process that imports once and then forks one process a job, in milliseconds.

`python -m tests.support.processes.fork_server services|sglang|vllm LISTENER LIFE`;
`processes.forked` starts it and writes the jobs.
LISTENER is the number of an open SOCK_SEQPACKET socket: each connection brings one message, a job
as JSON, with four file descriptors: stdin, stdout, stderr, and the pipe that gets the process's
id and later its exit code. When the other end of LIFE closes, all that still runs is killed.

A forked process runs its module as `python -m` would, with the environment, folder, session and
streams that the job names. What differs from `python -m`: all is imported already.

SGLang starts its scheduler and detokenizer with multiprocessing's "spawn", and vLLM its core
process. In a process of these kinds they are forked, too, from a copy of the process made before
its first thread: this is Python's own "forkserver", with the copy in place of a new interpreter.
Arguments are pickled, as for "spawn".
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import importlib
import json
import multiprocessing.context
import os
import runpy
import selectors
import signal
import socket
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing import forkserver, popen_forkserver, spawn
from pathlib import Path
from typing import Any

PRELOAD_VARIABLE = "MILLSTREAM_TEST_PRELOAD"
"""In a job's environment: further modules for it and the processes that its engine starts."""

NESTED_VARIABLE = "MILLSTREAM_TEST_NESTED"
"""In a job's environment, with any value: the processes that SGLang starts will start others, as
its controller of data-parallel ranks does; those are forked, too."""

_JOB_BYTES = 1 << 18
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PRELOADED: Mapping[str, tuple[str, ...]] = {
    "services": (
        "millstream_server.cli.chat",
        "millstream_server.cli.main",
        "millstream_server.decode.app",
        "millstream_server.engines.simulated.engine",
        "millstream_server.processor.app",
        "millstream_server.processor.settings",
        "millstream_server.worker.app",
        "transformers",  # else a Processor would start a process that imports it
    ),
    "sglang": (
        "millstream_server.decode.app",
        "millstream_server.engines.sglang.engine",
        "millstream_server.runtime.lifecycle.main",
        "millstream_server.worker.app",
        "sglang.srt.entrypoints.engine",
        "sglang.srt.managers.detokenizer_manager",
        "sglang.srt.managers.scheduler",
        "sglang.srt.models.llama",
    ),
    "vllm": (
        "millstream_server.decode.app",
        "millstream_server.engines.vllm.engine",
        "millstream_server.runtime.lifecycle.main",
        "millstream_server.worker.app",
        "vllm.engine.arg_utils",
        "vllm.v1.engine.core_client",
        "vllm.v1.worker.cpu_worker",
        "vllm.model_executor.models.llama",
    ),
}


@dataclass(frozen=True)
class Job:
    """What `python -m` is told, and where."""

    module: str
    arguments: list[str]
    environment: dict[str, str]
    folder: str


@dataclass
class _Server:
    """The loop of the server: forks, and tells exit codes."""

    listener: socket.socket
    life: socket.socket
    children: dict[int, int] = field(default_factory=dict)
    """Open pipes by process id."""

    def until_forked(self) -> Job | None:
        """Fork per job; returns it in the new process, and None in the server at its end."""
        woken, wake = os.pipe()
        for end in (woken, wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        with selectors.DefaultSelector() as selector:
            for readable in (self.listener, self.life, woken):
                selector.register(readable, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if self.life in ready:
                    self._kill_all()
                    return None
                if woken in ready:
                    os.read(woken, 4096)
                    self._reap()
                if self.listener in ready and (job := self._next()):
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for unused in (woken, wake):
                        os.close(unused)
                    return job

    def _next(self) -> Job | None:
        """Fork for the next job; returns it in the new process, which has its streams only."""
        with self.listener.accept()[0] as client:
            message, pipes, _, _ = socket.recv_fds(client, _JOB_BYTES, 4)
        pid = os.fork()
        if pid == 0:
            os.setsid()  # before anybody can know the id and kill its group
            os.write(pipes[3], f"{os.getpid()}\n".encode())
            self.listener.close()
            self.life.close()
            for stream, pipe in enumerate(pipes[:3]):
                os.dup2(pipe, stream)
            for pipe in (*pipes, *self.children.values()):
                os.close(pipe)
            return Job(**json.loads(message))
        *streams, status = pipes
        for pipe in streams:
            os.close(pipe)
        self.children[pid] = status
        return None

    def _reap(self) -> None:
        """Tell the exit codes of the ended; grandchildren whose parent died end here, too."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                pipe = self.children.pop(pid, None)
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        os.write(pipe, f"{os.waitstatus_to_exitcode(status)}\n".encode())
                    os.close(pipe)

    def _kill_all(self) -> None:
        for pid in self.children:
            for kill in (os.killpg, os.kill):  # it may have no group yet
                with contextlib.suppress(ProcessLookupError):
                    kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)


def _preload(kind: str) -> None:
    policy = asyncio.get_event_loop_policy()
    if kind == "sglang":
        stand_in = importlib.import_module("millstream_server.engines.sglang.cpu")
        stand_in.activate()
    if kind == "vllm":
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # read when PyTorch is imported
        importlib.import_module("millstream_server.engines.torch_on_cpu").prepare()
        importlib.import_module("millstream_server.engines.vllm.nixl_on_cpu").install()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang tells what this machine lacks
        for name in _PRELOADED[kind]:
            importlib.import_module(name)
    if kind == "sglang":
        stand_in.patch_sglang()
        # It looks for the title's place now, and could not once the environment is changed.
        importlib.import_module("setproctitle").getproctitle()
    asyncio.set_event_loop_policy(policy)  # SGLang replaces it
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, (
        f"{threads} threads: a forked process would have one, and the others' locks"
    )
    gc.collect()
    gc.freeze()  # the pages stay shared


def _run(job: Job, kind: str) -> None:
    """Become what ``job`` asks for."""
    os.chdir(job.folder)
    os.environ.clear()
    os.environ.update(job.environment)
    if "PYTHONWARNINGS" in job.environment:
        warnings._processoptions(job.environment["PYTHONWARNINGS"].split(","))  # type: ignore[attr-defined]
    if kind == "sglang":
        stand_in = importlib.import_module("millstream_server.engines.sglang.cpu")
        inherited = job.environment.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(stand_in.ON_PATH), inherited)))
        stand_in.activate()
        for name in job.environment.get(PRELOAD_VARIABLE, "").split():
            importlib.import_module(name)
    if kind != "services":
        _fork_instead_of_spawning()
    if os.isatty(1):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.argv = [job.module, *job.arguments]
    runpy.run_module(job.module, run_name="__main__", alter_sys=True)


# ---- the processes that engines start --------------------------------------------------------


def fork_engine_processes(kind: str = "sglang") -> None:
    """Import in this interpreter what an engine's processes need; let them be forked from it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a pytest makes them errors, and the copy keeps that
        _preload(kind)
        _fork_instead_of_spawning()


def _fork_instead_of_spawning() -> None:
    """Let "spawn" fork from a copy of this process, which has one thread and stays so."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # who kills the copy can wait for what it forked
    with socket.socket(socket.AF_UNIX) as listener:
        address = f"\0millstream-fork-{os.getpid()}"
        listener.bind(address)
        listener.listen()
        alive, ours = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.close(ours)
            _serve_spawns(parent, listener.detach(), alive)
        os.close(alive)
    server: Any = forkserver._forkserver
    server._forkserver_address = address
    server._forkserver_alive_fd = ours
    server._forkserver_pid = pid
    process: Any = multiprocessing.context.SpawnProcess
    process._Popen = staticmethod(popen_forkserver.Popen)
    # "spawn" hands over the environment of this moment, "forkserver" that of the copy.
    describe = spawn.get_preparation_data
    spawn.get_preparation_data = lambda name: {**describe(name), "environment": dict(os.environ)}


def _serve_spawns(parent: int, listener: int, alive: int) -> None:
    """Be the copy; never returns."""
    os.dup2(2, 1)  # a job's stdout may be read by a test, and NIXL prints
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # How SGLang's processes report an exception: to their parent, which is this process here.
    signal.signal(signal.SIGQUIT, lambda *_: os.kill(parent, signal.SIGQUIT))
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGQUIT, signal.SIG_DFL))
    spawn.prepare = _prepare  # type: ignore[assignment]
    try:
        forkserver.main(listener, alive, [])
    finally:
        os._exit(0)


def _prepare(data: dict[str, Any], prepare: Any = spawn.prepare) -> None:
    os.environ.clear()
    os.environ.update(data.pop("environment"))
    # Read when first imported, which here was long ago.
    values: Any = importlib.import_module("prometheus_client.values")
    values.ValueClass = values.get_value_class()
    if (clip := os.environ.get("SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION")) is not None:
        policy: Any = importlib.import_module("sglang.srt.managers.schedule_policy")
        policy.CLIP_MAX_NEW_TOKENS = int(clip)
    if os.environ.pop(NESTED_VARIABLE, ""):
        _fork_instead_of_spawning()
    if "VLLM_WORKER_MULTIPROC_METHOD" in os.environ:  # as `engines/vllm/on_path` does
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    prepare(data)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def main() -> None:
    """Serve; a forked process leaves the loop here and runs its job as any main module."""
    kind, listener, life = sys.argv[1:]
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _preload(kind)
    server = _Server(socket.socket(fileno=int(listener)), socket.socket(fileno=int(life)))
    job = server.until_forked()
    if job is not None:
        _run(job, kind)


if __name__ == "__main__":
    main()
