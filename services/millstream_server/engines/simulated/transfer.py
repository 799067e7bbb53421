"""The simulated engine's KV transfer: over TCP, matched by the ticket's room number.

Prefill listens; decode connects and sends its room number; when the room's prompt is ready, prefill
sends a digest in place of the KV cache: the prompt's length and last token, the numbers that follow
from its media, from the weight version and the adapter, and its data-parallel rank. The simulated
decode needs no more, and detects a mix-up with it.

With `SimulatedConfig.prefill_first` the same digest is the prefill's `Finish.engine_data`, and
nobody connects.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from millstream_server.engines.simulated import state
from millstream_server.engines.simulated.adapter import SimulatedConfig
from millstream_server.generation.request import Prompt
from millstream_server.generation.ticket import EngineData, KvTransfer, Ticket
from millstream_server.runtime.errors import KvTransferError

_ROOM = struct.Struct(">Q")
_DIGEST = struct.Struct(">QQI")
_FACTS = struct.Struct(">III")
"""The tensors' number, the data-parallel rank, the shift."""


def way(config: SimulatedConfig) -> KvTransfer:
    """Return how an engine hands off."""
    if config.prefill_first:
        return KvTransfer("simulated.prefill_first", prefill_first=True)
    return KvTransfer("simulated")


@dataclass(frozen=True, slots=True)
class Offer:
    """A computed prompt, and what computed it."""

    prompt: Prompt
    dp_rank: int = 0
    shift: int = 0
    """What weights and adapter add to the step (`engines.simulated.state`)."""

    def __bytes__(self) -> bytes:
        """Return what is sent in place of the KV cache."""
        tensors = state.of_tensors(self.prompt.media)
        return _digest(self.prompt) + _FACTS.pack(tensors, self.dp_rank, self.shift)

    def data(self, config: SimulatedConfig) -> EngineData:
        """Return what decode gets if prefill is first."""
        return EngineData(way(config).kind, bytes(self))


def _digest(prompt: Prompt) -> bytes:
    return _DIGEST.pack(len(prompt), prompt.token_ids[-1], state.of_digests(prompt.media))


class Bootstrap:
    """Prefill's side: offers prompts by room number."""

    def __init__(self) -> None:
        self._offers: defaultdict[int, asyncio.Future[bytes]] = defaultdict(
            asyncio.get_running_loop().create_future
        )
        self._taken: dict[int, Callable[[], None]] = {}
        self._server: asyncio.Server | None = None

    async def listen(self, host: str, port: int) -> int:
        self._server = await asyncio.start_server(self._serve, host, port)
        return int(self._server.sockets[0].getsockname()[1])

    async def hand_over(self, room: int, offer: Offer, timeout_s: float) -> None:
        """Offer a prompt's cache until decode has it.

        Raises:
            KvTransferError: none came in time.
        """
        taken = asyncio.Event()
        self.offer(room, offer, taken.set)
        try:
            async with asyncio.timeout(timeout_s):
                await taken.wait()
        except TimeoutError as error:
            raise KvTransferError("no decode worker came for the KV cache in time") from error
        finally:
            self.withdraw(room)

    def offer(self, room: int, offer: Offer, taken: Callable[[], None]) -> None:
        """Offer a prompt's cache; ``taken`` is called once decode has it."""
        self._taken[room] = taken
        offered = self._offers[room]
        if not offered.done():
            offered.set_result(bytes(offer))

    def withdraw(self, room: int) -> None:
        """Remove an offer; a decode worker that waits for it is disconnected."""
        self._taken.pop(room, None)
        offer = self._offers.pop(room, None)
        if offer and not offer.done():
            offer.cancel()

    async def close(self) -> None:
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


async def fetch(ticket: Ticket, prompt: Prompt, timeout_s: float, shift: int = 0) -> int:
    """Decode's side: wait for the prompt's cache; return the number of its media's tensors.

    Raises:
        KvTransferError: prefill isn't reachable, disconnected, took too long, or has another
        prompt, other weights or another rank than the ticket names (0 without one).
    """
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(
                ticket.bootstrap_host, ticket.bootstrap_port
            )
            with contextlib.closing(writer):
                writer.write(_ROOM.pack(ticket.room))
                sent = await reader.readexactly(_DIGEST.size + _FACTS.size)
    except TimeoutError as error:
        raise KvTransferError("the KV cache did not arrive from prefill in time") from error
    except (OSError, asyncio.IncompleteReadError) as error:
        raise KvTransferError("the prefill worker disconnected during the hand-off") from error
    return read(sent, ticket, prompt, shift)


def read(sent: bytes, ticket: Ticket, prompt: Prompt, shift: int = 0) -> int:
    """Check what came in place of the KV cache; return the number of its media's tensors.

    Raises:
        KvTransferError: as `fetch`, or it is nothing that a simulated prefill sends.
    """
    if len(sent) != _DIGEST.size + _FACTS.size:
        raise KvTransferError("the ticket has nothing from a prefill worker")
    if not sent.startswith(_digest(prompt)):
        raise KvTransferError("prefill and decode were given different prompts")
    tensors, dp_rank, prefill_shift = map(int, _FACTS.unpack_from(sent, _DIGEST.size))
    if dp_rank != (ticket.prefill_dp_rank or 0):
        raise KvTransferError(
            f"the ticket names the prefill's data-parallel rank {ticket.prefill_dp_rank}, "
            f"but rank {dp_rank} computed the prompt"
        )
    if shift != prefill_shift:
        raise KvTransferError("prefill and decode have different weights or adapters")
    return tensors
