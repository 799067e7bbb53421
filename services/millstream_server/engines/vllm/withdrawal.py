"""Frees the blocks of a hand-off by push that doesn't come about, at both ends.

vLLM keeps the blocks of a request that was aborted while it waited until prefill has written into
them, and its core steps without a pause until then. If prefill is gone, or was cancelled, that is
for ever. So prefill is told to write nothing; a write that has begun gets time to end; then vLLM is
told that it has. A prefill that was told so, and whose own abort came too late, frees its blocks
when it ends: vLLM would keep them until the lease is over.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)

WRITE_S = 5.0
"""Longest that a write which has begun takes to end."""
WORKER = f"{__name__}.PushWorker"
"""VLLM's `worker_extension_cls` of an engine that hands off by push."""


class Withdrawals:
    """Transfers that nobody waits for any more, from the side of the client of vLLM's core."""

    def __init__(self, client: Any) -> None:
        """``client``: vLLM's."""
        self._client = client
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, transfers: Mapping[str, Mapping[str, Any]]) -> None:
        """Free the blocks of aborted requests: their `kv_transfer_params`, by vLLM's ids.

        Those that didn't wait for a transfer are left alone.
        """
        if transfers:
            task = asyncio.create_task(self._free(transfers), name="vllm-withdrawal")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _free(self, transfers: Mapping[str, Mapping[str, Any]]) -> None:
        call = self._client.collective_rpc_async
        peers = {core_id: dict(parameters) for core_id, parameters in transfers.items()}
        try:
            await call("withdraw_transfers", None, (peers,))
            await asyncio.sleep(WRITE_S)
            await call("release_transfers", None, (list(peers),))
        except Exception as error:  # noqa: BLE001 - it is dead; its requests learn it too
            log.warning("vLLM didn't free the blocks of a hand-off", error=error)

    def close(self) -> None:
        """Stop; vLLM is gone, or goes."""
        for task in self._tasks:
            task.cancel()


async def free_withdrawn(client: Any) -> None:
    """Let a prefill engine free the blocks of requests that decode has withdrawn; at its start."""
    await client.collective_rpc_async("free_withdrawn")


class PushWorker:
    """Methods that vLLM adds to its worker, which holds an end of transfers."""

    def free_withdrawn(self) -> None:
        """Treat what prefill need not write as written. See `withdraw_transfers`."""
        connector = _connector()
        write = connector._do_start_push_kv  # noqa: SLF001 - no public one

        def write_if_wanted(core_id: str, blocks: Any, registration: Mapping[str, Any]) -> None:
            if any(registration["local_block_ids"]):
                write(core_id, blocks, registration)
                return
            with connector._sending_transfers_lock:  # noqa: SLF001
                connector._sending_transfers.setdefault(core_id, [])  # noqa: SLF001

        connector._do_start_push_kv = write_if_wanted  # noqa: SLF001

    def withdraw_transfers(self, peers: Mapping[str, Mapping[str, Any]]) -> None:
        """Tell prefill to write nothing: a registration without blocks replaces the first one."""
        connector = _connector()
        for core_id, peer in peers.items():
            waiting = connector._recving_metadata.get(core_id)  # noqa: SLF001 - no public one
            if waiting is not None:
                empty: list[list[int]] = [[] for _ in waiting.local_block_ids]
                registration = _registration(connector, core_id, peer) | {"local_block_ids": empty}
                connector._reg_send_inbox.put((core_id, registration))  # noqa: SLF001
                connector._push_writer_wake.set()  # noqa: SLF001

    def release_transfers(self, core_ids: Sequence[str]) -> None:
        """Treat transfers as done, as prefill's notification would."""
        connector = _connector()
        for core_id in core_ids:
            if core_id in connector._recving_metadata:  # noqa: SLF001
                connector._recving_transfers.setdefault(core_id, [])  # noqa: SLF001


def _connector() -> Any:
    """Return vLLM's `NixlPushConnectorWorker` of this process."""
    groups: Any = importlib.import_module("vllm.distributed.kv_transfer")
    return groups.get_kv_transfer_group().connector_worker


def _registration(connector: Any, core_id: str, peer: Mapping[str, Any]) -> dict[str, Any]:
    """Make what vLLM's scheduler sends to prefill for a request."""
    envs: Any = importlib.import_module("vllm.envs")
    parallel = connector.vllm_config.parallel_config
    return {
        "request_id": core_id,
        "decode_engine_id": connector.engine_id,
        "decode_host": envs.VLLM_NIXL_SIDE_CHANNEL_HOST,
        "decode_port": envs.VLLM_NIXL_SIDE_CHANNEL_PORT + parallel.data_parallel_index,
        "decode_tp_size": parallel.tensor_parallel_size,
        "remote_engine_id": peer["remote_engine_id"],
        "remote_host": peer["remote_host"],
        "remote_port": peer["remote_port"],
        "remote_tp_size": peer["tp_size"],
        "remote_pp_size": peer["pp_size"],
    }
