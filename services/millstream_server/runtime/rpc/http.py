"""Requests of HTTP that aren't gRPC: what serves a path, and how its API says a failure.

An endpoint is served as an RPC method is: the same layers, then its function. HTTP/1.1 and HTTP/2
look the same to it.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from millstream_server.runtime.errors import (
    Code,
    Failure,
    RepeatedLossError,
    StatusError,
    UnknownMethodError,
)
from millstream_server.runtime.request_id import MAX_REQUEST_ID_BYTES, new_request_id
from millstream_server.runtime.rpc.call import Call
from millstream_server.runtime.rpc.serving import Method, Rpcs

SERVICE = "http"
"""In place of a service's name, where layers ask for it."""
REQUEST_ID = "x-request-id"
JSON = "application/json"
EVENTS = "text/event-stream; charset=utf-8"
_RETRIED = (429, 503)
_ID = re.compile(rf"[!-~]{{1,{MAX_REQUEST_ID_BYTES}}}").fullmatch
_LONGEST_PATH = 200
STATUSES: Mapping[Code, int] = {
    Code.OK: 200,
    Code.CANCELLED: 499,
    Code.INVALID_ARGUMENT: 400,
    Code.OUT_OF_RANGE: 400,
    Code.FAILED_PRECONDITION: 400,
    Code.UNAUTHENTICATED: 401,
    Code.PERMISSION_DENIED: 403,
    Code.NOT_FOUND: 404,
    Code.UNIMPLEMENTED: 404,
    Code.ALREADY_EXISTS: 409,
    Code.ABORTED: 409,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.UNAVAILABLE: 503,
    Code.DEADLINE_EXCEEDED: 504,
}
"""HTTP's statuses of ours, as google.rpc.Code has them; all others are 500."""
_TOO_LARGE = 413

Headers = Sequence[tuple[str, str]]


class BodyTooLargeError(StatusError):
    """The body has more bytes than the server takes."""

    def __init__(self, most_bytes: int) -> None:
        most = f"the {most_bytes} bytes that this server takes (--max-receive-bytes)"
        super().__init__(Code.RESOURCE_EXHAUSTED, f"the body has more than {most}")


class HttpCall(Call, Protocol):
    """A request of HTTP. `Call.write` sends a whole body, `send_from` one in pieces of bytes."""

    request_id: str
    """The caller's `x-request-id` or, if it has none that is sound, a new one."""
    verb: str
    route: str
    """The endpoint's path; empty: the server has none like the request's."""
    path: str
    """As it was sent, without the query."""
    query: str
    status: int
    """Of the response that was sent; 0: none was."""
    refuse: Refuse
    """Says failures: the endpoint's, which may put another in its place."""

    def respond(self, content_type: str, headers: Headers = ()) -> None:
        """Choose what `write` and `send_from` send; the status is 200. Without it, it is JSON."""

    def add_header(self, name: str, value: str) -> None:
        """Add a header to what `respond` has chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """How an API says a failure."""

    status: int
    body: bytes
    headers: Headers = ()
    content_type: str = JSON
    event: bytes = b""
    """What ends a stream of events that has begun; empty: the connection is cut."""


Refuse = Callable[[Failure], Refusal]
Serve = Callable[[bytes, Any], Awaitable[Any]]
"""Serves a request: takes its body and `HttpCall`, and sends by the call."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What serves a path."""

    verb: str
    path: str
    """One that ends in `{NAME}` is for all paths that begin with what stands before that."""
    serve: Serve
    refuse: Refuse

    # As `Method` asks for: one message in, and the servicer sends what goes out.
    request_streaming = False
    response_streaming = True
    request_deserializer = None
    response_serializer = None

    @property
    def unary_stream(self) -> Serve:
        return self.serve


class Endpoints:
    """Finds what serves a request."""

    def __init__(
        self,
        rpcs: Rpcs,
        endpoints: Sequence[Endpoint],
        refuse: Refuse,
    ) -> None:
        """Serve ``endpoints`` with the layers of ``rpcs``; ``refuse`` is for all other paths."""
        self._rpcs = rpcs
        self._refuse = refuse
        self._found = {
            (each.verb, each.path): (each, rpcs.method(_name(each.path), each))
            for each in endpoints
        }
        self._paths = sorted({each.path for each in endpoints})
        self._folders = [key for key in self._found if key[1].endswith("}")]

    def find(self, verb: str, path: str) -> tuple[Endpoint, Method]:
        """Return what serves a request; what there isn't is refused after the layers."""
        found = self._found.get((verb, path)) or self._below(verb, path)
        if found is not None:
            return found
        why = f"this server has no {verb} {path[:_LONGEST_PATH]}; it serves "

        async def fail(_body: bytes, _call: HttpCall) -> NoReturn:
            raise UnknownMethodError(why + ", ".join(self._paths))

        endpoint = Endpoint(verb, "", fail, self._refuse)
        return endpoint, self._rpcs.method(_name("other"), endpoint)

    def _below(self, verb: str, path: str) -> tuple[Endpoint, Method] | None:
        for key in self._folders:
            if key[0] == verb and path.startswith(key[1].partition("{")[0]):
                return self._found[key]
        return None


def _name(path: str) -> str:
    return f"/{SERVICE}/{path.strip('/').replace('/', '.')}"


def request_id_of(headers: Sequence[tuple[str, str | bytes]]) -> str:
    """Return the id that a request brings, or a new one: a bad one must not fail it."""
    for name, value in headers:
        if name == REQUEST_ID and isinstance(value, str) and _ID(value):
            return value
    return new_request_id()


def status_of(failure: Failure) -> int:
    """Return HTTP's status of a failure."""
    return _TOO_LARGE if isinstance(failure, BodyTooLargeError) else STATUSES.get(failure.code, 500)


def retry_after(failure: Failure) -> Headers:
    """Return the header that says when to retry: whole seconds, at least one (RFC 9110).

    Or that a client should not: OpenAI's and Anthropic's libraries send whatever failed so again.
    """
    if isinstance(failure, RepeatedLossError):
        return (("x-should-retry", "false"),)
    if status_of(failure) not in _RETRIED:
        return ()
    delay_s = getattr(failure, "retry_delay_s", None) or 1.0
    return (("retry-after", str(max(1, -int(-delay_s // 1)))),)
