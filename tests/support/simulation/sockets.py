"""Sockets of the simulated network, as asyncio's streams use them."""

from __future__ import annotations

import asyncio
import contextvars
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.support.simulation.network import Direction, Network


class Listener:
    """What `asyncio.start_server` returns wraps this one."""

    def __init__(self, network: Network, make: Any, host: str, port: int) -> None:
        self._network = network
        self.make, self.host, self.port = make, host, port
        self.context = contextvars.copy_context()
        self.sockets = (self,)

    def getsockname(self) -> tuple[str, int]:
        return self.host, self.port

    def close(self) -> None:
        self._network.forget(self)

    async def wait_closed(self) -> None:
        pass


class Transport(asyncio.Transport):
    """One end of a byte stream."""

    def __init__(self, out: Direction, protocol: Any) -> None:
        super().__init__()
        self._out = out
        self._protocol = protocol
        self._closing = False

    def reads(self, direction: Direction) -> None:
        context = contextvars.copy_context()
        direction.deliver = lambda data: context.run(self._take, data)

    def _take(self, data: bytes | None) -> None:
        if self._closing:
            return
        if data is not None:
            self._protocol.data_received(data)
        else:
            self._closing = True
            self._protocol.connection_lost(None)

    def write(self, data: Any) -> None:
        if not self._closing:
            self._out.send(self._out.deliver, bytes(data))

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._out.send(self._out.deliver, None)
            self._out.link.network.loop.call_soon(self._protocol.connection_lost, None)

    abort = close

    def is_closing(self) -> bool:
        return self._closing

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def broken(self) -> None:
        if not self._closing:
            self._closing = True
            self._protocol.connection_lost(ConnectionResetError("the connection was reset"))
