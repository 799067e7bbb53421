"""h2's protocol state, with what a gRPC server needs otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from h2.config import H2Configuration
from h2.connection import ConnectionState, H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import (
    DenialOfServiceError,
    InvalidBodyLengthError,
    ProtocolError,
    StreamClosedError,
)
from h2.settings import SettingCodes, Settings
from h2.stream import H2Stream, StreamClosedBy, StreamState
from hpack import HPACKError
from hyperframe.frame import DataFrame, Frame, GoAwayFrame, HeadersFrame, RstStreamFrame

from millstream_server.runtime.transport.frame_reader import (
    HEAD,
    QUIET,
    FrameReader,
    StreamFrameError,
)
from millstream_server.runtime.transport.hpack_blocks import KeepingDecoder, KeepingEncoder
from millstream_server.runtime.transport.options import TransportOptions

WINDOW_BYTES = 64 << 10
"""What a caller may send ahead of its handler in each stream, beyond the message begun."""
CONNECTION_WINDOW_BYTES = 1 << 20
LAST_STREAM = 2**31 - 1
_MOST_BLOCK_BYTES = 256 << 10
"""Of a header block: up to it metadata above the announced size ends its RPC alone, and is read to
keep the compression's state; above it the connection ends."""
_LEAST_DECODED_BYTES = 64 << 10
"""What a header block may always be when unpacked; a larger block may be twice its bytes."""
_LONGEST_REASON = 200
_DATA, _HEADERS, _WINDOW_UPDATE, _CONTINUATION = 0, 1, 8, 9
_END_STREAM, _END_HEADERS, _PADDED, _PRIORITY = 0x1, 0x4, 0x8, 0x20
_FRAME = HEAD.pack
_CLOSED, _OPEN = StreamState.CLOSED, StreamState.OPEN
_HALF_CLOSED = StreamState.HALF_CLOSED_REMOTE
_PROVOKED = frozenset(
    {
        ErrorCodes.PROTOCOL_ERROR,
        ErrorCodes.FLOW_CONTROL_ERROR,
        ErrorCodes.STREAM_CLOSED,
        ErrorCodes.FRAME_SIZE_ERROR,
    }
)
"""Codes of resets that are the caller's fault."""
_OF_ONE_STREAM = (ProtocolError, InvalidBodyLengthError)
_CONFIG = H2Configuration(
    client_side=False,
    header_encoding=None,  # bytes: a value that isn't UTF-8 concerns its own request only
    validate_inbound_headers=False,  # `requests` does: h2 would end the whole connection
    validate_outbound_headers=False,
    normalize_outbound_headers=False,
)


def _end_ours(machine: Any) -> None:
    """Note that our side of a stream has ended."""
    if machine.state is _HALF_CLOSED:
        machine.state, machine.stream_closed_by = _CLOSED, StreamClosedBy.SEND_END_STREAM
    else:
        machine.state = StreamState.HALF_CLOSED_LOCAL


class ServerState(H2Connection):
    """h2's state of one connection, on the server's side.

    Other than h2: frames come from `FrameReader`, one at a time; GOAWAY in either direction leaves
    open streams as they are, since they may end; our own GOAWAYs say why; the number of streams is
    the caller's to check, so that one too many is refused alone; what is wrong with one stream ends
    that stream; and header blocks that can't be decoded have the error code of RFC 9113 4.3.
    """

    MAX_CLOSED_STREAMS = 4096
    """h2 remembers how so many streams ended, for frames that come late."""
    encoder: KeepingEncoder
    decoder: KeepingDecoder

    def __init__(self, options: TransportOptions, send: Callable[[bytes], object]) -> None:
        """Announce the limits of ``options``; frames go to ``send``."""
        super().__init__(_CONFIG)
        table = self._frame_dispatch_table
        table |= {QUIET[make]: act for make, act in table.items() if make in QUIET}
        self.encoder = KeepingEncoder()
        self.decoder = KeepingDecoder()
        self.local_settings = Settings(
            client=False,
            initial_values={
                SettingCodes.MAX_CONCURRENT_STREAMS: options.max_streams,
                SettingCodes.MAX_HEADER_LIST_SIZE: options.max_metadata_bytes,
                SettingCodes.ENABLE_CONNECT_PROTOCOL: 0,
            },
        )
        self._send = send
        self.reader = FrameReader(self.max_inbound_frame_size, _MOST_BLOCK_BYTES)
        self.provoked_resets = 0
        """Streams that were reset for their caller's faults."""
        self._consumed = 0
        """Bytes received since the connection's window was last opened."""

    def begin(self) -> None:
        """Send the settings, and let the caller send as much as a connection may."""
        self.initiate_connection()
        self._send(self.data_to_send())
        self.increment_flow_control_window(CONNECTION_WINDOW_BYTES - (64 << 10) + 1)

    def release(self) -> None:
        """Break cycles, so that its memory is free at once; receive nothing after it."""
        self._frame_dispatch_table = {}
        self._send = bool

    def next_events(self) -> Sequence[Event] | None:
        """Return what the next frame of `reader` means; None: it has none.

        Raises:
            ProtocolError: the connection must end.
        """
        raw = self.reader.next()
        if raw is None:
            return None
        kind, flags, stream_id, body = raw
        if (quick := _QUICK.get(kind)) is not None:
            events = quick(self, flags, stream_id, body)
            if events is not None:
                return events
        try:
            frame = self.reader.frame(kind, flags, stream_id, body)
        except StreamFrameError as error:
            return self.reset(error.stream_id, error.code)
        return [] if frame is None else self._receive_frame(frame)

    # ---- a request's usual frames: as h2 handles them, in a tenth of its time ------------------
    # Each returns None where something is unusual, and has changed nothing then: h2 decides.

    def _quick_headers(self, flags: int, stream_id: int, block: bytes) -> Sequence[Event] | None:
        if (
            flags & (_END_HEADERS | _END_STREAM | _PADDED | _PRIORITY) != _END_HEADERS
            or stream_id <= self.highest_inbound_stream_id
            or not stream_id % 2
            or self.state_machine.state is not ConnectionState.SERVER_OPEN
            or (headers := self.decoder.find(block)) is None
        ):
            return None
        self.reader.blocks += 1
        self._forget_ended()
        theirs, ours = self.local_settings, self.remote_settings
        stream = H2Stream(
            stream_id, self.config, theirs.initial_window_size, ours.initial_window_size
        )
        stream.max_outbound_frame_size = self.max_outbound_frame_size
        self.streams[stream_id], self.highest_inbound_stream_id = stream, stream_id
        machine = stream.state_machine
        machine.state, machine.client, machine.headers_received = _OPEN, False, True
        return (RequestReceived(stream_id=stream_id, headers=headers),)

    def _quick_data(self, flags: int, stream_id: int, data: bytes) -> Sequence[Event] | None:
        stream = self.streams.get(stream_id)
        if (
            flags & _PADDED
            or stream is None
            or stream.state_machine.state is not _OPEN
            or stream._expected_content_length is not None  # noqa: SLF001
        ):
            return None
        nbytes = len(data)
        self._inbound_flow_control_window_manager.window_consumed(nbytes)
        stream._inbound_window_manager.window_consumed(nbytes)  # noqa: SLF001
        event = DataReceived(stream_id=stream_id, data=data, flow_controlled_length=nbytes)
        if not flags & _END_STREAM:
            return (event,)
        stream.state_machine.state = _HALF_CLOSED
        return event, StreamEnded(stream_id=stream_id)

    def _quick_window(self, _: int, stream_id: int, body: bytes) -> Sequence[Event] | None:
        of: Any = self.streams.get(stream_id) if stream_id else self
        more = int.from_bytes(body)
        if (
            of is None
            or (stream_id and of.state_machine.state not in (_OPEN, _HALF_CLOSED))
            or self.state_machine.state is not ConnectionState.SERVER_OPEN
            or len(body) != 4  # noqa: PLR2004 - its only length
            or not 0 < more <= LAST_STREAM - of.outbound_flow_control_window
        ):
            return None
        of.outbound_flow_control_window += more
        return (WindowUpdated(stream_id=stream_id, delta=more),)

    def respond(
        self,
        stream_id: int,
        headers: Sequence[tuple[bytes, bytes]],
        once: Sequence[tuple[bytes, bytes]] = (),
        *,
        end_stream: bool,
    ) -> None:
        """Send a response's headers or trailers, without what h2 checks in general.

        ``once`` follow them (`KeepingEncoder.encode_once`). The stream must be open on our side.
        """
        machine = self.streams[stream_id].state_machine
        machine.headers_sent = True
        flags = 0
        if end_stream:
            flags = _END_STREAM
            _end_ours(machine)
        block, most, kind = self.encoder.encode(headers), self.max_outbound_frame_size, _HEADERS
        if once:
            block += self.encoder.encode_once(once)
        while len(block) > most:
            self._send(_FRAME(most >> 8, most & 0xFF, kind, flags, stream_id) + block[:most])
            block, kind, flags = block[most:], _CONTINUATION, 0
        size = len(block)
        self._send(_FRAME(size >> 8, size & 0xFF, kind, flags | _END_HEADERS, stream_id) + block)

    def end(self, stream_id: int, data: bytes) -> None:
        """Send the last DATA frame of a response, for which there is room, likewise."""
        stream, size = self.streams[stream_id], len(data)
        stream.outbound_flow_control_window -= size
        self.outbound_flow_control_window -= size
        _end_ours(stream.state_machine)
        self._send(_FRAME(size >> 8, size & 0xFF, _DATA, _END_STREAM, stream_id) + data)

    def goaway(self, last_stream: int, code: int = 0, why: str = "") -> None:
        """Send a GOAWAY frame; h2 isn't told, since open streams go on."""
        text = why.encode("ascii", "replace")[:_LONGEST_REASON]
        self._send(GoAwayFrame(0, last_stream, code, text).serialize())

    def consumed(self, nbytes: int) -> None:
        """Let the caller send as many bytes more, in all streams; told when there are many."""
        self._consumed += nbytes
        if self._consumed >= CONNECTION_WINDOW_BYTES // 2:
            self.increment_flow_control_window(self._consumed)
            self._consumed = 0

    def ask_for_no_more(self, stream_id: int) -> None:
        """Close a stream whose last frame was sent and whose caller hasn't closed it."""
        if self.can_send(stream_id):
            self.reset_stream(stream_id, ErrorCodes.NO_ERROR)

    def can_send(self, stream_id: int) -> bool:
        """Return whether a stream is open on our side: bytes read already may have reset it."""
        stream = self.streams.get(stream_id)
        return stream is not None and stream.state_machine.state is not _CLOSED

    def reset(self, stream_id: int, code: ErrorCodes) -> list[Event]:
        """Reset a stream if it is open; return the event of it."""
        if not self.can_send(stream_id):
            return []
        self.reset_stream(stream_id, code)
        return [StreamReset(stream_id=stream_id, error_code=code, remote_reset=False)]

    def _prepare_for_sending(self, frames: list[Frame]) -> None:
        for frame in frames:
            if frame.__class__ is RstStreamFrame and frame.error_code in _PROVOKED:
                self.provoked_resets += 1
            self._send(frame.serialize())

    def _receive_headers_frame(self, frame: HeadersFrame) -> tuple[list[Frame], list[Event]]:
        self.decoder.max_header_list_size = max(_LEAST_DECODED_BYTES, 2 * len(frame.data))
        try:
            return super()._receive_headers_frame(frame)
        except DenialOfServiceError:  # the headers are too long: also one of HPACK's errors
            raise
        except ProtocolError as error:
            if isinstance(error.__cause__, HPACKError):
                error.error_code = ErrorCodes.COMPRESSION_ERROR
            elif error.__class__ in _OF_ONE_STREAM and self.can_send(frame.stream_id):
                # h2 left the stream open, so the headers are at fault, not the stream's state.
                return [], self.reset(frame.stream_id, ErrorCodes.PROTOCOL_ERROR)
            raise

    def _receive_data_frame(self, frame: DataFrame) -> tuple[list[Frame], list[Event]]:
        try:
            return super()._receive_data_frame(frame)
        except InvalidBodyLengthError:
            self.consumed(frame.flow_controlled_length)
            return [], self.reset(frame.stream_id, ErrorCodes.PROTOCOL_ERROR)

    def _handle_data_on_closed_stream(
        self, events: list[Event], exc: StreamClosedError, frame: DataFrame
    ) -> tuple[list[Frame], list[Event]]:
        # What a caller sent before it read our RST_STREAM is no fault (RFC 9113, 5.4.2). If there
        # are events, this frame itself ended the stream.
        reset = self._stream_closed_by(exc.stream_id) is StreamClosedBy.SEND_RST_STREAM
        late = reset and not exc._events  # noqa: SLF001
        frames, found = super()._handle_data_on_closed_stream(events, exc, frame)
        return ([f for f in frames if f.stream_id == 0], found) if late else (frames, found)

    @property
    def open_inbound_streams(self) -> int:
        """Return 0, since `Connection` refuses streams above the limit; forget ended streams."""
        self._forget_ended()
        return 0

    def _forget_ended(self) -> None:
        if len(self.streams) > self._forget_at:
            super().open_inbound_streams  # noqa: B018 - reading it forgets them
            self._forget_at = 2 * len(self.streams) + 64

    _forget_at = 64

    def _receive_goaway_frame(self, frame: GoAwayFrame) -> tuple[list[Any], list[Any]]:
        event = ConnectionTerminated()
        event.error_code = frame.error_code
        event.last_stream_id = frame.last_stream_id
        return [], [event]


_QUICK: dict[int, Callable[[ServerState, int, int, bytes], Sequence[Event] | None]] = {
    _DATA: ServerState._quick_data,  # noqa: SLF001
    _HEADERS: ServerState._quick_headers,  # noqa: SLF001
    _WINDOW_UPDATE: ServerState._quick_window,  # noqa: SLF001
}
