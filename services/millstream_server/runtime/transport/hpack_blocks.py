"""HPACK that keeps blocks: most are like the last one, on a connection of a client that is busy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpack import Decoder, Encoder
from hpack.hpack import encode_integer

from millstream_server.runtime.transport.headers import Header, RequestHead

_MOST_KEPT, _LONGEST_KEPT = 16, 64
"""Header blocks that are kept, and the bytes and headers of a request's."""
_LONGEST_SENT = 128
"""Bytes of a response's: a load report's take 100."""


class KeepingEncoder(Encoder):
    """Without Huffman coding: for a load report that takes 10 us and saves 20 bytes.

    A block that changed nothing in the table is kept: it stays right until something does.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[Any, bytes] = {}

    def encode(self, headers: Any, huffman: bool = False) -> bytes:  # noqa: FBT001, FBT002 - hpack's
        if self.table_size_changes:
            self._kept.clear()
            return super().encode(headers, huffman)
        key = tuple(headers)
        block = self._kept.get(key)
        if block is None:
            before = _state(self.header_table)
            block = super().encode(headers, huffman)
            short = len(block) <= _LONGEST_SENT
            changed = _changed(self.header_table, before)
            _keep(self._kept, key, block, short=short, changed=changed)
        return block

    @staticmethod
    def encode_once(headers: Sequence[Header]) -> bytes:
        """Encode headers whose values hardly come again; the table isn't changed (RFC 7541, 6.2.2).

        In the table they would drive out the others, and no block could be kept.
        """
        return b"".join([b"\0" + _text(name) + _text(value) for name, value in headers])


def _text(text: bytes) -> bytes:
    return bytes(encode_integer(len(text), 7)) + text


class _Headers(list[Any]):
    """What a block that is kept means, and what its reader has made of that."""

    head: RequestHead | None = None


class KeepingDecoder(Decoder):
    """Keeps what blocks mean until something changes the table: most are like the last one."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[bytes, _Headers] = {}
        self.known: _Headers | None = None
        """What the last block means, if one like it was kept."""

    def decode(self, data: bytes, raw: bool = False) -> Any:  # noqa: FBT001, FBT002 - hpack's
        block = bytes(data)
        headers = self.known = self._kept.get(block)
        if headers is None:
            before = _state(self.header_table)
            headers = _Headers(super().decode(block, raw))
            short = len(block) <= _LONGEST_KEPT and len(headers) <= _LONGEST_KEPT
            changed = _changed(self.header_table, before)
            _keep(self._kept, block, headers, short=short, changed=changed)
        return headers

    def find(self, block: bytes) -> _Headers | None:
        """Return what a block means that is kept and whose reader has made something of it."""
        headers = self._kept.get(block)
        if headers is None or headers.head is None:
            return None
        self.known = headers
        return headers


def _state(table: Any) -> tuple[int, int, Any]:
    """Return what tells whether an HPACK table changes: a new entry is always its first."""
    entries = table.dynamic_entries
    return table.maxsize, len(entries), entries[0] if entries else None


def _changed(table: Any, before: tuple[int, int, Any]) -> bool:
    maxsize, count, first = _state(table)
    # The first one itself, not its value: the same header may have been added again.
    return (maxsize, count) != before[:2] or first is not before[2]


def _keep(kept: dict[Any, Any], key: Any, value: Any, *, short: bool, changed: bool) -> None:
    if changed or len(kept) >= _MOST_KEPT:
        kept.clear()
    if short and not changed:
        kept[key] = value
