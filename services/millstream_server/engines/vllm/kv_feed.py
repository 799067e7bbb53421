"""KV events from vLLM's core processes to a sink of ours, over ZeroMQ sockets in a private folder.

Each rank's core binds two: it publishes its batches, and replays those that were missed.
"""

from __future__ import annotations

import importlib
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from millstream_server.kv_cache.events import KvEventSink

LOAD_MARK = "#"
"""Between an adapter's name and the number of its load, in the names that vLLM gets."""
_REPLAYED_BATCHES = 900
"""ZeroMQ drops what is above 1,000 messages in a queue, and a replay is sent in one go."""
_QUEUED_BATCHES = 10_000


class KvFeed:
    """Follows all ranks' events.

    Order of calls: `follow` (without it there are no events), `publisher`, `started`, `close`.
    `close` may be called at any time, and twice.
    """

    def __init__(self) -> None:
        """Follow nothing."""
        self._sink: KvEventSink | None = None
        self._folder: Path | None = None
        self._readers: list[Any] = []
        self._resources = ExitStack()

    def follow(self, sink: KvEventSink) -> None:
        """Send all events to ``sink``."""
        self._sink = sink

    def publisher(self) -> Mapping[str, Any] | None:
        """Return vLLM's `KVEventsConfig`; None: nobody follows."""
        if self._sink is None:
            return None
        self._folder = Path(tempfile.mkdtemp(prefix="millstream-kv-"))
        self._resources.callback(shutil.rmtree, self._folder, ignore_errors=True)
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self._endpoint("events", 0),
            "replay_endpoint": self._endpoint("replay", 0),
            "buffer_steps": _REPLAYED_BATCHES,
            "hwm": _QUEUED_BATCHES,
        }

    def _endpoint(self, name: str, rank: int) -> str:
        # vLLM adds a rank's number behind the colon, if it finds "tcp" in the address.
        return f"ipc://{self._folder}/tcp-{name}:{rank}"

    def started(self, ranks: int) -> bool:
        """Read from now on, and ask for what came before; return whether anybody follows."""
        if self._sink is None or self._folder is None:
            return False
        zmq: Any = importlib.import_module("zmq")
        module: Any = importlib.import_module(
            "millstream_server.engines.sglang.kv_events.rank_reader"
        )
        translation: Any = importlib.import_module("millstream_server.engines.vllm.kv_translation")
        context = self._resources.enter_context(zmq.Context())
        for rank in range(ranks):
            reader = module.RankReader(
                context,
                self._endpoint("events", rank),
                self._endpoint("replay", rank),
                partial(self._sink.changed, rank),
                translation=translation.Translation(),
                binds=False,
            )
            self._readers.append(reader)
            self._resources.callback(reader.close)
            reader.catch_up()
        return True

    def flushed(self) -> None:
        """Tell that the caches are empty: vLLM says so with its next step only."""
        for reader in self._readers:
            reader.flushed()

    def adapter_unloaded(self, adapter: str) -> None:
        """Tell that no request can use the blocks of a LoRA adapter any more."""
        for reader in self._readers:
            reader.adapter_unloaded(adapter)

    def close(self) -> None:
        """Stop; no event comes afterwards."""
        self._readers.clear()
        self._resources.close()
