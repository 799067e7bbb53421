"""Limits on the request messages of single methods, below the server's limit for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

SMALL_REQUEST_BYTES = 4 << 10
"""For services whose requests are names: gRPC's longest are 1 KiB. Their callers may hold nothing
of admission, a key or a certificate, and reflection sends the request back."""

F = TypeVar("F", bound=Callable[..., Any])


def max_request_bytes(most: int) -> Callable[[F], F]:
    """Let a servicer's method take messages of so many bytes at most."""

    def limit(servicer: F) -> F:
        servicer.max_request_bytes = most  # type: ignore[attr-defined]
        return servicer

    return limit


def request_limit(servicer: Callable[..., Any]) -> int | None:
    """Return a method's own limit; None: it has the server's."""
    found: int | None = getattr(servicer, "max_request_bytes", None)
    return found
