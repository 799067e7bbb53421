"""Frames are bounded before h2 sees them; `contract/transport` has the rules of HTTP/2."""

from __future__ import annotations

import tracemalloc

import pytest
from h2.events import DataReceived
from hpack import Encoder

from millstream_server.runtime.transport.h2_state import ServerState
from millstream_server.runtime.transport.options import TransportOptions
from tests.support.wire.raw_http2 import PREFACE, Kind, frame, settings

UNKNOWN = range(0x100, 0xFFFF)


def _state() -> ServerState:
    state = ServerState(TransportOptions(max_receive_bytes=1), lambda _: None)
    state.initiate_connection()
    return state


def _take(state: ServerState, data: bytes) -> None:
    state.reader.feed(data)
    while state.next_events() is not None:
        pass


def test_settings_that_nobody_knows_are_dropped() -> None:
    state = _state()
    _take(state, PREFACE + settings({4: 70_000, 0x100: 1, 8: 1}))
    assert state.remote_settings.initial_window_size == 70_000
    assert 0x100 not in state.remote_settings


def test_they_leave_nothing_behind() -> None:
    """h2 keeps each for good: 393 KB of them took 55 MB, before any authentication."""
    state = _state()
    _take(state, PREFACE + settings())
    tracemalloc.start()
    try:
        for first in range(0, len(UNKNOWN) - 32, 32):
            _take(state, settings(dict.fromkeys(UNKNOWN[first : first + 32], 1)))
        assert tracemalloc.get_traced_memory()[0] < 64 << 10
    finally:
        tracemalloc.stop()


def test_frames_that_are_ignored_are_read_one_by_one() -> None:
    """Else a few kilobytes of them would hold up all others."""
    state = _state()
    state.reader.feed(PREFACE + frame(Kind.PRIORITY, 7, bytes(5)) * 3 + frame(0xEE, 0, b"x"))
    assert [state.next_events() for _ in range(5)] == [[], [], [], [], None]


def test_bytes_may_come_one_by_one() -> None:
    state = _state()
    sent = PREFACE + settings({4: 1}) + frame(Kind.PING, 0, b"12345678")
    kinds = []
    for byte in sent:
        state.reader.feed(bytes([byte]))
        while (found := state.reader.next()) is not None:
            kinds.append(found[0])
    assert kinds == [Kind.SETTINGS, Kind.PING]


def test_no_frame_is_described_for_h2s_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the whole body in hex, for each frame, and nobody reads it."""
    state = _state()
    described: list[object] = []
    monkeypatch.setattr("hyperframe.frame._raw_data_repr", described.append)
    head = Encoder().encode([(":method", "POST"), (":scheme", "http"), (":path", "/a")])
    _take(state, PREFACE + settings() + frame(Kind.HEADERS, 1, head, flags=4))
    state.reader.feed(frame(Kind.DATA, 1, b"body"))
    event = next(iter(state.next_events() or ()), None)
    assert isinstance(event, DataReceived)
    assert event.data == b"body"
    _take(state, frame(Kind.PING, 0, b"12345678") + frame(Kind.WINDOW_UPDATE, 0, b"\0\0\0\1"))
    assert not described
