"""Which ends of a decode leg give its transfer up. vLLM isn't needed: its client is played here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from millstream_server.control.engine import Role
from millstream_server.engines.vllm import runs as module
from millstream_server.engines.vllm.config import Connector, VllmEngineConfig
from millstream_server.engines.vllm.engine import VllmEngine
from millstream_server.engines.vllm.launch import BuiltEngine
from millstream_server.engines.vllm.runs import Run, Runs
from millstream_server.generation.output import CollectingSink, FinishReason
from millstream_server.generation.request import GenerationRequest, Prompt
from millstream_server.generation.sampling import Sampling
from millstream_server.generation.ticket import Ticket
from millstream_server.runtime.errors import (
    EngineFailedError,
    InvalidRequestError,
    KvTransferError,
)
from millstream_testing.waiting import until

_OUTPUT: dict[str, Any] = {
    "new_token_ids": [],
    "finish_reason": None,
    "stop_reason": None,
    "prefill_stats": None,
    "new_prompt_logprobs_tensors": None,
    "kv_transfer_params": None,
}


class _Client:
    """Says what it is told to, and notes which transfers are given up."""

    def __init__(self) -> None:
        self.outputs_queue: asyncio.Queue[Any] = asyncio.Queue()
        self.withdrawn: list[str] = []
        self.taken: list[Any] = []

    async def get_output_async(self) -> Any:
        return await self.outputs_queue.get()

    async def add_request_async(self, message: Any) -> None:
        self.taken.append(message)

    async def abort_requests_async(self, _core_ids: list[str]) -> None:
        """Let nothing come of them."""

    async def is_scheduler_paused_async(self) -> bool:
        return False

    async def collective_rpc_async(self, method: str, _timeout: None, args: tuple[Any]) -> None:
        if method == "withdraw_transfers":
            self.withdrawn += args[0]

    def say(self, core_id: str, **output: Any) -> None:
        one = SimpleNamespace(request_id=core_id, **(_OUTPUT | output))
        self.outputs_queue.put_nowait(
            SimpleNamespace(engine_index=0, scheduler_stats=None, weight_version="", outputs=[one])
        )


class _Decode:
    """The requests of a decode engine that prefill writes to."""

    def __init__(self) -> None:
        self.client = _Client()
        self.runs = Runs(Role.DECODE, 30, lambda _: None)
        channel = SimpleNamespace(is_written_to=True, finished=lambda *_: None)
        self.runs.start(
            cast("BuiltEngine", SimpleNamespace(channel=channel, client=self.client)), None
        )

    def launch(self, core_id: str) -> Run:
        request = GenerationRequest(
            prompt=Prompt((5, 6, 7)),
            sampling=Sampling(max_new_tokens=4),
            ticket=Ticket("10.0.0.1", 0, 0x123),
        )
        run = Run(
            request=request, sink=CollectingSink(), core_id=core_id, transfer={"remote": "peer"}
        )
        self.runs.launch(run)
        return run

    async def launched(self, core_id: str) -> Run:
        """Return it once vLLM has it."""
        run = self.launch(core_id)
        await until(lambda: bool(self.client.taken))
        return run


@pytest.fixture
async def decode(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[_Decode]:
    async def message(_built: Any, run: Run, _role: Role, _adapters: Any) -> str:
        return run.core_id

    monkeypatch.setattr(module, "_message", message)
    made = _Decode()
    try:
        yield made
    finally:
        made.runs.fail_all("over")
        await made.runs.close()


async def _result(run: Run) -> Any:
    assert isinstance(run.sink, CollectingSink)
    return await run.sink.result()


async def test_a_cancel_before_vllm_has_it(decode: _Decode) -> None:
    run = decode.launch("a")
    decode.runs.abort(run.request.engine_id)
    assert (await _result(run)).reason is FinishReason.CANCELLED
    assert decode.client.taken == []
    await until(lambda: decode.client.withdrawn == ["a"])


async def test_a_request_that_vllm_is_not_sent(
    decode: _Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(*_: Any) -> None:
        raise InvalidRequestError.of("sampling", "is wrong")

    monkeypatch.setattr(module, "_message", refused)
    with pytest.raises(InvalidRequestError):
        await _result(decode.launch("a"))
    await until(lambda: decode.client.withdrawn == ["a"])


async def test_a_cancel_while_it_waits(decode: _Decode) -> None:
    run = await decode.launched("a")
    decode.runs.abort(run.request.engine_id)
    assert (await _result(run)).reason is FinishReason.CANCELLED
    await until(lambda: decode.client.withdrawn == ["a"])


async def test_a_handshake_that_failed(decode: _Decode) -> None:
    run = await decode.launched("a")
    decode.client.say("a", finish_reason="error")
    with pytest.raises(KvTransferError):
        await _result(run)
    await until(lambda: decode.client.withdrawn == ["a"])


async def test_what_has_come_is_not_given_up(decode: _Decode) -> None:
    run = await decode.launched("a")
    decode.client.say("a", new_token_ids=[8])
    decode.client.say("a", new_token_ids=[9], finish_reason="length")
    assert (await _result(run)).completion_tokens == 2
    other = await decode.launched("b")  # one that is: what was given up before would be there
    decode.runs.abort(other.request.engine_id)
    await until(lambda: bool(decode.client.withdrawn))
    assert decode.client.withdrawn == ["b"]


async def test_what_was_queued_has_all_of_its_time_once_it_has_room(
    decode: _Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    wait = Runs._wait_for_peer

    def counted(runs: Runs, run: Run, waited: int = 0) -> None:
        looks.append(waited)
        wait(runs, run, waited)

    monkeypatch.setattr(Runs, "_wait_for_peer", counted)
    decode.runs._timeout_s = 0.1
    rank = decode.runs.outputs.stats[0] = SimpleNamespace(num_waiting_reqs=1)
    run = await decode.launched("a")
    await until(lambda: len(looks) > 15)
    assert not run.over
    rank.num_waiting_reqs = 0
    looks.clear()
    with pytest.raises(KvTransferError):
        await _result(run)
    assert looks == [*range(1, 10)]


@pytest.mark.parametrize(("connector", "limit_s"), [("push", 300.0), ("pull", 30.0)])
def test_decode_waits_for_prefill_only_where_it_starts_with_it(
    connector: Connector, limit_s: float
) -> None:
    config = VllmEngineConfig(model_path="m", role=Role.DECODE, connector=connector)
    assert VllmEngine(config)._runs._timeout_s == limit_s


async def test_an_engine_that_is_gone_is_asked_nothing(decode: _Decode) -> None:
    run = await decode.launched("a")
    decode.runs.fail_all("It died.")
    with pytest.raises(EngineFailedError):
        await _result(run)
    names = {task.get_name() for task in asyncio.all_tasks()}
    assert "vllm-withdrawal" not in names
    assert decode.client.withdrawn == []
