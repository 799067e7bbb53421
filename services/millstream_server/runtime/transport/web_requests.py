"""Which requests of HTTP are RPCs of gRPC-web or Connect, and what their heads say."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from millstream_server.runtime.errors import Code, StatusError
from millstream_server.runtime.rpc.connect import HttpRefusalError
from millstream_server.runtime.transport.headers import (
    Header,
    RequestHead,
    add_metadata,
    timeout_s,
)
from millstream_server.runtime.transport.inbox import ENCODINGS, is_known_encoding
from millstream_server.runtime.transport.web_framing import (
    ConnectStream,
    ConnectUnary,
    Framing,
    GrpcWeb,
    GrpcWebText,
)

_GRPC = "application/grpc"
_PROTO, _JSON = "application/proto", "application/json"
_KINDS: Mapping[str, tuple[type[Framing], str]] = {
    "application/grpc-web": (GrpcWeb, "application/grpc-web+proto"),
    "application/grpc-web+proto": (GrpcWeb, "application/grpc-web+proto"),
    "application/grpc-web+json": (GrpcWeb, "application/grpc-web+json"),
    "application/grpc-web-text": (GrpcWebText, "application/grpc-web-text+proto"),
    "application/grpc-web-text+proto": (GrpcWebText, "application/grpc-web-text+proto"),
    "application/connect+proto": (ConnectStream, "application/connect+proto"),
    "application/connect+json": (ConnectStream, "application/connect+json"),
    _PROTO: (ConnectUnary, _PROTO),
    _JSON: (ConnectUnary, _JSON),
}
"""By the request's content type: the framing, and the content type of responses."""
UNARY_TYPES = [name for name, (kind, _) in _KINDS.items() if kind is not ConnectStream]
STREAM_TYPES = [name for name, (kind, _) in _KINDS.items() if kind is not ConnectUnary]
_ENCODING = {
    GrpcWeb: b"grpc-encoding",
    GrpcWebText: b"grpc-encoding",
    ConnectStream: b"connect-content-encoding",
    ConnectUnary: b"content-encoding",
}
"""The header that says how messages are compressed."""
_is_rpc = re.compile(r"/[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+/[A-Za-z_]\w*", re.ASCII).fullmatch
"""A path of a proto package, a service and a method; no endpoint of HTTP has one."""
_is_ms = re.compile(rb"[0-9]{1,10}").fullmatch
_NO_METADATA = frozenset(
    {b"accept", b"accept-encoding", b"connection", b"content-encoding", b"content-length",
     b"content-type", b"grpc-accept-encoding", b"grpc-encoding", b"grpc-timeout", b"host",
     b"keep-alive", b"te", b"transfer-encoding", b"upgrade"}
)  # fmt: skip
_COLON = ord(":")
"""In front of HTTP/2's pseudo headers."""


@dataclass(frozen=True, slots=True)
class WebRequest:
    """The head of an RPC."""

    head: RequestHead
    framing: Framing
    problem: StatusError | None = None
    """Why it can't be served."""


def read_web(verb: str, target: str, fields: Sequence[Header]) -> WebRequest | None:
    """Read the head of a request; ``target`` is its path with its query. None: it is no RPC."""
    path = target.partition("?")[0]
    given = dict(fields)
    content_type = given.get(b"content-type", b"").decode("latin-1").partition(";")[0]
    content_type = content_type.strip().lower()
    found = _KINDS.get(content_type)
    if verb != "POST" or (found is None and content_type.startswith(_GRPC)):
        return None
    if (found is None or found[0] is ConnectUnary) and not _is_rpc(path):
        return None  # other requests have Connect's types, too
    head = RequestHead(path)
    kind, returned = found or (ConnectUnary, _JSON)
    framing = kind(returned, json=returned.endswith("json"))
    problem: StatusError | None = None
    if found is None:
        problem = unknown_type(list(_KINDS))
    else:
        head.encoding = given.get(_ENCODING[kind], b"identity")
        problem = _read_fields(head, fields)
    return WebRequest(head, framing, problem)


def unknown_type(known: Sequence[str]) -> HttpRefusalError:
    """Make the refusal of a content type that is none of those ``known``."""
    types = ", ".join(known)
    return HttpRefusalError(415, f"the content type is none of {types}", (("accept-post", types),))


def _read_fields(head: RequestHead, fields: Sequence[Header]) -> StatusError | None:
    """Read deadline and metadata; return what is wrong with them, or with the compression."""
    try:
        for name, value in fields:
            if name == b"grpc-timeout":
                head.timeout_s = timeout_s(value)
            elif name == b"connect-timeout-ms":
                head.timeout_s = _from_ms(value)
            elif name == b"connect-protocol-version":
                if value != b"1":
                    raise _invalid("connect-protocol-version: must be 1")
            elif name not in _NO_METADATA and name[0] != _COLON:
                add_metadata(head.metadata, name.decode("ascii", "replace"), value)
    except StatusError as error:
        return error
    if is_known_encoding(head.encoding):
        return None
    known = f"is none of identity, {', '.join(ENCODINGS)}"
    sent, head.encoding = head.encoding.decode("ascii", "replace"), b"identity"
    return StatusError(Code.UNIMPLEMENTED, f"the compression {sent!r} {known}")


def _from_ms(value: bytes) -> float:
    if not _is_ms(value):
        raise _invalid("connect-timeout-ms: must be a number of up to ten digits")
    return int(value) / 1000


def _invalid(why: str) -> StatusError:
    return StatusError(Code.INVALID_ARGUMENT, why)
