"""How gRPC-web and Connect write an RPC's messages and its end: nothing they say is in trailers.

gRPC-web: PROTOCOL-WEB.md of gRPC. Connect: https://connectrpc.com/docs/protocol.
"""

from __future__ import annotations

import base64
import re
from typing import ClassVar

from millstream_server.runtime.errors import (
    Code,
    Failure,
    MalformedMessageError,
)
from millstream_server.runtime.rpc import connect
from millstream_server.runtime.rpc.connect import HttpRefusalError, Metadata
from millstream_server.runtime.rpc.http import JSON, Headers, Refusal, retry_after
from millstream_server.runtime.rpc.status import to_trailers
from millstream_server.runtime.transport.headers import status_headers
from millstream_server.runtime.transport.output import PREFIX

_TRAILERS = 0x80
"""The flag of gRPC-web's last frame."""
_END_STREAM = 2
"""The flag of Connect's last message."""
_QUADS = re.compile(rb"[^=]+={0,2}")


class Framing:
    """One call's protocol: how its messages and its end are written."""

    whole: ClassVar[bool] = False
    """A body is one message, without a prefix."""

    def __init__(self, content_type: str, *, json: bool) -> None:
        """``content_type`` is that of responses; ``json``: messages are JSON."""
        self.content_type = content_type
        self.json = json

    def read(self, data: bytes) -> bytes:
        """Return frames of what came.

        Raises:
            MalformedMessageError: it can't be read.
        """
        return data

    def message(self, data: bytes) -> bytes:
        return self._frame(0, data)

    def _frame(self, flags: int, data: bytes) -> bytes:
        return PREFIX.pack(flags, len(data)) + data

    def headers(self, trailers: Metadata) -> Headers:
        """Make the headers of a good response; its trailers are known if it is `whole`."""
        return (("content-type", self.content_type),)

    def end(self, trailers: Metadata) -> bytes:
        """Make what ends a good response."""
        raise NotImplementedError

    def refuse(self, failure: Failure, trailers: Metadata) -> Refusal:
        """Make the response of a failure; `Refusal.event` ends one that has begun."""
        if isinstance(failure, HttpRefusalError):
            body = connect.error_json(failure) if failure.code is Code.PERMISSION_DENIED else b""
            return Refusal(status=failure.status, body=body, headers=failure.headers)
        end = self._failed(failure, trailers)
        return Refusal(status=200, body=end, content_type=self.content_type, event=end)

    def _failed(self, failure: Failure, trailers: Metadata) -> bytes:
        raise NotImplementedError


class GrpcWeb(Framing):
    """gRPC-web: messages as gRPC has them, and the trailers in a last frame."""

    def end(self, trailers: Metadata) -> bytes:
        return self._trailers(Code.OK, "", trailers)

    def _failed(self, failure: Failure, trailers: Metadata) -> bytes:
        said = (*trailers, *to_trailers(failure))
        return self._trailers(failure.code, failure.message, said)

    def _trailers(self, code: Code, message: str, trailers: Metadata) -> bytes:
        fields = status_headers(code, message, trailers)
        lines = [b"%b: %b\r\n" % (name, value) for name, value in fields]
        return self._frame(_TRAILERS, b"".join(lines))


class GrpcWebText(GrpcWeb):
    """gRPC-web in base64, for browsers' XMLHttpRequest: each frame is padded by itself."""

    def __init__(self, content_type: str, *, json: bool) -> None:
        super().__init__(content_type, json=json)
        self._rest = b""

    def read(self, data: bytes) -> bytes:
        data = self._rest + data
        at = len(data) - len(data) % 4
        self._rest = data[at:]
        try:
            parts = [base64.b64decode(part, validate=True) for part in _QUADS.findall(data[:at])]
        except ValueError:
            raise MalformedMessageError("the request isn't base64") from None
        return b"".join(parts)

    def _frame(self, flags: int, data: bytes) -> bytes:
        return base64.b64encode(super()._frame(flags, data))


class ConnectStream(Framing):
    """Connect's streams: messages as gRPC has them, and JSON that says the end."""

    def end(self, trailers: Metadata) -> bytes:
        return self._frame(_END_STREAM, connect.end_json(None, trailers))

    def _failed(self, failure: Failure, trailers: Metadata) -> bytes:
        return self._frame(_END_STREAM, connect.end_json(failure, trailers))


class ConnectUnary(Framing):
    """Connect's unary calls: a body is a message, and a failure has HTTP's status."""

    whole = True

    def message(self, data: bytes) -> bytes:
        return data

    def headers(self, trailers: Metadata) -> Headers:
        return (*super().headers(()), *_prefixed(trailers))

    def end(self, trailers: Metadata) -> bytes:
        return b""

    def refuse(self, failure: Failure, trailers: Metadata) -> Refusal:
        if isinstance(failure, HttpRefusalError):
            return super().refuse(failure, trailers)
        headers = (*retry_after(failure), *_prefixed(trailers))
        status, body = connect.status_of(failure), connect.error_json(failure)
        return Refusal(status=status, body=body, headers=headers, content_type=JSON)


def _prefixed(trailers: Metadata) -> Headers:
    return tuple([(f"trailer-{key}", connect.text_of(value)) for key, value in trailers])
