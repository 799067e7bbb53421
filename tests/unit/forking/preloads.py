"""What the fork servers of these tests import."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace

from millstream_server.runtime.forking.preload import Preload
from millstream_server.runtime.forking.spawning import fork_instead_of_spawning

_LONG_S = 60.0


def _in_service() -> None:
    os.environ["TOLD_HOOK"] = "service"


def _in_spawned() -> None:
    os.environ["TOLD_HOOK"] = "spawned"


def _in_spawned_that_spawns() -> None:
    _in_spawned()
    fork_instead_of_spawning(_in_spawned_that_spawns)


def _start_thread() -> None:
    threading.Thread(target=time.sleep, args=(_LONG_S,), daemon=True).start()


GOOD = Preload(modules=("this",), in_service=_in_service, in_spawned=_in_spawned)
NESTED = replace(GOOD, in_spawned=_in_spawned_that_spawns)
UNKNOWN = Preload(modules=("no_such_module",))
THREADED = Preload(modules=(), before=_start_thread)
SLOW = Preload(modules=(), before=lambda: time.sleep(_LONG_S))
