"""KV events from SGLang's schedulers to a sink of ours.

ZeroMQ and msgspec, which come with SGLang, are imported only when there are events to follow.
"""

from __future__ import annotations

import importlib
import shutil
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from millstream_server.engines.sglang.config import SglangEngineConfig
from millstream_server.engines.sglang.kv_events.endpoints import (
    KvEndpoints,
    endpoints,
    publishes,
    spread,
)
from millstream_server.kv_cache.events import KvEventSink
from millstream_server.runtime.errors import EngineFailedError
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)

_READER = "millstream_server.engines.sglang.kv_events.rank_reader"


class KvEventFeed:
    """Follows all ranks' events.

    Order of calls: `follow` (without it there are no events), `open`, `started`, `close`. `close`
    may be called at any time, and twice.
    """

    def __init__(self) -> None:
        """Follow nothing."""
        self._sink: KvEventSink | None = None
        self._readers: list[Any] = []
        self._resources = ExitStack()

    def follow(self, sink: KvEventSink) -> None:
        """Send all events to ``sink``."""
        self._sink = sink

    def open(self, config: SglangEngineConfig) -> SglangEngineConfig:
        """Listen for events; return the configuration that makes the schedulers send them.

        Raises:
            EngineFailedError: an address can't be bound.
        """
        if self._sink is None:
            return config
        directory = Path(tempfile.mkdtemp(prefix="millstream-kv-"))
        self._resources.callback(shutil.rmtree, directory, ignore_errors=True)
        there = endpoints(config, directory)
        if there is None:
            if publishes(config):
                log.warning("KV events of several machines need --kv-events-port: there are none")
            return config
        self._listen(there, self._sink)
        return replace(config, kv_publisher=there.publisher())

    def _listen(self, there: KvEndpoints, sink: KvEventSink) -> None:
        zmq: Any = importlib.import_module("zmq")
        module: Any = importlib.import_module(_READER)
        context = self._resources.enter_context(zmq.Context())
        for rank in range(there.ranks):
            bound = there.bound_of(rank)
            tell = partial(sink.changed, rank)
            try:
                reader = module.RankReader(context, bound, there.replay_of(rank), tell)
            except zmq.ZMQError as error:
                message = f"kv_events_port: {bound} cannot be bound: {error}."
                raise EngineFailedError(message) from error
            self._readers.append(reader)
            self._resources.callback(reader.close)

    def started(self) -> bool:
        """Ask for the events that came before the schedulers had reached this process.

        Returns whether there are any ranks to follow.
        """
        for reader in self._readers:
            reader.catch_up()
        return bool(self._readers)

    def adapter_unloaded(self, adapter: str) -> None:
        """Tell that no request can use the blocks of a LoRA adapter any more.

        To be called once it is unloaded and its requests have ended.
        """
        for reader in self._readers:
            reader.adapter_unloaded(adapter)

    def close(self) -> None:
        """Stop; no event comes afterwards."""
        self._readers.clear()
        self._resources.close()


def with_publisher(config: SglangEngineConfig) -> SglangEngineConfig:
    """Make a follower's schedulers send their events to the leader, if they have ranks' own.

    Raises:
        EngineFailedError: `leader_address` doesn't resolve.
    """
    if not (spread(config) and config.kv_events_port):
        return config
    there = endpoints(config, Path())
    return config if there is None else replace(config, kv_publisher=there.publisher())
