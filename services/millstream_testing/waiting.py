"""Wait for a condition, never for a guessed time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]
"""What reading from a call answers after its last message."""


async def until(condition: Callable[[], bool | Awaitable[bool]], within_s: float = 10.0) -> None:
    """Return when ``condition`` holds; fail when it doesn't ``within_s``."""
    deadline = time.monotonic() + within_s
    while True:
        holds = condition()
        if holds if isinstance(holds, bool) else await holds:
            return
        assert time.monotonic() < deadline, f"not within {within_s} s"
        await asyncio.sleep(0.002)
