"""A worker as routing uses it."""

from __future__ import annotations

from dataclasses import dataclass

from millstream_server.engines.base import EngineLoad, WorkerDescription


@dataclass(slots=True, eq=False)
class WorkerView:
    """One worker's state. The worker's link updates it, routing only reads it."""

    address: str
    description: WorkerDescription | None = None
    """Its description while it accepts new requests; else None."""
    last_description: WorkerDescription | None = None
    """Its description when it last accepted requests; None: it never did."""
    in_flight: int = 0
    """Our requests that have not ended there."""
    in_use: int = 0
    """Those of them that were not cancelled."""
    load: EngineLoad | None = None
    """Its last load report; None: there is none, or it is too old."""
