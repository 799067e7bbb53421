"""What is wrong in the vLLM that the adapter is for, and what ours makes of it."""

from __future__ import annotations

import importlib
import inspect
import os
import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from millstream_server.engines import torch_on_cpu
from millstream_server.engines.vllm import core_process, transfer_worker

pytestmark = pytest.mark.vllm
_AGENTS = "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker"


@pytest.fixture(scope="module", autouse=True)
def prepared() -> None:
    torch_on_cpu.prepare()


def test_nixl_gets_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM calls an agent from three threads."""
    module: Any = importlib.import_module(_AGENTS)
    source = inspect.getsource(module.NixlBaseConnectorWorker.__init__)
    assert "nixl_agent_config(" in source
    assert "sync_mode" not in source, "vLLM asks for locks itself now: drop `lock_nixl`"
    monkeypatch.setattr(module, "nixl_agent_config", module.nixl_agent_config)
    assert module.nixl_agent_config(num_threads=4, capture_telemetry=True).sync_mode is None
    transfer_worker.lock_nixl()
    config = module.nixl_agent_config(num_threads=4, capture_telemetry=True)
    assert (config.sync_mode.name, config.num_threads) == ("NIXL_THREAD_SYNC_STRICT", 4)


def test_readers_of_queues_look_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost notice costs 20 ms, not 5 s."""
    queues: Any = importlib.import_module(core_process._QUEUES)
    monkeypatch.setattr(queues, "SHM_READER_RECHECK_INTERVAL_MS", 5000)
    reading = queues.MessageQueue.ReadTimeoutWithWarnings(timeout=None, should_warn=False)
    assert reading.timeout_ms() == 5000
    core_process.recheck_queues()
    assert reading.timeout_ms() == 20


def test_a_transfer_that_ends_after_its_request_ends_no_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's scheduler asserts that it knows the request."""
    cls: Any = importlib.import_module("vllm.v1.core.sched.scheduler").Scheduler
    monkeypatch.setattr(cls, "_update_from_kv_xfer_finished", cls._update_from_kv_xfer_finished)
    scheduler = SimpleNamespace(connector=None, requests={})
    ended = SimpleNamespace(finished_recving={"gone"}, finished_sending=None)
    with pytest.raises(AssertionError):
        cls._update_from_kv_xfer_finished(scheduler, ended)
    core_process._ignore_late_transfers()
    cls._update_from_kv_xfer_finished(scheduler, ended)
    assert ended.finished_recving == set()


def test_a_side_channel_without_its_port_ends_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's core would wait for ever for the thread that has failed to bind it."""
    scheduler: Any = importlib.import_module(core_process._NIXL).NixlBaseConnectorScheduler
    listen = staticmethod(scheduler._nixl_handshake_listener)
    monkeypatch.setattr(scheduler, "_nixl_handshake_listener", listen)
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    ready = threading.Event()
    core_process._end_without_side_channel()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        scheduler._nixl_handshake_listener({}, ready, threading.Event(), "127.0.0.1", port)
    assert not ready.is_set()
    assert ended == [1]
