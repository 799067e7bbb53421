"""A DNS server for headless services: it answers A queries with the addresses of ready pods."""

from __future__ import annotations

import asyncio
import ipaddress
import struct
from collections.abc import Callable, Sequence
from typing import Self

_A, _IN = 1, 1
_ANSWER, _AUTHORITATIVE, _NO_SUCH_NAME = 0x8000, 0x0400, 3


class DnsServer(asyncio.DatagramProtocol):
    """Answers on a UDP port of 127.0.0.1; an async context manager."""

    def __init__(self, lookup: Callable[[str], Sequence[str] | None]) -> None:
        """``lookup`` returns a name's IPv4 addresses; None: there is no such name."""
        self._lookup = lookup
        self._transport: asyncio.DatagramTransport | None = None

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(
            lambda: self, local_addr=("127.0.0.1", 0)
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._transport is not None
        self._transport.close()

    @property
    def address(self) -> str:
        assert self._transport is not None
        host, port = self._transport.get_extra_info("sockname")
        return f"{host}:{port}"

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        assert self._transport is not None
        (ident,) = struct.unpack_from("!H", data)
        name, end = _read_name(data)
        kind, _ = struct.unpack_from("!HH", data, end)
        found = self._lookup(name)
        records = b"".join(map(_record, found or ())) if kind == _A else b""
        count = len(found or ()) if kind == _A else 0
        flags = _ANSWER | _AUTHORITATIVE | (_NO_SUCH_NAME if found is None else 0)
        header = struct.pack("!HHHHHH", ident, flags, 1, count, 0, 0)
        self._transport.sendto(header + data[12 : end + 4] + records, addr)


def _read_name(query: bytes) -> tuple[str, int]:
    """Read the question's name; returns it and where it ends."""
    labels, at = [], 12
    while length := query[at]:
        labels.append(query[at + 1 : at + 1 + length].decode("ascii"))
        at += 1 + length
    return ".".join(labels), at + 1


def _record(address: str) -> bytes:
    # The name is the question's, at 12; the answer may be kept for 0 s.
    packed = ipaddress.IPv4Address(address).packed
    return struct.pack("!HHHIH", 0xC00C, _A, _IN, 0, len(packed)) + packed
