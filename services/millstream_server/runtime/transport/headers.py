"""gRPC's HTTP/2 headers: requests' to a `RequestHead`, statuses' from code and message.

The rules are those of gRPC's PROTOCOL-HTTP2.md.
"""

from __future__ import annotations

import base64
import binascii
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

from hpack import NeverIndexedHeaderTuple

from millstream_server.runtime.errors import Code, StatusError

Header = tuple[bytes, bytes]

ACCEPTED_ENCODINGS = b"identity,gzip,deflate"
RESPONSE = (
    (b":status", b"200"),
    (b"content-type", b"application/grpc"),
    (b"grpc-accept-encoding", ACCEPTED_ENCODINGS),
)
_is_grpc = re.compile(rb"application/grpc([+;].*)?", re.DOTALL).fullmatch
_TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])\Z")
_UNITS_S = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_is_name = re.compile(rb":?[!-9;-@\[-~]+").fullmatch
"""Visible ASCII, no capitals, no colon but in front."""
_is_value = re.compile(rb"[^\0\r\n]*").fullmatch
_BLANKS, _COLON = b" \t", ord(":")
_PSEUDO = frozenset({b":method", b":scheme", b":path", b":authority"})
_OF_CONNECTIONS = frozenset(
    {b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"}
)
"""Headers of HTTP/1.1 that mean nothing in HTTP/2."""
_AS_IT_IS = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
"""What a grpc-message may contain as it is."""


class MalformedError(Exception):
    """The headers break HTTP/2's rules: the stream is reset with PROTOCOL_ERROR."""


class NotGrpcError(Exception):
    """The request is HTTP/2, but not gRPC."""

    def __init__(self, http_status: int, message: str, method: str, head: RequestHead) -> None:
        super().__init__(message)
        self.http_status = http_status
        self.method = method
        self.head = head


@dataclass(slots=True)
class RequestHead:
    """The headers of an RPC, or of several that have the same: nobody changes it."""

    path: str
    """`/package.Service/Method`."""
    timeout_s: float | None = None
    encoding: bytes = b"identity"
    """How messages are compressed whose flag says so."""
    metadata: list[tuple[str, str | bytes]] = field(default_factory=list)


def read_head(headers: Sequence[Header], max_bytes: int) -> RequestHead:
    """Read the headers of a request, of up to ``max_bytes`` as HTTP/2 counts them.

    Raises:
        MalformedError: they break HTTP/2's rules.
        NotGrpcError: it is no gRPC request.
        StatusError: a value breaks gRPC's rules.
    """
    # First of all: a header block of 33 bytes may name 60 KB.
    nbytes = _size(headers)
    if nbytes > max_bytes:
        why = f"metadata of {nbytes} bytes, more than the {max_bytes} that this server takes"
        raise StatusError(Code.RESOURCE_EXHAUSTED, why)
    pseudo, fields, blank = _checked(headers)
    _check_request(pseudo, fields)
    if blank is not None:
        raise _bad(f"the value of {blank!r} begins or ends with a blank")
    head = RequestHead("")
    content_type = b""
    for name, value in fields:
        if name == b"content-type":
            content_type = value
        elif name == b"grpc-timeout":
            head.timeout_s = timeout_s(value)
        elif name == b"grpc-encoding":
            head.encoding = value
        elif name not in _OURS:
            add_metadata(head.metadata, name.decode("ascii", "replace"), value)
    head.path = _text(":path", pseudo.get(b":path", b""))
    _check_is_grpc(pseudo[b":method"], content_type, head)
    return head


def check_trailers(headers: Sequence[Header], max_bytes: int) -> None:
    """Check the trailers of a request, which are ignored otherwise.

    Raises:
        MalformedError: they break HTTP/2's rules, or have more than ``max_bytes``.
    """
    if _size(headers) > max_bytes:
        raise MalformedError
    pseudo, _, blank = _checked(headers)
    if pseudo or blank is not None:
        raise MalformedError


def _size(headers: Sequence[Header]) -> int:
    """Return what headers take, as HTTP/2 counts."""
    return sum([len(name) + len(value) + _FIELD_BYTES for name, value in headers])


def _checked(
    headers: Sequence[Header],
) -> tuple[dict[bytes, bytes], list[Header], str | None]:
    """Return pseudo headers, the others, and the first name whose value has blanks around it.

    Blanks are told apart since an empty key is the usual cause, and a reset says nothing.

    Raises:
        MalformedError: they break HTTP/2's rules for each header (RFC 9113, 8.2 and 8.3).
    """
    pseudo: dict[bytes, bytes] = {}
    fields: list[Header] = []
    blank: str | None = None
    for header in headers:
        name, value = header
        if not _is_name(name) or not _is_value(value):
            raise MalformedError
        if value and (value[0] in _BLANKS or value[-1] in _BLANKS):
            blank = blank or name.decode("ascii")
        if name[0] == _COLON:
            if name in pseudo or fields or name not in _PSEUDO:
                raise MalformedError
            pseudo[name] = value
        elif name in _OF_CONNECTIONS or (name == b"te" and value.lower() != b"trailers"):
            raise MalformedError
        else:
            fields.append(header)
    return pseudo, fields, blank


def _check_request(pseudo: Mapping[bytes, bytes], fields: Sequence[Header]) -> None:
    """Check what a request as a whole must have (RFC 9113, 8.3.1 and 8.5).

    Neither `:authority` nor `host` is fine: health checks of proxies have none.

    Raises:
        MalformedError: it hasn't.
    """
    method = pseudo.get(b":method")
    has = (b":scheme" in pseudo, bool(pseudo.get(b":path")))
    if method is None or has != ((False, False) if method == b"CONNECT" else (True, True)):
        raise MalformedError
    hosts = [value for name, value in fields if name == b"host"]
    authority = pseudo.get(b":authority")
    if len(hosts) > 1 or (hosts and authority is not None and hosts[0] != authority):
        raise MalformedError


_FIELD_BYTES = 32
"""What HTTP/2 counts for a field beside its name and value."""
_OURS = frozenset(
    {b":scheme", b":authority", b"te", b"grpc-accept-encoding", b"host", b"content-length"}
)
"""Headers that are no metadata."""


def _check_is_grpc(method: bytes, content_type: bytes, head: RequestHead) -> None:
    name = method.decode("ascii", "replace")
    if method != b"POST":
        raise NotGrpcError(405, "gRPC requests are POST", name, head)
    if not _is_grpc(content_type):
        why = "gRPC requests have a content-type of application/grpc"
        raise NotGrpcError(415, why, name, head)


def add_metadata(metadata: list[tuple[str, str | bytes]], name: str, value: bytes) -> None:
    """Add what a header says.

    Raises:
        StatusError: it is neither text nor, with a name that ends in -bin, base64.
    """
    if not name.endswith("-bin"):
        metadata.append((name, _text(name, value)))
        return
    for part in value.split(b","):  # several in one header, as PROTOCOL-HTTP2.md has it
        part = part.strip()  # noqa: PLW2901
        try:
            decoded = base64.b64decode(part + b"=" * (-len(part) % 4), validate=True)
        except binascii.Error:
            raise _bad(f"the value of the metadata {name!r} is not base64") from None
        metadata.append((name, decoded))


def _text(name: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise _bad(
            f"the value of {name!r} is not text; a key of binary values ends in -bin"
        ) from None


def _bad(why: str) -> StatusError:
    return StatusError(Code.INVALID_ARGUMENT, why)


def timeout_s(value: bytes) -> float:
    """Return what a grpc-timeout says, in seconds.

    Raises:
        StatusError: it is malformed.
    """
    found = _TIMEOUT.match(value)
    if found is None:
        why = "grpc-timeout must be up to eight digits and one of H, M, S, m, u, n"
        raise StatusError(Code.INTERNAL, why)  # as grpc-go says
    return int(found[1]) * _UNITS_S[found[2]]


@functools.lru_cache(4)
def ok_headers(trailers: tuple[tuple[str, str | bytes], ...]) -> Sequence[Header]:
    """Make the headers that end an RPC well: many have the same load report."""
    return status_headers(Code.OK, "", trailers)


def status_headers(
    code: Code, message: str, trailers: Sequence[tuple[str, str | bytes]]
) -> list[Header]:
    """Make the headers that end an RPC."""
    headers: list[Header] = [(b"grpc-status", b"%d" % code)]
    if message:
        text = quote(message, safe=_AS_IT_IS).encode()
        headers.append(NeverIndexedHeaderTuple(b"grpc-message", text))
    for key, value in trailers:
        sent = value.encode() if isinstance(value, str) else base64.b64encode(value).rstrip(b"=")
        # They differ from RPC to RPC: the compression's table is for what comes again.
        headers.append(NeverIndexedHeaderTuple(key.encode(), sent))
    return headers
