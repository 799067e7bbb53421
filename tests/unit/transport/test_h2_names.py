"""What we use of h2 and isn't promised by it: a new version may lack it."""

from __future__ import annotations

import importlib.metadata
import inspect

import pytest
from h2.connection import ConnectionState, H2Connection
from h2.errors import ErrorCodes
from h2.exceptions import StreamClosedError
from h2.stream import H2Stream, StreamClosedBy

from millstream_server.runtime.transport.h2_state import ServerState
from millstream_server.runtime.transport.options import TransportOptions

PRIVATE = {
    "_handle_data_on_closed_stream": ["events", "exc", "frame"],
    "_prepare_for_sending": ["frames"],
    "_receive_data_frame": ["frame"],
    "_receive_frame": ["frame"],
    "_receive_goaway_frame": ["frame"],
    "_receive_headers_frame": ["frame"],
    "_stream_closed_by": ["stream_id"],
}


@pytest.mark.parametrize("name", PRIVATE)
def test_methods_that_are_overridden_or_called(name: str) -> None:
    arguments = list(inspect.signature(getattr(H2Connection, name)).parameters)
    assert arguments == ["self", *PRIVATE[name]]


def test_every_override_overrides() -> None:
    own = {name for name in vars(ServerState) if not name.startswith("__")}
    private = {name for name in own if name.startswith("_")}
    private -= {"_forget_at", "_forget_ended", *(n for n in own if n.startswith("_quick_"))}
    assert private <= set(PRIVATE)
    assert {"open_inbound_streams", "MAX_CLOSED_STREAMS"} <= own & set(dir(H2Connection))


def test_attributes() -> None:
    state = ServerState(TransportOptions(max_receive_bytes=1), lambda _: None)
    assert state._frame_dispatch_table
    assert state.max_inbound_frame_size == 1 << 14
    assert {"outbound_flow_control_window", "closed"} <= {*dir(H2Stream), *vars(_stream(state))}
    assert _stream(state)._expected_content_length is None
    assert callable(_stream(state)._inbound_window_manager.window_consumed)
    assert callable(state._inbound_flow_control_window_manager.window_consumed)
    assert state.state_machine.state is ConnectionState.IDLE
    assert {"state", "client", "headers_received", "headers_sent", "stream_closed_by"} <= {
        *vars(_stream(state).state_machine)
    }
    assert state.encoder.table_size_changes == []
    for coder in (state.encoder, state.decoder):
        assert coder.header_table.maxsize == 4096
        assert not coder.header_table.dynamic_entries
    assert StreamClosedError(1)._events == []
    assert StreamClosedBy.SEND_RST_STREAM
    assert ErrorCodes.ENHANCE_YOUR_CALM


def _stream(state: ServerState) -> H2Stream:
    return H2Stream(1, state.config, 1, 1)


def test_the_version_is_the_one_that_was_looked_at() -> None:
    """After an update: read what changed in h2/connection.py, then write it here and in the pin."""
    assert importlib.metadata.version("h2").startswith("4.4.")
