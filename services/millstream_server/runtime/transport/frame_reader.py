"""Bytes in, frames out, one at a time: bounded before h2 or hyperframe spend time on them."""

from __future__ import annotations

from struct import Struct

from h2.errors import ErrorCodes
from h2.exceptions import (
    DenialOfServiceError,
    FrameDataMissingError,
    FrameTooLargeError,
    ProtocolError,
)
from hyperframe.exceptions import InvalidDataError, InvalidFrameError, InvalidPaddingError
from hyperframe.frame import (
    FRAMES,
    AltSvcFrame,
    ContinuationFrame,
    Frame,
    HeadersFrame,
    PriorityFrame,
    PushPromiseFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from millstream_server.runtime.rpc.ledger import Holder, Ledger

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD = Struct(">HBBBI")
"""A frame's: length (24 bits), type, flags, stream."""
_READ_HEAD = HEAD.unpack_from
_TYPE_AT, _HEADERS = 3, bytes([HeadersFrame.type])
_SETTING_BYTES = 6
_MOST_SETTINGS = 32
"""Of one frame: HTTP/2 knows seven."""
_MOST_CONTINUATIONS = 64
_KNOWN_SETTINGS = frozenset({1, 2, 3, 4, 5, 6, 8})
"""A receiver ignores all others (RFC 9113, 6.5.2); h2 would keep them for good."""
_END_HEADERS, _HAS_PRIORITY = 0x4, 0x20
QUIET: dict[type[Frame], type[Frame]] = {
    make: type(make.__name__, (make,), {"__repr__": object.__repr__}) for make in FRAMES.values()
}
"""Frames without a description: h2 makes one of each for a log that nobody reads, of all bytes."""
_IGNORED = frozenset({PriorityFrame.type, AltSvcFrame.type})
"""Of a stream: the first is deprecated (RFC 9113, 5.3.2), the second is for clients."""
RawFrame = tuple[int, int, int, bytes]
"""Type, flags, stream, body."""


class StreamFrameError(Exception):
    """A frame that is wrong for its stream alone."""

    def __init__(self, stream_id: int, code: ErrorCodes) -> None:
        super().__init__(f"a bad frame on stream {stream_id}")
        self.stream_id = stream_id
        self.code = code


class FrameReader:
    """Reads what a client sends, its preface first."""

    __slots__ = ("_at", "_block", "_data", "_max_frame", "_most_block", "_preface_left",
                 "block_bytes", "blocks")  # fmt: skip

    def __init__(self, max_frame_bytes: int, max_block_bytes: int) -> None:
        self._max_frame = max_frame_bytes
        self._most_block = max_block_bytes
        self._data = b""
        self._at = 0
        """Of the data so many bytes were read."""
        self._preface_left = _PREFACE
        self._block: list[HeadersFrame | ContinuationFrame] = []
        """The frames of a header block whose end hasn't come."""
        self.block_bytes = 0
        """What they hold."""
        self.blocks = 0
        """How many header blocks have come whole."""

    @property
    def in_block(self) -> bool:
        if self._block:
            return True
        return self._data[self._at + _TYPE_AT : self._at + _TYPE_AT + 1] == _HEADERS

    def feed(self, data: bytes) -> None:
        """Take bytes.

        Raises:
            ProtocolError: they don't begin as HTTP/2 does.
        """
        if self._preface_left:
            taken = data[: len(self._preface_left)]
            if not self._preface_left.startswith(taken):
                raise ProtocolError("no HTTP/2 preface")
            self._preface_left = self._preface_left[len(taken) :]
            data = data[len(taken) :]
        self._keep_rest()
        self._data += data

    def _keep_rest(self) -> None:
        """Forget what was read: a caller may send much and then nothing more."""
        self._data = self._data[self._at :]
        self._at = 0

    def next(self) -> RawFrame | None:
        """Read one frame, for `frame` or for who needs no more of it; None: no whole one is there.

        Raises:
            ProtocolError: the connection must end.
        """
        data, at = self._data, self._at
        begin = at + HEAD.size
        if len(data) < begin:
            self._keep_rest()
            return None
        high, low, kind, flags, stream_id = _READ_HEAD(data, at)
        size = high << 8 | low
        if size > self._max_frame:  # refused by its head: the rest need not come
            raise FrameTooLargeError(f"a frame of {size} bytes")
        end = begin + size
        if len(data) < end:
            self._keep_rest()
            return None
        self._at = end
        if self._block and kind != ContinuationFrame.type:
            raise ProtocolError("another frame within a header block")
        return kind, flags, stream_id & 0x7FFFFFFF, data[begin:end]

    def frame(self, kind: int, flags: int, stream_id: int, body: bytes) -> Frame | None:
        """Make a frame, a header block as one; None: it is ignored, or its block isn't whole.

        Raises:
            ProtocolError: the connection must end.
            StreamFrameError: a stream must; what follows may be read.
        """
        make = FRAMES.get(kind)
        if make is None or (kind in _IGNORED and stream_id):
            if make is PriorityFrame and len(body) != 5:  # noqa: PLR2004 - RFC 9113, 6.3
                raise StreamFrameError(stream_id, ErrorCodes.FRAME_SIZE_ERROR)
            return None
        if make is WindowUpdateFrame and stream_id and body == b"\0\0\0\0":
            raise StreamFrameError(stream_id, ErrorCodes.PROTOCOL_ERROR)  # RFC 9113, 6.9
        if make is SettingsFrame and len(body) > _MOST_SETTINGS * _SETTING_BYTES:
            raise DenialOfServiceError(f"more than {_MOST_SETTINGS} settings in one frame")
        frame = _parsed(make, flags, stream_id, body)
        if isinstance(frame, SettingsFrame):
            for number in frame.settings.keys() - _KNOWN_SETTINGS:
                del frame.settings[number]
        elif isinstance(frame, HeadersFrame | ContinuationFrame):
            if flags & _HAS_PRIORITY:
                frame.flags.discard("PRIORITY")
            return self._block_with(frame, ends=bool(flags & _END_HEADERS))
        elif make is PushPromiseFrame:
            raise ProtocolError("PUSH_PROMISE from a client")
        return frame

    def _block_with(
        self, frame: HeadersFrame | ContinuationFrame, *, ends: bool
    ) -> HeadersFrame | ContinuationFrame | None:
        """Add a frame to the header block; return the whole block, or None."""
        if isinstance(frame, ContinuationFrame) and (
            not self._block or frame.stream_id != self._block[0].stream_id
        ):
            raise ProtocolError("CONTINUATION without its HEADERS")
        if not self._block and ends:
            self._check_block(len(frame.data))
            self.blocks += 1
            return frame
        self._block.append(frame)
        self.block_bytes += len(frame.data)
        self._check_block(self.block_bytes)
        if not ends:
            return None
        whole = self._block[0]
        whole.data = b"".join(part.data for part in self._block)
        whole.flags.add("END_HEADERS")
        self._block, self.block_bytes = [], 0
        self.blocks += 1
        return whole

    def _check_block(self, nbytes: int) -> None:
        if nbytes > self._most_block or len(self._block) > _MOST_CONTINUATIONS:
            raise DenialOfServiceError("a header block that is too long, or in too many frames")


class HeaderBlock:
    """The header block that a caller has begun: counted among all that is received, and timed.

    Times are the event loop's.
    """

    __slots__ = ("_number", "_reader", "_received", "_since_s", "nbytes")

    def __init__(self, reader: FrameReader, received: Ledger, now_s: float) -> None:
        self._reader = reader
        self._received = received
        self._number = 0
        self._since_s = now_s
        """Since when the block with this number has begun."""
        self.nbytes = 0
        """What it holds, as counted."""

    def count(self, holder: Holder) -> None:
        more = self._reader.block_bytes - self.nbytes
        if more:
            self.nbytes += more
            if more > 0:
                self._received.add(holder, more)
            else:
                self._received.remove(holder, -more)

    def drop(self, holder: Holder) -> None:
        self._received.remove(holder, self.nbytes)
        self.nbytes = 0

    def age_s(self, now_s: float, *, waits: bool) -> float:
        """Return since when it hasn't come whole, as seen once a second; 0: none has begun.

        While bytes wait for their turn here they may be whole: that is no delay of the caller.
        """
        reader = self._reader
        if not reader.in_block or reader.blocks != self._number or waits:
            self._number, self._since_s = reader.blocks, now_s
        return now_s - self._since_s


def _parsed(make: type[Frame], flags: int, stream_id: int, body: bytes) -> Frame:
    try:
        frame = QUIET[make](stream_id)
        frame.parse_flags(flags)
        frame.parse_body(memoryview(body))
    except InvalidFrameError as error:
        raise FrameDataMissingError(f"a {make.__name__} of {len(body)} bytes") from error
    except (InvalidDataError, InvalidPaddingError) as error:
        raise ProtocolError(f"a bad {make.__name__}: {error}") from error
    return frame
