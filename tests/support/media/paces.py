"""How steadily a chat's tokens come, as its client sees them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from tests.support.media.media_processes import text_chat
from tests.support.processor.chats import CANCEL


@dataclass
class Pace:
    """Gaps between a stream's messages."""

    gaps_s: list[float] = field(default_factory=list)

    @property
    def p99_s(self) -> float:
        """The gap that one of a hundred exceeds."""
        return sorted(self.gaps_s)[int(len(self.gaps_s) * 0.99)]


@contextlib.asynccontextmanager
async def paced_chat(stub: Any, tokens: int = 7000) -> AsyncIterator[Pace]:
    """Run a chat without media while the block runs; it must be going on at the block's end."""
    chat, pace = await text_chat(stub, tokens), Pace()

    async def read() -> None:
        last = time.monotonic()
        while await chat.read():
            now = time.monotonic()
            pace.gaps_s.append(now - last)
            last = now

    reading = asyncio.ensure_future(read())
    try:
        yield pace
        assert not reading.done(), "the chat has ended"
    finally:
        await chat.say(CANCEL)
        await chat.call.done_writing()
        await reading
