"""How a decode engine gives hand-offs up, and what prefill keeps of them. vLLM isn't needed."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from millstream_server.engines.vllm import transfer_worker, withdrawal
from millstream_server.engines.vllm.withdrawal import Withdrawals
from millstream_testing.waiting import until


class _Client:
    """Notes what vLLM's worker is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[str]]] = []

    async def collective_rpc_async(self, method: str, _timeout: None, args: tuple[Any]) -> None:
        self.calls.append((method, list(args[0])))


async def test_those_of_one_moment_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(withdrawal, "WRITE_S", 0)
    client = _Client()
    withdrawals = Withdrawals(client)
    withdrawals.add("a", {})
    withdrawals.add("b", {})
    await until(lambda: len(client.calls) == 2)
    withdrawals.add("c", {})
    await until(lambda: len(client.calls) == 4)
    assert client.calls == [
        ("withdraw_transfers", ["a", "b"]),
        ("release_transfers", ["a", "b"]),
        ("withdraw_transfers", ["c"]),
        ("release_transfers", ["c"]),
    ]


async def test_none_goes_on_when_vllm_is_gone() -> None:
    client = _Client()
    withdrawals = Withdrawals(client)
    withdrawals.add("a", {})
    await until(lambda: bool(client.calls))
    withdrawals.close()
    await until(lambda: len(asyncio.all_tasks()) == 1)
    assert client.calls == [("withdraw_transfers", ["a"])]


def test_prefill_keeps_no_early_registration_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    connector = SimpleNamespace(_do_start_push_kv=None, _pending_d_registrations={})
    monkeypatch.setattr(transfer_worker, "_connector", lambda: connector)
    monkeypatch.setattr(transfer_worker, "_MOST_EARLY", 3)
    transfer_worker.TransferWorker().free_withdrawn()
    kept = connector._pending_d_registrations
    for core_id in ("a", "b", "c", "b", "d"):
        kept[core_id] = {"request_id": core_id}
    assert list(kept) == ["b", "c", "d"]
