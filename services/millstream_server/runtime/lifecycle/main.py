"""The entry point that every service's `__main__` calls."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar

import uvloop

from millstream_server.runtime import settings
from millstream_server.runtime.lifecycle.memory import give_back_freed_memory
from millstream_server.runtime.lifecycle.service_settings import ServiceSettings
from millstream_server.runtime.rpc.grpc_server import plain_grpc_log
from millstream_server.runtime.telemetry import log
from millstream_server.runtime.telemetry.uncaught import log_uncaught

_log = log.get_log(__name__)
S = TypeVar("S", bound=ServiceSettings)


def main(
    settings_cls: type[S],
    app: Callable[[S], Coroutine[Any, Any, int]],
    *,
    prog: str,
    description: str,
) -> NoReturn:
    """Read settings, run the app on a new event loop, exit with the app's code.

    Exit codes: 0 stopped by a signal, 1 failed, 2 a setting is wrong, 3 stopped by a signal with
    requests cut off, 4 gRPC served its port no more.
    """
    # Objects made by imports live as long as the process: exclude them from garbage collection.
    gc.collect()
    gc.freeze()
    give_back_freed_memory()
    loaded = settings.load(settings_cls, prog=prog, description=description)
    log.configure(loaded.log_level, loaded.log_format)
    plain_grpc_log()
    try:
        code = uvloop.run(_logged(app(loaded)))
    except settings.SettingsError as error:
        sys.stderr.write(f"{prog}: {error}\n")
        code = 2
    except OSError as error:
        _log.error("the service failed", reason=error)
        code = 1
    raise SystemExit(code)


async def _logged(app: Coroutine[Any, Any, int]) -> int:
    log_uncaught(asyncio.get_running_loop())
    return await app
