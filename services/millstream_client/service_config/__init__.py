"""The recommended gRPC service config; `python -m millstream_client.service_config` prints it.

Any gRPC library accepts it as JSON, so that a client in another language balances and retries as
ours does. What it contains, and why:

- ``weighted_round_robin`` sends more to Processors that report less load, and is plain round robin
  while they report nothing. They report on a separate stream, since the trailers of long answers
  come late. A library without this policy uses ``round_robin``, next in the list.
- ``healthCheckConfig`` watches each Processor's health: one that drains gets nothing new, at once.
- ``retryPolicy`` covers UNAVAILABLE alone, the one code that says "elsewhere, or soon". An attempt
  is retried only before its first response message. Until then the caller has received nothing, and
  a request has no effect but its answer, so sending it again is safe, a Chat's buffered messages
  too. Five attempts are gRPC's maximum; with pauses of 0.1 to 0.8 s they last a second and a half,
  enough for a channel to find another server.
- ``retryThrottling`` lets 500 requests that run on one channel fail at once, as when a server dies,
  and stops retrying when more than one in three keeps failing.
- ``waitForReady`` makes a call wait for a connection instead of failing. A call without a deadline
  then waits for ever: set deadlines.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

SERVICE = "millstream.v1.ProcessorService"
DIFFUSION_SERVICE = "millstream.v1.DiffusionService"
EMBEDDING_SERVICE = "millstream.v1.EmbeddingService"

_METHODS: dict[str, Any] = {
    "name": [{"service": name} for name in (SERVICE, DIFFUSION_SERVICE, EMBEDDING_SERVICE)],
    "waitForReady": True,
    "retryPolicy": {
        "maxAttempts": 5,
        "initialBackoff": "0.1s",
        "maxBackoff": "2s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE"],
    },
}

ONE_SERVER: Mapping[str, Any] = {
    "methodConfig": [_METHODS],
    "retryThrottling": {"maxTokens": 1000, "tokenRatio": 0.5},
}
"""For a target that is a single server: nothing to balance, and no health check, since the error of
a server that isn't ready helps more than no call."""

RECOMMENDED: Mapping[str, Any] = {
    "loadBalancingConfig": [
        {"weighted_round_robin": {"enableOobLoadReport": True, "oobReportingPeriod": "5s"}},
        {"round_robin": {}},
    ],
    "healthCheckConfig": {"serviceName": SERVICE},
    **ONE_SERVER,
}
"""For several Processors behind one target."""


def to_json(config: Mapping[str, Any], indent: int | None = None) -> str:
    """Return a config as JSON text."""
    return json.dumps(config, indent=indent)


def without_retries(config: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a config without its retry policies."""
    changed = copy.deepcopy(dict(config))
    for method in changed.get("methodConfig", ()):
        method.pop("retryPolicy", None)
    return changed
