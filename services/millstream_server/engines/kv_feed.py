"""KV events from the ranks of an engine in processes of its own, to a sink of ours, over ZeroMQ.

ZeroMQ and msgspec, which come with engines, are imported only when there are events to follow.
"""

from __future__ import annotations

import importlib
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from millstream_server.kv_cache.events import KvEventSink
from millstream_server.runtime.errors import EngineFailedError

LIMITS = {
    # ZeroMQ drops what is above 1,000 messages in a queue, and engines send a replay in one go.
    "buffer_steps": 900,
    # Batches that wait in a socket; further ones are lost and have to be replayed.
    "hwm": 10_000,
}
"""Of an engine's publisher, as SGLang and vLLM name them."""


class RankFeed:
    """Follows all ranks' events; a subclass makes the engine send them.

    Order of calls: `follow` (without it there are no events), the subclass's, `close`. `close` may
    be called at any time, and twice.
    """

    def __init__(self) -> None:
        """Follow nothing."""
        self._sink: KvEventSink | None = None
        self._readers: list[Any] = []
        self._resources = ExitStack()

    def follow(self, sink: KvEventSink) -> None:
        """Send all events to ``sink``."""
        self._sink = sink

    def _make_folder(self) -> Path:
        """Make a folder for sockets, which `close` removes."""
        folder = Path(tempfile.mkdtemp(prefix="millstream-kv-"))
        self._resources.callback(shutil.rmtree, folder, ignore_errors=True)
        return folder

    def _read(
        self,
        sink: KvEventSink,
        addresses: Iterable[tuple[str, str]],
        translation: str,
        *,
        binds: bool,
    ) -> None:
        """Read each rank: where its events come, and where it replays them.

        ``translation``: the module that has the engine's `Translation`.

        Raises:
            EngineFailedError: an address can't be bound.
        """
        zmq: Any = importlib.import_module("zmq")
        module: Any = importlib.import_module("millstream_server.engines.kv_reader")
        made: Any = importlib.import_module(translation).Translation
        context = self._resources.enter_context(zmq.Context())
        for rank, (events, replay) in enumerate(addresses):
            tell = partial(sink.changed, rank)
            try:
                reader = module.RankReader(context, events, replay, tell, made(), binds=binds)
            except zmq.ZMQError as error:
                message = f"kv_events_port: {events} cannot be bound: {error}."
                raise EngineFailedError(message) from error
            self._readers.append(reader)
            self._resources.callback(reader.close)

    def _catch_up(self) -> bool:
        """Ask for the events that came before; return whether there are any ranks to follow."""
        for reader in self._readers:
            reader.catch_up()
        return bool(self._readers)

    def flushed(self) -> None:
        """Tell that the caches are empty, before the ranks do."""
        for reader in self._readers:
            reader.flushed()

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
