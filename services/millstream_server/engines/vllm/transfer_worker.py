"""What vLLM's worker processes run of ours, in engines that hand off: NIXL with locks, withdrawals.

vLLM imports this module in its workers, as their extension, before they make their NIXL agent.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from millstream_server.engines.vllm.core_process import recheck_queues

_AGENTS = "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker"
_MOST_HANDSHAKES = 3
_MOST_EARLY = 10_000
"""Most registrations, of some 1 KB, that a prefill engine keeps for prompts it hasn't computed."""


def lock_nixl() -> None:
    """Let NIXL's agents of this process take calls from several threads.

    vLLM 0.32 makes them without locks, and calls them from three: it adds an engine that it meets
    in one, while another sends and receives notifications, and a third looks after transfers.
    """
    module: Any = importlib.import_module(_AGENTS)
    made: Any = module.nixl_agent_config
    if made is None:  # there is no NIXL: vLLM says so
        return
    modes: Any = importlib.import_module(made.__module__).nixl_thread_sync_t
    module.nixl_agent_config = functools.partial(made, sync_mode=modes.NIXL_THREAD_SYNC_STRICT)


class TransferWorker:
    """Methods that vLLM adds to its worker. Push only; `engines.vllm.withdrawal` calls them."""

    def free_withdrawn(self) -> None:
        """Let prefill free what it need not or can't write. See `withdraw_transfers`."""
        connector = _connector()
        connector._pending_d_registrations = _Newest()  # noqa: SLF001 - no public one
        connector._do_start_push_kv = _Writes(connector).start  # noqa: SLF001

    def withdraw_transfers(self, peers: Mapping[str, Mapping[str, Any]]) -> None:
        """Tell prefill to write nothing: a registration without blocks replaces the first one.

        There may be no first one: a request that was cancelled early hasn't been scheduled.
        """
        connector = _connector()
        for core_id, peer in peers.items():
            registration = _empty_registration(connector, core_id, peer)
            connector._reg_send_inbox.put((core_id, registration))  # noqa: SLF001 - no public one
        connector._push_writer_wake.set()  # noqa: SLF001

    def release_transfers(self, core_ids: Sequence[str]) -> None:
        """Treat transfers as done, as prefill's notification would."""
        connector = _connector()
        for core_id in core_ids:
            if core_id in connector._recving_metadata:  # noqa: SLF001
                connector._recving_transfers.setdefault(core_id, [])  # noqa: SLF001


class _Writes:
    """What a prefill engine writes into decode's blocks, in the place of vLLM's own method.

    vLLM tries to meet a decode engine once, for all requests that need it then. If that fails, as
    on a machine too busy to answer within 5 s, it keeps their blocks until the lease is over.
    """

    def __init__(self, connector: Any) -> None:
        """``connector``: vLLM's, whose `_do_start_push_kv` is replaced by `start`."""
        self._connector = connector
        self._write = connector._do_start_push_kv  # noqa: SLF001 - no public one
        self._failed: Counter[str] = Counter()
        """Failed handshakes by request."""

    def start(self, core_id: str, blocks: Any, registration: Mapping[str, Any]) -> None:
        """Write once decode's engine is known. All calls come from vLLM's writer thread.

        Decode may give up meanwhile, and use its blocks for others: that registration counts. And
        the lease may end, after which prefill's own blocks are others'.
        """
        if core_id not in self._connector._reqs_to_process:  # noqa: SLF001 - no public one
            del self._failed[core_id]
            return
        registration = self._connector._pending_d_registrations.pop(core_id, registration)  # noqa: SLF001
        wanted = any(registration["local_block_ids"])
        if not wanted or self._failed[core_id] == _MOST_HANDSHAKES:
            self._free(core_id)
            return
        meeting = self._connector._ensure_handshake(  # noqa: SLF001
            registration["decode_engine_id"],
            registration["decode_host"],
            registration["decode_port"],
            registration["decode_tp_size"],
        )
        if meeting is None:
            del self._failed[core_id]
            self._write(core_id, blocks, registration)
            return

        def again(met: Future[Any]) -> None:
            if met.exception() is not None:
                self._failed[core_id] += 1
            self._connector._deferred_push_inbox.put((core_id, blocks, registration))  # noqa: SLF001
            self._connector._push_writer_wake.set()  # noqa: SLF001

        meeting.add_done_callback(again)

    def _free(self, core_id: str) -> None:
        """Treat it as written."""
        del self._failed[core_id]
        with self._connector._sending_transfers_lock:  # noqa: SLF001
            self._connector._sending_transfers.setdefault(core_id, [])  # noqa: SLF001


class _Newest(dict[str, Any]):
    """Registrations by id; vLLM keeps those of prompts that are never computed for ever."""

    def __setitem__(self, core_id: str, registration: Any) -> None:
        super().__setitem__(core_id, registration)
        if len(self) > _MOST_EARLY:
            del self[next(iter(self))]


def _connector() -> Any:
    """Return vLLM's `NixlPushConnectorWorker` of this process."""
    groups: Any = importlib.import_module("vllm.distributed.kv_transfer")
    return groups.get_kv_transfer_group().connector_worker


def _empty_registration(connector: Any, core_id: str, peer: Mapping[str, Any]) -> dict[str, Any]:
    """Make what vLLM's scheduler sends to prefill for a request, without blocks."""
    envs: Any = importlib.import_module("vllm.envs")
    parallel = connector.vllm_config.parallel_config
    return {
        "request_id": core_id,
        "decode_engine_id": connector.engine_id,
        "decode_host": envs.VLLM_NIXL_SIDE_CHANNEL_HOST,
        "decode_port": envs.VLLM_NIXL_SIDE_CHANNEL_PORT + parallel.data_parallel_index,
        "decode_tp_size": parallel.tensor_parallel_size,
        "local_block_ids": [],
        "remote_engine_id": peer["remote_engine_id"],
        "remote_host": peer["remote_host"],
        "remote_port": peer["remote_port"],
        "remote_tp_size": peer["tp_size"],
        "remote_pp_size": peer["pp_size"],
    }


if "vllm" in sys.modules:  # a worker of vLLM's imports this, not a test without vLLM
    lock_nixl()
    recheck_queues()  # it may have been spawned
