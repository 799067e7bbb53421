"""KV events from vLLM's core processes to a sink of ours, over ZeroMQ sockets in a private folder.

Each rank's core binds two: it publishes its batches, and replays those that were missed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millstream_server.engines.kv_feed import LIMITS, RankFeed

LOAD_MARK = "#"
"""Between an adapter's name and the number of its load, in the names that vLLM gets."""
_TRANSLATION = "millstream_server.engines.vllm.kv_translation"


class KvFeed(RankFeed):
    """Follows all ranks' events: `follow`, `publisher`, `started`, `close`; see `RankFeed`."""

    def __init__(self) -> None:
        """Follow nothing."""
        super().__init__()
        self._folder: Path | None = None

    def publisher(self) -> Mapping[str, Any] | None:
        """Return vLLM's `KVEventsConfig`; None: nobody follows."""
        if self._sink is None:
            return None
        self._folder = self._make_folder()
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self._endpoint("events", 0),
            "replay_endpoint": self._endpoint("replay", 0),
            **LIMITS,
        }

    def _endpoint(self, name: str, rank: int) -> str:
        # vLLM adds a rank's number to the one behind the colon, if it finds "tcp" in the address;
        # to 0 it adds nothing, and all ranks would bind the same.
        return f"ipc://{self._folder}/tcp-{name}:{rank + 1}"

    def started(self, ranks: int) -> bool:
        """Read from now on, and ask for what came before; return whether anybody follows."""
        if self._sink is None or self._folder is None:
            return False
        addresses = [
            (self._endpoint("events", rank), self._endpoint("replay", rank))
            for rank in range(ranks)
        ]
        self._read(self._sink, addresses, _TRANSLATION, binds=False)
        return self._catch_up()
