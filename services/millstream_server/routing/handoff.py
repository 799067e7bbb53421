"""Decides whether a request runs on one worker or is handed off from prefill to decode."""

from __future__ import annotations

from typing import Protocol

from millstream_server.routing.request import RoutingRequest


class HandoffDecider(Protocol):
    """Decides for models that have prefill, decode and aggregated workers.

    Not called where a model's workers allow only one of the two.
    """

    @property
    def constant(self) -> bool | None:
        """The decision if it is the same for every request; else None.

        Workers that are then never used don't count for capacity or readiness.
        """
        ...

    def hands_off(self, request: RoutingRequest) -> bool:
        """Return whether the request should run on two workers, prefill and decode."""
        ...


class AlwaysHandOff:
    """Uses prefill and decode workers where there are both."""

    constant = True

    def hands_off(self, request: RoutingRequest) -> bool:
        """Return True."""
        return True


class NeverHandOff:
    """Uses aggregated workers where there are any."""

    constant = False

    def hands_off(self, request: RoutingRequest) -> bool:
        """Return False."""
        return False
