"""What routing uses of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millstream_server.runtime.priority import Priority


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRequest:
    """A request to be routed."""

    model: str
    token_ids: Sequence[int] = ()
    """The prompt."""
    session: tuple[str, ...] = ()
    """Addresses of the workers that ran the conversation's last turn (`Plan.addresses`)."""
    media_at: str = ""
    """Address of the aggregated worker that holds the request's media as pixels; empty: any worker
    may run it."""
    adapter: str = ""
    """Name of the LoRA adapter; empty: the base model."""
    priority: Priority = Priority.NORMAL
