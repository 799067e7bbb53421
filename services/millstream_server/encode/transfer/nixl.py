"""NIXL: the receiver reads the sender's memory, by RDMA between machines.

NIXL has no blocking wait and no descriptor to wait on: reads are polled, from the event loop. Its
agents take seconds to start: it is done in a thread when one is first wanted, and until then the
embeddings go inline.

Whoever has an agent's metadata may read and write what it registered. So a sender gives it only to
who shows a valid ticket.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import importlib.util
import secrets
import time
from collections.abc import Callable
from typing import Any

from millstream_server.encode.transfer.arena import Arena
from millstream_server.encode.transfer.store import Stored
from millstream_server.encode.transfer.ways import (
    Abilities,
    NixlOffer,
    Opening,
    WayError,
    copied,
    new_mapping,
)
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.0001, 0.002
_GIVEN_UP_S = 60.0
"""A read that runs so long never ends; its memory is not used again."""
_IDLE_BYTES = 128 << 20
"""Most registered memory that is kept for the next reads."""
_LEAST_BYTES = 4 << 20


def available() -> bool:
    """Return whether the package is installed."""
    return importlib.util.find_spec("nixl") is not None


class _Agent:
    """A NIXL agent with all its registered memory. Calls come from one thread."""

    def __init__(self, address: int = 0, nbytes: int = 0) -> None:
        """Start it, which blocks for a second; register memory to read from."""
        api: Any = importlib.import_module("nixl._api")
        config = api.nixl_agent_config(backends=["UCX"])
        self._agent: Any = api.nixl_agent(f"millstream-{secrets.token_hex(8)}", config)
        if "UCX" not in self._agent.backends:
            raise RuntimeError("NIXL has no UCX")
        if nbytes:
            self.register(address, nbytes)
        self.metadata: bytes = self._agent.get_agent_metadata()
        self._remotes: dict[bytes, Any] = {}

    def register(self, address: int, nbytes: int) -> Any:
        """Register memory of this process; returns what `deregister` takes."""
        return self._agent.register_memory([(address, nbytes, 0, "")], "DRAM")

    def deregister(self, registered: Any) -> None:
        self._agent.deregister_memory(registered)

    async def read(self, offer: NixlOffer, into: int, nbytes: int) -> None:
        """Read into registered memory; returns when all bytes have come."""
        agent = self._agent
        remote = self._remotes.get(offer.metadata)
        if remote is None:
            remote = self._remotes[offer.metadata] = agent.add_remote_agent(offer.metadata)
        handle = agent.initialize_xfer(
            "READ",
            agent.get_xfer_descs([(into, nbytes, 0)], "DRAM"),
            agent.get_xfer_descs([(offer.address, nbytes, 0)], "DRAM"),
            remote,
        )
        given_up_s = time.monotonic() + _GIVEN_UP_S
        wait_s = _FIRST_WAIT_S
        state = agent.transfer(handle)
        while state == "PROC":
            if time.monotonic() > given_up_s:
                raise TimeoutError("a read never ended")
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        if state != "DONE":
            raise WayError("nixl_state", str(state))

    def forget(self, metadata: bytes) -> None:
        remote = self._remotes.pop(metadata, None)
        if remote is not None:
            self._agent.remove_remote_agent(remote)


class _Starter:
    """Makes an agent in a thread, once; where that fails there is none from then on."""

    def __init__(self, make: Callable[[], _Agent]) -> None:
        self._make = make
        self._starting: asyncio.Task[_Agent | None] | None = None

    def begin(self) -> None:
        """Start it, unless that was done."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())

    @property
    def ready(self) -> _Agent | None:
        task = self._starting
        return task.result() if task and task.done() and not task.cancelled() else None

    async def _start(self) -> _Agent | None:
        try:
            return await asyncio.to_thread(self._make)
        except Exception as error:  # noqa: BLE001 - a vendor's code: without it there are other ways
            log.warning("NIXL doesn't start; using other ways", error=error)
            return None


# ---- the sender ----------------------------------------------------------------------------------


class NixlSender:
    """Lets receivers read an arena."""

    def __init__(self, arena: Arena) -> None:
        """Register the arena when it is first wanted."""
        self._arena = arena
        self._starter = _Starter(lambda: _Agent(arena.address, arena.nbytes))

    async def open(self, stored: Stored, abilities: Abilities) -> Opening | None:
        """Offer a pinned tensor; None: this receiver can't take it in this way."""
        if not abilities.nixl_metadata:
            return None
        self._starter.begin()
        agent = self._starter.ready
        if agent is None:
            return None
        return Opening(NixlOffer(agent.metadata, self._arena.address + stored.offset))


# ---- the receiver --------------------------------------------------------------------------------


class _Buffer:
    """Registered memory to read into."""

    def __init__(self, agent: _Agent, nbytes: int) -> None:
        self.nbytes = nbytes
        self.memory = new_mapping(nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.registered = agent.register(self.address, nbytes)


class NixlReceiver:
    """Reads from all senders into a pool of registered memory."""

    def __init__(self) -> None:
        self._starter = _Starter(_Agent)
        self._idle: list[_Buffer] = []
        self._lost: list[_Buffer] = []
        """Memory that NIXL may still write to."""
        self._reads: set[asyncio.Task[memoryview]] = set()

    @property
    def metadata(self) -> bytes:
        """The agent's metadata; empty until it has started."""
        agent = self._starter.ready
        return agent.metadata if agent else b""

    def begin(self) -> None:
        """Start the agent, for later."""
        self._starter.begin()

    async def read(self, offer: NixlOffer, nbytes: int) -> memoryview:
        """Return the bytes. Once it has begun a read goes on to its end, also when cancelled."""
        agent = self._starter.ready
        if agent is None:
            raise WayError("nixl_agent")
        read = asyncio.create_task(self._read(agent, offer, nbytes))
        self._reads.add(read)
        read.add_done_callback(self._ended)
        return await asyncio.shield(read)

    def forget(self, metadata: bytes) -> None:
        agent = self._starter.ready
        if agent is not None:
            try:
                agent.forget(metadata)
            except Exception as error:  # noqa: BLE001 - a vendor's code
                log.debug("NIXL can't forget a peer", error=error)

    async def _read(self, agent: _Agent, offer: NixlOffer, nbytes: int) -> memoryview:
        try:
            buffer = self._take(agent, nbytes)
        except Exception as error:  # a vendor's code
            raise WayError("nixl_memory", str(error)) from error
        try:
            await agent.read(offer, buffer.address, nbytes)
            with memoryview(buffer.memory) as whole, whole[:nbytes] as part:
                return await copied(part)
        except TimeoutError as error:
            self._lost.append(buffer)
            raise WayError("nixl_late", str(error)) from error
        except WayError:
            raise
        except Exception as error:  # a vendor's code
            raise WayError("nixl", type(error).__name__) from error
        finally:
            if buffer not in self._lost:
                self._give_back(agent, buffer)

    def _take(self, agent: _Agent, nbytes: int) -> _Buffer:
        fitting = [buffer for buffer in self._idle if buffer.nbytes >= nbytes]
        if fitting:
            buffer = min(fitting, key=lambda candidate: candidate.nbytes)
            self._idle.remove(buffer)
            return buffer
        return _Buffer(agent, max(_LEAST_BYTES, 1 << (nbytes - 1).bit_length()))

    def _give_back(self, agent: _Agent, buffer: _Buffer) -> None:
        if sum(idle.nbytes for idle in self._idle) + buffer.nbytes <= _IDLE_BYTES:
            self._idle.append(buffer)
        else:
            agent.deregister(buffer.registered)

    def _ended(self, read: asyncio.Task[memoryview]) -> None:
        self._reads.discard(read)
        if not read.cancelled():
            read.exception()  # seen: who waited for it may be gone
