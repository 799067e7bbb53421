"""What is wrong in the vLLM that the adapter is for, and what ours makes of it."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from millstream_server.engines import torch_on_cpu
from millstream_server.engines.vllm import core_process

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module", autouse=True)
def prepared() -> None:
    torch_on_cpu.prepare()


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
