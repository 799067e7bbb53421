"""Frees the blocks of a hand-off by push that doesn't come about, at both ends.

vLLM keeps the blocks of a request that was aborted while it waited until prefill has written into
them, and its core steps without a pause until then. If prefill is gone, or was cancelled, that is
for ever. And a prefill that has ended keeps its own until decode asks, or their lease is over. So a
decode leg that ends without a token, however early, tells prefill to write nothing; a write that
has begun gets time to end; then vLLM is told that it has. A prefill that is told so frees its
blocks, at once or when it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)

WRITE_S = 5.0
"""Longest that a write which has begun takes to end."""


class Withdrawals:
    """Transfers that nobody waits for any more, from the side of the client of vLLM's core."""

    def __init__(self, client: Any) -> None:
        """``client``: vLLM's."""
        self._client = client
        self._new: dict[str, Mapping[str, Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, core_id: str, transfer: Mapping[str, Any]) -> None:
        """Free the blocks of a request that is over, of both ends.

        ``core_id``: vLLM's id; ``transfer``: its `kv_transfer_params`. Those of one moment go
        together.
        """
        self._new[core_id] = transfer
        if len(self._new) == 1:
            task = asyncio.create_task(self._free(), name="vllm-withdrawal")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _free(self) -> None:
        transfers, self._new = self._new, {}
        call = self._client.collective_rpc_async
        try:
            await call("withdraw_transfers", None, (transfers,))
            await asyncio.sleep(WRITE_S)
            await call("release_transfers", None, (list(transfers),))
        except Exception as error:  # noqa: BLE001 - it is dead; its requests learn it too
            log.warning("vLLM didn't free the blocks of a hand-off", error=error)

    def close(self) -> None:
        """Stop; vLLM is gone, or goes."""
        for task in self._tasks:
            task.cancel()


async def free_withdrawn(client: Any) -> None:
    """Let a prefill engine free the blocks of requests that decode has withdrawn; at its start."""
    await client.collective_rpc_async("free_withdrawn")
