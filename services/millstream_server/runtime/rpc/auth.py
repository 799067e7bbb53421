"""Authentication: who calls, and whether they may. Denies by default once keys or peers are set.

With API keys a caller needs a valid key, with allowed peers a client certificate of one of them,
with both both. Health is open to all. Out-of-band load reports are open to callers without a key,
since gRPC's client opens their stream itself and can't add one; so is the page at `/`, which asks
its reader for the key. All other methods are refused before the request is parsed, also those that
don't exist, so that callers can't find out which do.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial

from millstream_server.runtime.errors import PermissionDeniedError, UnauthenticatedError
from millstream_server.runtime.rpc.call import Call, CertificateName, Layer
from millstream_server.runtime.security.api_keys import ApiKeys
from millstream_server.runtime.settings import SettingsError

_HEALTH = frozenset(f"/grpc.health.v1.Health/{name}" for name in ("Check", "Watch", "List"))
_LOAD = frozenset({"/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics"})
_PAGE = frozenset({"/http/"})
_BEARER = "bearer "


class CallerKind(enum.StrEnum):
    """How a caller was authenticated."""

    ANONYMOUS = "anonymous"
    API_KEY = "api_key"
    CERTIFICATE = "certificate"


@dataclass(frozen=True, slots=True)
class CallerIdentity:
    """Who called an RPC; ``name`` is never a secret: usable in logs, metrics and for tenancy."""

    name: str
    kind: CallerKind

    @property
    def key(self) -> str:
        return f"{self.kind}:{self.name}"


ANONYMOUS = CallerIdentity("anonymous", CallerKind.ANONYMOUS)
_CALLER: ContextVar[CallerIdentity] = ContextVar("millstream_caller", default=ANONYMOUS)
caller: Callable[[], CallerIdentity] = _CALLER.get
"""Returns who called the RPC that this task serves; anonymous without authentication."""


class PeerIdentities:
    """Which names in client certificates may call.

    Names are the DNS and URI entries of the certificate's Subject Alternative Name; the common name
    doesn't count. A pattern is such a name; one with ":" is a URI and may end in `/*` for all
    below it; `*` alone is any name. URIs are compared with URI entries only, other patterns with
    DNS entries only. Without patterns no certificate may call.
    """

    def __init__(self, patterns: Iterable[str], setting: str = "--allowed-peers") -> None:
        """Check the patterns; ``setting`` is the flag they come from, for errors.

        Raises:
            SettingsError: a pattern has a `*` elsewhere.
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

    def allowed(self, names: Iterable[CertificateName]) -> str | None:
        return next(
            (n.value for n in names if any(_matches(n, each) for each in self._patterns)), None
        )


def _matches(name: CertificateName, pattern: str) -> bool:
    if pattern == "*":
        return name.value != ""
    if name.kind == "dns":
        return ":" not in pattern and name.value.lower() == pattern.lower()
    if pattern.endswith("*"):
        stem = pattern[:-1]
        return name.value.startswith(stem) and name.value != stem
    return ":" in pattern and name.value == pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthPolicy:
    """What a caller needs. With neither keys nor peers every caller may call, as anonymous."""

    keys: ApiKeys | None = None
    peers: PeerIdentities | None = None

    def layers(self) -> list[Layer]:
        """Return the layers that enforce it: none without keys and peers."""
        found: list[Layer] = []
        if self.peers is not None:
            found.append(AuthLayer(partial(_certificate_owner, self.peers), _HEALTH))
        if self.keys is not None:
            found.append(AuthLayer(partial(_key_owner, self.keys), _HEALTH | _LOAD | _PAGE))
        return found


class AuthLayer:
    """Refuses RPCs whose caller isn't authenticated, before their requests are parsed."""

    def __init__(
        self, recognize: Callable[[Call], CallerIdentity], open_methods: frozenset[str]
    ) -> None:
        """Call ``recognize`` for every method but the open ones; it raises for unknown callers."""
        self._recognize = recognize
        self._open = open_methods

    def covers(self, method: str) -> bool:
        return method not in self._open

    def enter(self, call: Call) -> None:
        known = self._recognize(call)
        _CALLER.set(known)  # each RPC is a task with its own context
        call.caller_key = known.key


@cache
def _key_holder(name: str) -> CallerIdentity:
    return CallerIdentity(name, CallerKind.API_KEY)


def _key_owner(keys: ApiKeys, call: Call) -> CallerIdentity:
    key = _presented_key(call.metadata)
    name = keys.name_of(key) if key else None
    if name is None:
        raise UnauthenticatedError(
            "this server requires a valid API key; send it as the metadata "
            "'authorization: Bearer KEY'"
        )
    return _key_holder(name)


def _presented_key(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """Return the key of a call; a proxy may have added its own credentials beside `x-api-key`."""
    keys: list[str] = []
    tokens: list[str] = []
    for name, value in metadata:
        if name == "x-api-key":
            keys.append(str(value))
        elif name == "authorization":
            tokens.append(str(value))
    keys = keys or [
        token[len(_BEARER) :].strip() if token[: len(_BEARER)].lower() == _BEARER else ""
        for token in tokens
    ]
    # Several keys may belong to different callers: refuse.
    return keys[0] if len(keys) == 1 else None


def _certificate_owner(peers: PeerIdentities, call: Call) -> CallerIdentity:
    names = call.certificate_names
    if names is None:
        raise UnauthenticatedError("this server requires a client certificate")
    name = peers.allowed(names)
    if name is None:
        raise PermissionDeniedError(
            "the client certificate is valid, but none of its DNS or URI names may call this server"
        )
    return CallerIdentity(name, CallerKind.CERTIFICATE)
