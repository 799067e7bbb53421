"""A request's usual frames, which h2 doesn't see, mean what they would mean to h2."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from h2.exceptions import ProtocolError
from hpack import Encoder

from millstream_server.runtime.transport import h2_state
from millstream_server.runtime.transport.h2_state import ServerState
from millstream_server.runtime.transport.headers import RequestHead
from millstream_server.runtime.transport.options import TransportOptions
from tests.support.wire.raw_http2 import PREFACE, Kind, frame, settings

HEADERS = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/a"), (b"te", b"trailers")]
SIZES = [0, 1, 100, 5000, 16_384]
INCREMENTS = [1] * 12 + [70_000] * 12 + [0, 2**31 - 1, 2**31]


class Side:
    """A server's state, what it sent and what it was told."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.told: list[object] = []
        self.state = ServerState(TransportOptions(max_receive_bytes=1), self.sent.append)
        self.state.begin()

    def take(self, data: bytes) -> None:
        try:
            self.state.reader.feed(data)
            while (found := self.state.next_events()) is not None:
                for event in found:
                    known = self.state.decoder.known
                    if known is not None and known[-1][0] != b"content-length":
                        known.head = RequestHead("/a")
                    about = {**vars(event)}
                    about.pop("stream_ended", None)
                    about.pop("headers", None)
                    self.told.append((event.__class__, about))
        except ProtocolError as error:
            self.told.append((error.__class__, str(error)))

    def holds(self) -> object:
        state = self.state
        return (
            state.outbound_flow_control_window,
            state.inbound_flow_control_window,
            state.highest_inbound_stream_id,
            {
                number: (
                    *vars(each.state_machine).values(),
                    each.outbound_flow_control_window,
                    each.inbound_flow_control_window,
                )
                for number, each in state.streams.items()
            },
        )


def _frames(chance: random.Random) -> Iterator[bytes]:
    encoder = Encoder()
    yield PREFACE + settings()
    newest = -1
    for _ in range(60):
        kind = chance.choice([Kind.HEADERS, Kind.HEADERS, Kind.DATA, Kind.DATA, Kind.WINDOW_UPDATE])
        if kind is Kind.HEADERS or newest < 0:
            kind, newest = Kind.HEADERS, newest + 2
        stream = newest if chance.random() < 0.97 else chance.randint(0, 9)
        if kind is Kind.HEADERS:
            more = chance.choice([[], [], [], [(b"content-length", b"5001")]])
            flags = chance.choice([0x4] * 12 + [0x5] * 6 + [0x0])
            yield frame(kind, stream, encoder.encode(HEADERS + more), flags=flags)
        elif kind is Kind.DATA:
            flags = chance.choice([0] * 12 + [0x1] * 6 + [0x8])
            yield frame(kind, stream, bytes(chance.choice(SIZES)), flags=flags)
        else:
            yield frame(kind, stream, chance.choice(INCREMENTS).to_bytes(4, "big"))
        if chance.random() < 0.05:
            yield frame(Kind.RST_STREAM, stream, bytes(4))


@pytest.mark.parametrize("seed", range(40))
def test_they_mean_the_same(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    quick, slow = Side(), Side()
    usual = h2_state._QUICK
    for data in _frames(random.Random(seed)):
        monkeypatch.setattr(h2_state, "_QUICK", usual)
        quick.take(data)
        monkeypatch.setattr(h2_state, "_QUICK", {})
        slow.take(data)
        assert quick.told == slow.told
        assert quick.holds() == slow.holds()
        assert quick.sent == slow.sent
        if quick.told and issubclass(quick.told[-1][0], ProtocolError):  # type: ignore[index]
            return
