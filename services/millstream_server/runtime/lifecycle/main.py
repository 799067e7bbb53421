"""The life of a service's process: its start from settings, its stop, what nothing catches."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NoReturn, TypeVar

import uvloop

from millstream_server.runtime import settings
from millstream_server.runtime.lifecycle.python import wrong_python
from millstream_server.runtime.lifecycle.server import Server
from millstream_server.runtime.lifecycle.service_settings import ServiceSettings
from millstream_server.runtime.lifecycle.stall_watch import StallWatch
from millstream_server.runtime.memory import give_back_freed_memory, out_of_memory_kills
from millstream_server.runtime.rpc.grpc_server import plain_grpc_log
from millstream_server.runtime.telemetry.log import configure, get_log

log = get_log(__name__)

_YOUNG_OBJECTS = 10_000
"""New objects between two garbage collections; requests leave hardly any cycles behind.

With Python's 700 a busy Processor spends 2 % of its time on collections that find nothing.
"""

S = TypeVar("S", bound=ServiceSettings)
T = TypeVar("T")


def main(
    settings_cls: type[S],
    app: Callable[[S], Coroutine[Any, Any, int]],
    *,
    prog: str,
    description: str,
) -> NoReturn:
    """Read settings, run the app on a new event loop, exit with the app's code.

    Exit codes: 0 stopped by a signal, 1 failed, 2 a setting is wrong, 3 stopped by a signal with
    requests cut off, 4 gRPC served its port no more, 137 failed, a process was killed for memory.
    """
    if why := wrong_python():
        raise SystemExit(f"{prog}: {why}")
    # Objects made by imports live as long as the process: exclude them from garbage collection.
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS)
    give_back_freed_memory()
    loaded = settings.load(settings_cls, prog=prog, description=description)
    configure(loaded.log_level, loaded.log_format)
    if unread := settings.unread_variables():
        log.warning("variables that no program reads", variables=", ".join(unread))
    plain_grpc_log()
    killed = out_of_memory_kills()
    try:
        code = uvloop.run(_logged(app(loaded)))
    except settings.SettingsError as error:
        sys.stderr.write(f"{prog}: {error}\n")
        code = 2
    except OSError as error:
        log.error("the service failed", reason=error)
        code = FAILED
    if code == FAILED and (count := out_of_memory_kills() - killed) > 0:
        log.error("the kernel killed processes of this container for memory", processes=count)
        code = KILLED
    raise SystemExit(code)


async def _logged(app: Coroutine[Any, Any, int]) -> int:
    log_uncaught(asyncio.get_running_loop())
    async with StallWatch():
        return await app


# ---- the stop: SIGTERM and SIGINT ----------------------------------------------------------------

DRAINED, FAILED, CUT_OFF, PORT_FAILED, KILLED = 0, 1, 3, 4, 137
"""Exit codes of a service; 2 is a wrong setting."""
_STOP_GRACE_S = 0.2
_LAST_FRAMES_S = 0.5
"""After a failure: longest wait until the terminal frames of open requests are sent."""


class Signals:
    """Handles SIGTERM and SIGINT on the running event loop, from its construction on.

    The first signal starts the drain, the second cuts it short.
    """

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._caught)

    def _caught(self) -> None:
        (self.second if self.first.is_set() else self.first).set()

    async def unless(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Run ``work`` until it ends or the first signal comes; None: the signal came first."""
        working = asyncio.ensure_future(work)
        waiting = asyncio.ensure_future(self.first.wait())
        try:
            await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            waiting.cancel()
            if not working.done():
                working.cancel()
                await asyncio.wait({working})


async def until_signal(
    server: Server,
    signals: Signals,
    drain: Callable[[], Awaitable[bool]],
    failed: asyncio.Future[Any],
) -> int:
    """Serve until the first signal, then drain; or until something fails. Return the exit code.

    ``drain`` returns whether all work ended. A second signal or ``failed`` cuts it short.
    Exit codes: 0 drained, 1 the service failed, 3 requests were cut off, 4 gRPC's port failed.
    """
    waits: list[asyncio.Future[Any]] = [_wait(signals.first), _wait(server.died)]
    await asyncio.wait({*waits, failed}, return_when=asyncio.FIRST_COMPLETED)
    server.begin_drain()
    clean = False
    if failed.done():
        await asyncio.sleep(_LAST_FRAMES_S)
    else:
        log.phase("draining")
        draining, hurry = asyncio.ensure_future(drain()), _wait(signals.second)
        waits += [draining, hurry]
        await asyncio.wait({draining, hurry, failed}, return_when=asyncio.FIRST_COMPLETED)
        clean = draining.done() and draining.result()
    for wait in waits:
        wait.cancel()
    await server.stop(_STOP_GRACE_S)
    log.phase("stopped", clean=clean)
    if failed.done() or server.died.is_set():
        return FAILED if failed.done() else PORT_FAILED
    return DRAINED if clean else CUT_OFF


def _wait(event: asyncio.Event) -> asyncio.Future[Any]:
    return asyncio.ensure_future(event.wait())


# ---- what nothing catches ------------------------------------------------------------------------

_LONGEST = 200


def log_uncaught(loop: asyncio.AbstractEventLoop) -> None:
    """Log what is raised where nothing catches it: in callbacks, lost tasks, threads, destructors.

    Python prints these with a traceback each, however many there are.
    """
    loop.set_exception_handler(_in_loop)
    sys.unraisablehook = _in_destructor
    threading.excepthook = _in_thread


def _in_loop(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    source = next((context[key] for key in ("task", "future", "handle") if key in context), "-")
    log.error(
        "uncaught in the event loop",
        error=context.get("exception"),
        what=context.get("message", "-"),
        where=str(source)[:_LONGEST],
    )


def _in_destructor(args: sys.UnraisableHookArgs) -> None:
    log.error(
        "uncaught where nothing can be raised",
        error=args.exc_value,
        what=args.err_msg or "Exception ignored in",
        where=repr(args.object)[:_LONGEST],
    )


def _in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_type is not SystemExit:
        name = args.thread.name if args.thread else "-"
        log.error("uncaught in a thread", error=args.exc_value, thread=name)
