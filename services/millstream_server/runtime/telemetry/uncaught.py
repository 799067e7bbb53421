"""Failures that no code of ours catches are logged, as events with bounds, not printed."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any

from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)

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
