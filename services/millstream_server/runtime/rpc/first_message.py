"""Methods whose handlers have nothing to do before the first message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def after_first_message(servicer: F) -> F:
    """Let calls of a method be served when their first message comes, or the end of their requests.

    For methods with many requests; those with one always wait for it. RPCs that stay silent then
    cost no task. Authentication and limits don't wait. On grpc.aio it has no effect.
    """
    servicer.after_first_message = True  # type: ignore[attr-defined]
    return servicer


def waits_for_first_message(servicer: Callable[..., Any]) -> bool:
    """Return whether a method was decorated so."""
    return getattr(servicer, "after_first_message", False)
