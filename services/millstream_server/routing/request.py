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
    session_key: str = ""
    """The client's key: requests with the same one go to the same worker; empty: no preference."""
    adapter: str = ""
    """Name of the LoRA adapter; empty: the base model."""
    cache_salt: str = ""
    """Separates KV caches, as `GenerationRequest.cache_salt`."""
    priority: Priority = Priority.NORMAL
