"""Lets processes of multiprocessing's "spawn" be forked, from a copy of this one.

SGLang starts its scheduler and detokenizer with "spawn", and vLLM its core process. The copy is
made before the first thread of this process, and stays without: Python's own "forkserver", with the
copy in place of a new interpreter. Arguments are pickled, as for "spawn".
"""

from __future__ import annotations

import multiprocessing.context
import os
import signal
import socket
from collections.abc import Callable
from functools import partial
from multiprocessing import forkserver, popen_forkserver, spawn
from types import SimpleNamespace
from typing import Any

from millstream_server.runtime.forking.linux import (
    OwnUsersSocket,
    adopt_orphans,
    end_with_parent,
    show_as,
)

_PREPARE = spawn.prepare  # a process that is forked from a copy may make a copy of its own


def fork_instead_of_spawning(in_spawned: Callable[[], None]) -> None:
    """Let "spawn" fork from a copy of this process, which must have one thread.

    ``in_spawned`` runs first in each process that is started so; it has the environment of this
    process at that moment, as with "spawn".
    """
    adopt_orphans()  # who kills the copy can wait for what it forked
    with socket.socket(socket.AF_UNIX) as listener:
        address = f"\0millstream-fork-{os.getpid()}"
        listener.bind(address)
        listener.listen()
        alive, ours = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.close(ours)
            _serve(parent, listener.detach(), alive, in_spawned)
        os.close(alive)
    server: Any = forkserver._forkserver  # noqa: SLF001 - no other way
    server._forkserver_address = address  # noqa: SLF001
    server._forkserver_alive_fd = ours  # noqa: SLF001
    server._forkserver_pid = pid  # noqa: SLF001
    process: Any = multiprocessing.context.SpawnProcess
    process._Popen = staticmethod(popen_forkserver.Popen)  # noqa: SLF001
    # "spawn" hands over the environment of this moment, "forkserver" that of the copy.
    describe = spawn.get_preparation_data
    spawn.get_preparation_data = lambda name: {**describe(name), "environment": dict(os.environ)}


def _serve(parent: int, listener: int, alive: int, in_spawned: Callable[[], None]) -> None:
    """Be the copy; never returns."""
    os.dup2(2, 1)  # the output of a service may be read by a program, and NIXL prints
    end_with_parent(parent)
    show_as(f"millstream: forks the processes of {parent}")
    # How SGLang's processes report an exception: to their parent, which is this process here.
    signal.signal(signal.SIGQUIT, lambda *_: os.kill(parent, signal.SIGQUIT))
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGQUIT, signal.SIG_DFL))
    guarded = SimpleNamespace(AF_UNIX=socket.AF_UNIX, socket=OwnUsersSocket)
    forkserver.socket = guarded  # type: ignore[attr-defined]
    spawn.prepare = partial(_prepare, in_spawned)
    try:
        forkserver.main(listener, alive, [])
    finally:
        os._exit(0)


def _prepare(in_spawned: Callable[[], None], data: dict[str, Any]) -> None:
    os.environ.clear()
    os.environ.update(data.pop("environment"))
    in_spawned()
    _PREPARE(data)
