# ruff: noqa: INP001 - a folder for PYTHONPATH, not a package
"""SGLang plugin (entry-point group ``sglang.srt.plugins``): a compiling grammar holds nobody up.

SGLang counts a grammar's time in polls of its scheduler, one a step; each makes the step of all
others up to 5 ms longer. Here the clock counts, and polls are short. What compiles, xgrammar's own
threads too, leaves the cores to others, and short grammars don't wait for long ones.

And a prefill engine, which answers when decode has the KV cache, tells that a prompt is computed:
it sends the request's one token with the last of the cache, for which decode has room then. A
decode engine doesn't notice that prefill was started anew at its address, if that took less than
two heartbeats, and sends to the old one until a request has waited too long: here it compares.

It does nothing in an SGLang that isn't the one it was written for (`DIGESTS`).
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
import pkgutil
import time
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

_READY = "sglang.srt.constrained.grammar_manager.GrammarManager.get_ready_grammar_requests"
_BACKEND = "sglang.srt.constrained.base_grammar_backend.BaseGrammarBackend.__init__"
_SEND = "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin.send_kv_chunk"
_STREAM = (
    "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer.stream_output"
)
_OF_DECODE = "sglang.srt.disaggregation.common.conn.CommonKV"
_BEAT = f"{_OF_DECODE}Manager._on_heartbeat_success"
DIGESTS = {
    _READY: "6681f35d2313",
    _BACKEND: "3cbfdbe2e800",
    _SEND: "f9458879c49b",
    _STREAM: "829bf4cabecc",
    _BEAT: "4af289d193de",
    f"{_OF_DECODE}Manager._handle_node_failure": "d2632ebeb3da",
    f"{_OF_DECODE}Receiver._setup_bootstrap_infos": "fe1cf611d3f2",
}
"""First digits of SHA-256 of the sources in SGLang 0.5.23."""
_POLL_S = 0.0005
_NICENESS = 19
_LONG_CHARS = 16 << 10


def register() -> None:
    """Hook SGLang's methods, if they are those that are known."""
    for name, digest in DIGESTS.items():
        source = inspect.getsource(inspect.unwrap(pkgutil.resolve_name(name)))
        if not hashlib.sha256(source.encode()).hexdigest().startswith(digest):
            logging.getLogger("sglang.millstream_scheduling").info("SGLang has another %s", name)
            return
    HookRegistry.register(_READY, _count_seconds, HookType.BEFORE)
    HookRegistry.register(_BACKEND, _compile_last, HookType.AFTER)
    HookRegistry.register(_SEND, _tell, HookType.AFTER)
    HookRegistry.register(_BEAT, _compare, HookType.AFTER)


def _compare(_none: None, manager: Any, address: str) -> None:
    """Take a prefill engine for lost if another one has its address now; in a thread of its own."""
    with manager.connection_lock:
        pool, peer = dict(manager.connection_pool), manager.prefill_info_table.get(address)
    for key, infos in pool.items():
        host, dp_rank, cp_rank, _ = key.rsplit("_", 3)
        if host != address or peer is None:
            continue
        query = {
            "prefill_dp_rank": dp_rank,
            "prefill_cp_rank": cp_rank,
            "target_tp_rank": peer.target_tp_ranks[0],
            "target_pp_rank": infos[0]["pp_rank"],
        }
        url, session = f"http://{address}/route", manager.session_pool[address]
        found = session.get(url, params=query, timeout=(2, 3))
        if (
            found.status_code == HTTPStatus.OK
            and found.json()["rank_port"] != infos[0]["rank_port"]
        ):
            manager._handle_node_failure(address)  # noqa: SLF001 - the hooked class's own
            return


def _tell(_none: None, scheduler: Any, req: Any, last_chunk: bool = False, **_: Any) -> None:  # noqa: FBT001, FBT002
    if last_chunk and not req.finished():
        scheduler.output_streamer.stream_output([req], req.return_logprob)


def _count_seconds(manager: Any) -> None:
    """Let a grammar fail at this poll if its time is up, else not by a number of polls."""
    polls, now_s = manager.SGLANG_GRAMMAR_MAX_POLL_ITERATIONS, time.monotonic()
    if not hasattr(manager, "millstream_timeout_s"):
        manager.millstream_timeout_s = polls * manager.SGLANG_GRAMMAR_POLL_INTERVAL
        manager.SGLANG_GRAMMAR_POLL_INTERVAL = _POLL_S
    for req in manager.grammar_queue:
        if not hasattr(req, "millstream_late_s"):
            req.millstream_late_s = now_s + manager.millstream_timeout_s
        req.grammar_wait_ct = polls if now_s >= req.millstream_late_s else 0


class _Executor:
    """Compiles short grammars in some threads, long ones in others."""

    def __init__(self) -> None:
        last = (os.PRIO_PROCESS, 0, _NICENESS)
        self._pools = [ThreadPoolExecutor(None, "", os.setpriority, last) for _ in range(2)]

    def submit(self, work: Any, key: tuple[str, str], *rest: Any) -> Any:
        return self._pools[len(key[1]) > _LONG_CHARS].submit(work, key, *rest)


def _compile_last(_none: None, backend: Any) -> None:
    backend.executor = _Executor()
