"""A client's messages on a slot stream, until the server shuts down."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from millstream_server.runtime.errors import UnavailableError
from millstream_server.runtime.lifecycle.drain import OpenWork

MessageT = TypeVar("MessageT")

_HALF_CLOSE_S = 1.0
"""How long a client that was told of the shutdown may send further requests."""


class ClientMessages(Generic[MessageT]):
    """Reads on for a second after a shutdown was announced; requests read by then still run.

    A worker would wait until its callers close their streams. A client may never do it.
    """

    def __init__(self, messages: AsyncIterator[MessageT], work: OpenWork) -> None:
        """Read ``messages`` until ``work`` leaves."""
        self._messages = messages
        self._work = work
        self._until_s: float | None = None
        self._timeout: asyncio.Timeout | None = None
        self._cut = False

    def check(self) -> None:
        """Check that the client closed its side itself; call it when all requests have ended.

        Raises:
            UnavailableError: reading was ended by the shutdown.
        """
        if self._cut:
            raise UnavailableError(
                "this server is shutting down; continue on another one", retry_delay_s=0.1
            )

    async def read(self) -> AsyncIterator[MessageT]:
        """Yield the messages."""
        with self._told():
            while (message := await self._next()) is not None:
                yield message

    @contextmanager
    def _told(self) -> Iterator[None]:
        undo = self._work.when_leaving(self._leave)
        try:
            yield
        finally:
            undo()

    def _leave(self) -> None:
        self._until_s = asyncio.get_running_loop().time() + _HALF_CLOSE_S
        if self._timeout is not None:
            self._timeout.reschedule(self._until_s)

    async def _next(self) -> MessageT | None:
        try:
            async with asyncio.timeout_at(self._until_s) as self._timeout:
                return await anext(self._messages, None)
        except TimeoutError:
            self._cut = True
            return None
        finally:
            self._timeout = None
