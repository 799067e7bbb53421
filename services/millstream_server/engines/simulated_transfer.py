"""The simulated engine's KV transfer: a rendezvous by room number over TCP, between real processes.

Prefill listens; decode connects and names its room; when the room's prompt is ready, prefill sends
a digest that stands for the KV cache (the prompt's length and last token), which is all that the
simulated decode rule needs, and enough to notice a mix-up.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections import defaultdict
from collections.abc import Callable, Sequence

from millstream_server.engines.base import KvHandoff
from millstream_server.runtime.errors import KvTransferError

_ROOM = struct.Struct(">Q")
_DIGEST = struct.Struct(">QQ")


def _digest(token_ids: Sequence[int]) -> bytes:
    return _DIGEST.pack(len(token_ids), token_ids[-1])


class Bootstrap:
    """Prefill's side: offers prompts, by room, to whoever comes for them."""

    def __init__(self) -> None:
        """Offer nothing yet."""
        self._offers: defaultdict[int, asyncio.Future[bytes]] = defaultdict(
            asyncio.get_running_loop().create_future
        )
        self._taken: dict[int, Callable[[], None]] = {}
        self._server: asyncio.Server | None = None

    async def listen(self, host: str, port: int) -> int:
        """Start listening; answers the port."""
        self._server = await asyncio.start_server(self._serve, host, port)
        return int(self._server.sockets[0].getsockname()[1])

    def offer(self, room: int, token_ids: Sequence[int], taken: Callable[[], None]) -> None:
        """Hold a prompt's cache ready; ``taken`` is called once decode has it."""
        self._taken[room] = taken
        offer = self._offers[room]
        if not offer.done():
            offer.set_result(_digest(token_ids))

    def withdraw(self, room: int) -> None:
        """Forget an offer; a decode worker that waits for it is disconnected."""
        self._taken.pop(room, None)
        offer = self._offers.pop(room, None)
        if offer and not offer.done():
            offer.cancel()

    async def close(self) -> None:
        """Stop listening."""
        if self._server:
            self._server.close()
            for room in list(self._offers):
                self.withdraw(room)
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        room = None
        try:
            (room,) = _ROOM.unpack(await reader.readexactly(_ROOM.size))
            gone = asyncio.ensure_future(reader.read(1))
            offer = self._offers[room]
            await asyncio.wait({gone, offer}, return_when=asyncio.FIRST_COMPLETED)
            gone.cancel()
            if offer.done() and not offer.cancelled():
                writer.write(offer.result())
                await writer.drain()
                taken = self._taken.pop(room, None)
                if taken:
                    taken()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            if room is not None:
                self._offers.pop(room, None)
            writer.close()


async def fetch(handoff: KvHandoff, token_ids: Sequence[int], timeout_s: float) -> None:
    """Decode's side: wait for the prompt's cache.

    Raises:
        KvTransferError: prefill is not there, left, took too long, or held another prompt.
    """
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(
                handoff.bootstrap_host, handoff.bootstrap_port
            )
            with contextlib.closing(writer):
                writer.write(_ROOM.pack(handoff.room))
                digest = await reader.readexactly(_DIGEST.size)
    except TimeoutError as error:
        raise KvTransferError("the KV cache did not arrive from prefill in time") from error
    except (OSError, asyncio.IncompleteReadError) as error:
        raise KvTransferError("the prefill worker went away during the hand-off") from error
    if digest != _digest(token_ids):
        raise KvTransferError("prefill and decode were given different prompts")
