"""h2's protocol state, with what a gRPC server needs otherwise."""

from __future__ import annotations

from typing import Any

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import ConnectionTerminated, Event
from h2.exceptions import DenialOfServiceError, FrameTooLargeError, ProtocolError
from h2.settings import SettingCodes, Settings
from hpack import Encoder, HPACKError
from hyperframe.frame import GoAwayFrame, HeadersFrame

from millstream_server.runtime.transport.options import TransportOptions

WINDOW_BYTES = 64 << 10
"""What a caller may send ahead of its handler in each stream, beyond the message begun."""
CONNECTION_WINDOW_BYTES = 1 << 20
LAST_STREAM = 2**31 - 1
_HARD_LIMIT = 4
"""Headers above the announced size end their request; above so many times it, the connection, since
they must be decoded to keep the compression's state."""
_LENGTH_BYTES = 3
"""A frame begins with its length."""
_CONFIG = H2Configuration(
    client_side=False,
    header_encoding=None,  # bytes: a value that isn't UTF-8 concerns its own request only
    validate_inbound_headers=False,  # `requests` does: h2 would end the whole connection
    validate_outbound_headers=False,
    normalize_outbound_headers=False,
)


class _PlainEncoder(Encoder):
    """Without Huffman coding: for a load report that takes 10 us and saves 20 bytes."""

    def encode(self, headers: Any, huffman: bool = False) -> bytes:  # noqa: FBT001, FBT002 - hpack's
        return super().encode(headers, huffman)


class ServerState(H2Connection):
    """h2's state of one connection, on the server's side.

    Other than h2: GOAWAY in either direction leaves open streams as they are, since they may end;
    the number of streams is the caller's to check, so that one too many is refused alone; a frame
    that is too long is refused by its head; and header blocks that can't be decoded have the error
    code of RFC 9113 4.3.
    """

    MAX_CLOSED_STREAMS = 4096
    """h2 remembers how so many streams ended, for frames that come late."""

    def __init__(self, options: TransportOptions) -> None:
        """Announce the limits of ``options``."""
        super().__init__(_CONFIG)
        self.encoder = _PlainEncoder()
        self.local_settings = Settings(
            client=False,
            initial_values={
                SettingCodes.MAX_CONCURRENT_STREAMS: options.max_streams,
                SettingCodes.MAX_HEADER_LIST_SIZE: options.max_metadata_bytes,
                SettingCodes.ENABLE_CONNECT_PROTOCOL: 0,
            },
        )
        self._consumed = 0
        """Bytes received since the connection's window was last opened."""
        self._most_block_bytes = _HARD_LIMIT * options.max_metadata_bytes
        self.decoder.max_header_list_size = self._most_block_bytes

    def release(self) -> None:
        """Break h2's own cycle, so that its memory is free at once; receive nothing after it."""
        self._frame_dispatch_table = {}

    def receive_data(self, data: Any) -> list[Event]:
        """Take bytes; return what they mean.

        Raises:
            ProtocolError: the connection must end; its GOAWAY is in `data_to_send`.
        """
        found = super().receive_data(data)
        # h2 looks only when it has the whole frame, or the whole header block.
        buffer = self.incoming_buffer
        rest, block = buffer._data, buffer._headers_buffer  # noqa: SLF001
        if len(rest) >= _LENGTH_BYTES:
            nbytes = int.from_bytes(rest[:_LENGTH_BYTES], "big")
            if nbytes > self.max_inbound_frame_size:
                self._terminate_connection(ErrorCodes.FRAME_SIZE_ERROR)
                raise FrameTooLargeError(f"a frame of {nbytes} bytes")
        if block and sum(len(part.data) for part in block) > self._most_block_bytes:
            self._terminate_connection(ErrorCodes.ENHANCE_YOUR_CALM)
            raise DenialOfServiceError("a header block in too many frames")
        return found

    def open_window(self) -> None:
        """Let the caller send as much as a connection may; HTTP/2 begins with less."""
        self.increment_flow_control_window(CONNECTION_WINDOW_BYTES - (64 << 10) + 1)

    def consumed(self, nbytes: int) -> None:
        """Let the caller send as many bytes more, in all streams; told when there are many."""
        self._consumed += nbytes
        if self._consumed >= CONNECTION_WINDOW_BYTES // 2:
            self.increment_flow_control_window(self._consumed)
            self._consumed = 0

    def ask_for_no_more(self, stream_id: int) -> None:
        """Close a stream whose last frame was sent and whose caller hasn't closed it."""
        stream = self.streams.get(stream_id)
        if stream is not None and not stream.closed:
            self.reset_stream(stream_id, ErrorCodes.NO_ERROR)

    def can_send(self, stream_id: int) -> bool:
        """Return whether a stream is open on our side: bytes read already may have reset it."""
        stream = self.streams.get(stream_id)
        return stream is not None and not stream.closed

    def _receive_headers_frame(self, frame: HeadersFrame) -> tuple[list[Any], list[Event]]:
        try:
            return super()._receive_headers_frame(frame)
        except DenialOfServiceError:  # the headers are too long: also one of HPACK's errors
            raise
        except ProtocolError as error:
            if isinstance(error.__cause__, HPACKError):
                error.error_code = ErrorCodes.COMPRESSION_ERROR
            raise

    @property
    def open_inbound_streams(self) -> int:
        """Return 0, since `Connection` refuses streams above the limit; forget ended streams."""
        if len(self.streams) > self._forget_at:
            super().open_inbound_streams  # noqa: B018 - reading it forgets them
            self._forget_at = 2 * len(self.streams) + 64
        return 0

    _forget_at = 64

    def _receive_goaway_frame(self, frame: GoAwayFrame) -> tuple[list[Any], list[Any]]:
        event = ConnectionTerminated()
        event.error_code = frame.error_code
        event.last_stream_id = frame.last_stream_id
        return [], [event]
