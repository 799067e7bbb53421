"""What routing uses of a request."""

from __future__ import annotations

from collections.abc import Sequence

from millstream_server.runtime.frozen import dataclass
from millstream_server.runtime.priority import Priority


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRequest:
    """A request to be routed."""

    model: str
    token_ids: Sequence[int] = ()
    """The prompt."""
    media_start: int | None = None
    """Position of the prompt's first placeholder of an image or a video: from its block on, what is
    cached can't be told from token ids. None: there is none."""
    session: tuple[str, ...] = ()
    """Where the conversation's last turn ran (`Plan.places`)."""
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
