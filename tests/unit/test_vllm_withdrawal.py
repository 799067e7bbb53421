"""How a decode engine gives hand-offs up, and what prefill keeps of them. vLLM isn't needed."""

from __future__ import annotations

import asyncio
import queue
import threading
from concurrent.futures import Future
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


class _Connector(SimpleNamespace):
    """A prefill engine's, as far as `TransferWorker` knows it; ``meetings`` come one by one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *meetings: Future[Any] | None) -> None:
        left = iter(meetings)
        self.written: list[str] = []
        super().__init__(
            _pending_d_registrations={},
            _reqs_to_process={"a"},
            _do_start_push_kv=lambda core_id, *_: self.written.append(core_id),
            _ensure_handshake=lambda *_: next(left),
            _deferred_push_inbox=queue.SimpleQueue(),
            _push_writer_wake=threading.Event(),
            _sending_transfers={},
            _sending_transfers_lock=threading.Lock(),
        )
        monkeypatch.setattr(transfer_worker, "_connector", lambda: self)
        transfer_worker.TransferWorker().free_withdrawn()

    def run(self, core_id: str, blocks: list[list[int]]) -> None:
        """Do as vLLM's writer thread does with a registration of decode's blocks."""
        self._do_start_push_kv(core_id, [[3]], _registration(blocks))
        self.go_on()

    def go_on(self) -> None:
        """Do as it does when it has met a decode engine."""
        while not self._deferred_push_inbox.empty():
            self._do_start_push_kv(*self._deferred_push_inbox.get())


def _registration(blocks: list[list[int]]) -> dict[str, Any]:
    where = {"decode_host": "10.0.0.2", "decode_port": 7, "decode_tp_size": 1}
    return {**where, "decode_engine_id": "d", "local_block_ids": blocks}


def _meeting(error: Exception | None = None) -> Future[Any]:
    met: Future[Any] = Future()
    if error is None:
        met.set_result(None)
    else:
        met.set_exception(error)
    return met


def test_prefill_writes_once_it_has_met_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = [_meeting(TimeoutError("no answer in 5 s")) for _ in range(2)]
    connector = _Connector(monkeypatch, *failed, _meeting(), None)
    connector.run("a", [[8]])
    assert connector.written == ["a"]
    assert connector._sending_transfers == {}


def test_prefill_frees_what_it_cannot_write(monkeypatch: pytest.MonkeyPatch) -> None:
    connector = _Connector(monkeypatch, *(_meeting(TimeoutError("gone")) for _ in range(3)))
    connector.run("a", [[8]])
    assert connector.written == []
    assert connector._sending_transfers == {"a": []}


def test_prefill_frees_what_decode_has_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    connector = _Connector(monkeypatch)
    connector.run("a", [])
    assert connector.written == []
    assert connector._sending_transfers == {"a": []}


def test_prefill_writes_nothing_that_decode_gives_up_while_they_meet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Decode's blocks may be another request's by then."""
    meeting: Future[Any] = Future()
    connector = _Connector(monkeypatch, meeting, None)
    connector.run("a", [[8]])
    connector._pending_d_registrations["a"] = _registration([])
    meeting.set_result(None)
    connector.go_on()
    assert connector.written == []
    assert connector._sending_transfers == {"a": []}


def test_prefill_writes_nothing_when_the_lease_ends_while_they_meet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meeting: Future[Any] = Future()
    connector = _Connector(monkeypatch, meeting, None)
    connector.run("a", [[8]])
    connector._reqs_to_process.clear()
    meeting.set_result(None)
    connector.go_on()
    assert (connector.written, connector._sending_transfers) == ([], {})


def test_prefill_keeps_no_early_registration_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_worker, "_MOST_EARLY", 3)
    kept = _Connector(monkeypatch)._pending_d_registrations
    for core_id in ("a", "b", "c", "b", "d"):
        kept[core_id] = {"request_id": core_id}
    assert list(kept) == ["b", "c", "d"]
