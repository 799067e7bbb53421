"""Who calls, and whether they may: deny by default, as soon as keys or peers are configured.

What is configured must be fulfilled: with API keys a right key, with allowed peers a client
certificate of one of them, with both both. Health is open to probes. Load reports out of band are
open to callers without a key, since gRPC's client opens their stream by itself and has no way to
add one. Every other method, known or not, is refused before it is looked at: before its request is
parsed, and before the answer tells whether it exists.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

from millstream_server.runtime.api_keys import ApiKeys
from millstream_server.runtime.errors import PermissionDeniedError, UnauthenticatedError
from millstream_server.runtime.handlers import Context
from millstream_server.runtime.settings import SettingsError

_HEALTH = frozenset(f"/grpc.health.v1.Health/{name}" for name in ("Check", "Watch", "List"))
_LOAD = frozenset({"/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics"})
_BEARER = "bearer "


class CallerKind(enum.Enum):
    """How a caller was recognized."""

    ANONYMOUS = "anonymous"
    API_KEY = "api_key"
    CERTIFICATE = "certificate"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who an RPC belongs to; ``name`` is fit for logs, metrics and tenancy, never a secret."""

    name: str
    kind: CallerKind


ANONYMOUS = Caller("anonymous", CallerKind.ANONYMOUS)
_CALLER: ContextVar[Caller] = ContextVar("millstream_caller", default=ANONYMOUS)


def caller() -> Caller:
    """Tell whose RPC this task works for; anonymous where no authentication is configured."""
    return _CALLER.get()


class PeerIdentities:
    """The names of client certificates that may call.

    Names are those of the certificate's Subject Alternative Name, DNS or URI; a common name is
    none. A pattern is such a name; a URI may end in `/*` for all below it; `*` alone is any name.
    Without patterns nobody may.
    """

    def __init__(self, patterns: Iterable[str], setting: str = "--allowed-peers") -> None:
        """Check the patterns, which ``setting`` holds.

        Raises:
            SettingsError: a pattern has its `*` elsewhere.
        """
        self._patterns = tuple(patterns)
        for pattern in self._patterns:
            stem = pattern.removesuffix("*")
            is_tree = "://" in stem and stem.endswith("/") and not stem.endswith("://")
            if "*" in stem or (stem != pattern and stem and not is_tree):
                raise SettingsError(
                    f"{setting}: {pattern!r}: a '*' stands alone, or after the last '/' of "
                    "a URI such as spiffe://cluster.local/ns/millstream/*"
                )

    def allowed(self, names: Iterable[str]) -> str | None:
        """Answer the first name that may call."""
        return next((name for name in names if any(map(_matcher(name), self._patterns))), None)


def _matcher(name: str) -> Callable[[str], bool]:
    is_uri = "://" in name
    plain = name if is_uri else name.lower()

    def matches(pattern: str) -> bool:
        if pattern.endswith("*"):
            stem = pattern[:-1]
            return plain.startswith(stem) and plain != stem
        return plain == (pattern if is_uri else pattern.lower())

    return matches


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthPolicy:
    """What a caller must bring. With neither keys nor peers everybody is let in, anonymous."""

    keys: ApiKeys | None = None
    peers: PeerIdentities | None = None

    def layers(self) -> list[AuthLayer]:
        """Make what enforces it: nothing where there is nothing to enforce."""
        found = []
        if self.peers is not None:
            found.append(AuthLayer(partial(_certificate_owner, self.peers), _HEALTH))
        if self.keys is not None:
            found.append(AuthLayer(partial(_key_owner, self.keys), _HEALTH | _LOAD))
        return found


class AuthLayer:
    """Lets an RPC through when its caller is recognized; strangers' bytes stay bytes."""

    def __init__(
        self, recognize: Callable[[Context], Caller], open_methods: frozenset[str]
    ) -> None:
        """Call ``recognize`` for every method but the open ones; it raises for strangers."""
        self._recognize = recognize
        self._open = open_methods

    def covers(self, method: str) -> bool:
        """All that isn't open, known or not."""
        return method not in self._open

    @contextlib.contextmanager
    def around(
        self, requests: AsyncIterator[Any], context: Context
    ) -> Iterator[tuple[AsyncIterator[Any], Context]]:
        """Let in, or raise."""
        _CALLER.set(self._recognize(context))  # each RPC is a task with a context of its own
        yield requests, context


def _key_owner(keys: ApiKeys, context: Context) -> Caller:
    key = _presented_key(context.invocation_metadata() or ())
    name = keys.name_of(key) if key else None
    if name is None:
        raise UnauthenticatedError(
            "this server asks for an API key that it knows; send it as the metadata "
            "'authorization: Bearer KEY'"
        )
    return Caller(name, CallerKind.API_KEY)


def _presented_key(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """Find the one key of a call; a proxy may have put its own credentials beside `x-api-key`."""
    sent: dict[str, list[str]] = {"x-api-key": [], "authorization": []}
    for name, value in metadata:
        if name in sent and isinstance(value, str):
            sent[name].append(value)
    keys = sent["x-api-key"] or [
        value[len(_BEARER) :].strip() if value[: len(_BEARER)].lower() == _BEARER else ""
        for value in sent["authorization"]
    ]
    return keys[0] if len(keys) == 1 else None  # with two, whom would we believe?


def _certificate_owner(peers: PeerIdentities, context: Context) -> Caller:
    facts: Mapping[str, Iterable[bytes]] = context.auth_context()
    if "x509_pem_cert" not in facts:
        raise UnauthenticatedError("this server asks for a client certificate")
    names = [
        name.decode(errors="replace")
        for key in ("peer_uri", "peer_dns")
        for name in facts.get(key, ())
    ]
    name = peers.allowed(names)
    if name is None:
        raise PermissionDeniedError(
            "the client certificate is good, but none of its DNS or URI names may call this server"
        )
    return Caller(name, CallerKind.CERTIFICATE)
