"""The recommended gRPC service configs: two JSON files, which any gRPC library accepts.

`recommended.json` is for several Processors behind one target, `one_server.json` for one. With them
a client in another language balances and retries as ours does; `python -m
millstream_client.service_config` prints the first. What they contain, and why:

- ``weighted_round_robin`` sends more to Processors that report less load, and is plain round robin
  while they report nothing. They report on a separate stream, since the trailers of long answers
  come late. A library without this policy uses ``round_robin``, next in the list.
- ``healthCheckConfig`` watches the health name `accepting`, which a Processor reports as SERVING
  until it drains: then it gets nothing new, at once. Not the service's own name: without workers
  that is NOT_SERVING, and a client without a server to call sees its deadline pass, where a call
  would fail with NO_WORKER and a sentence.
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
from importlib import resources
from typing import Any

SERVICE = "millstream.v1.ProcessorService"
DIFFUSION_SERVICE = "millstream.v1.DiffusionService"
EMBEDDING_SERVICE = "millstream.v1.EmbeddingService"


def _load(name: str) -> Mapping[str, Any]:
    loaded: dict[str, Any] = json.loads(resources.files(__name__).joinpath(name).read_text())
    return loaded


ONE_SERVER = _load("one_server.json")
"""For a target that is a single server: nothing to balance, and no health check, since the error of
a server that isn't ready helps more than no call."""

RECOMMENDED = _load("recommended.json")
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
