"""When SGLang's transfers are late: told by our plugin, in stand-ins of what it hooks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from millstream_server.control.engine import Role
from millstream_server.engines.gate import Hold
from millstream_server.engines.sglang.config import SglangEngineConfig
from millstream_server.engines.sglang.loads import RankProgress
from millstream_server.engines.sglang.requests.runs import Run, Runs
from millstream_server.generation.output import CollectingSink, FinishReason
from millstream_server.generation.request import GenerationRequest, Prompt
from millstream_server.generation.sampling import Sampling
from millstream_server.runtime.errors import KvTransferError
from millstream_testing.waiting import until
from tests.support.engines.sglang_plugin import PLUGIN, imported_plugin  # noqa: F401 - a fixture

_END = {"output_ids": [], "meta_info": {"finish_reason": {"type": "length"}}}


def test_a_prompts_token_is_sent_with_the_last_of_its_cache(plugin: Any) -> None:
    sent = []
    streamer = SimpleNamespace(stream_output=lambda reqs, logprob: sent.append((reqs, logprob)))
    scheduler = SimpleNamespace(output_streamer=streamer)
    over, request = (
        SimpleNamespace(return_logprob=False, finished=lambda done=done: done)
        for done in (True, False)
    )
    plugin._tell(None, scheduler, request)
    plugin._tell(None, scheduler, request, last_chunk=False, end_idx=16)
    plugin._tell(None, scheduler, over, last_chunk=True)
    assert sent == []
    plugin._tell(None, scheduler, request, last_chunk=True)
    assert sent == [([request], False)]


@pytest.mark.parametrize(("port", "status", "lost"), [(7, 200, 0), (8, 200, 1), (8, 503, 0)])
def test_a_prefill_engine_that_is_another_one_is_lost(
    plugin: Any, port: int, status: int, lost: int
) -> None:
    """SGLang would send to the old one's port, and wait, until a request has waited too long."""
    asked: list[Any] = []
    failed: list[str] = []

    def get(url: str, **options: Any) -> Any:
        asked.append(
            (url, options["params"]["prefill_dp_rank"], options["params"]["target_pp_rank"])
        )
        return SimpleNamespace(status_code=status, json=lambda: {"rank_port": port})

    manager = SimpleNamespace(
        connection_lock=threading.Lock(),
        connection_pool={
            "a_1:5_1_0_0": [{"rank_port": 7, "pp_rank": 0}],
            "other:5_0_0_0": [{"rank_port": 9, "pp_rank": 0}],
        },
        prefill_info_table={"a_1:5": SimpleNamespace(target_tp_ranks=[0])},
        session_pool={"a_1:5": SimpleNamespace(get=get)},
        _handle_node_failure=failed.append,
    )
    plugin._compare(None, manager, "a_1:5")
    assert asked == [("http://a_1:5/route", "1", 0)]
    assert failed == ["a_1:5"] * lost
    plugin._compare(None, manager, "unknown:5")
    assert len(asked) == 1


class _Prefill:
    """The requests of a prefill engine whose transfers may take 20 ms; SGLang is played."""

    def __init__(self) -> None:
        config = SglangEngineConfig(model_path="m", role=Role.PREFILL, transfer_timeout_s=0.02)
        self.runs = Runs(config, RankProgress())
        self.aborted: list[str] = []
        self.said: asyncio.Queue[Any] = asyncio.Queue()
        known = SimpleNamespace(get=lambda _: SimpleNamespace(dispatched=True))
        manager = SimpleNamespace(rid_to_state=known, abort_request=self.aborted.append)
        engine = SimpleNamespace(tokenizer_manager=manager, async_generate=self._generate)
        self.runs._built = cast("Any", SimpleNamespace(engine=engine))

    async def _generate(self, **_: Any) -> AsyncIterator[Any]:
        async def chunks() -> AsyncIterator[Any]:
            while (raw := await self.said.get()) is not _END:
                yield raw
            yield _END

        return chunks()

    async def launched(self) -> Run:
        request = GenerationRequest(prompt=Prompt((5, 6)), sampling=Sampling(max_new_tokens=4))
        run = Run(request=request, sink=CollectingSink(), arguments={})
        self.runs.launch(run)
        await until(lambda: bool(self.runs.at_engine()))
        return run


async def _result(run: Run) -> Any:
    assert isinstance(run.sink, CollectingSink)
    return await run.sink.result()


async def test_a_transfer_that_hangs_ends_its_leg() -> None:
    """Also if SGLang's scheduler says nothing any more."""
    prefill = _Prefill()
    run = await prefill.launched()
    run.take((9,), ())
    with pytest.raises(KvTransferError):
        await _result(run)
    assert prefill.aborted == [run.request.engine_id]
    prefill.said.put_nowait(_END)
    await asyncio.gather(*prefill.runs.tasks())


async def test_the_queue_and_the_prompt_take_their_time() -> None:
    """Only what comes after the prompt's computation counts, and no pause."""
    prefill = _Prefill()
    waits, paused = await prefill.launched(), await prefill.launched()
    prefill.runs.gate.close(Hold.PAUSED)
    paused.take((9,), ())
    armed = paused.timer
    await until(lambda: paused.timer is not armed)  # its time is over, and begins again
    assert waits.timer is None
    assert not waits.over
    assert not paused.over
    prefill.runs.gate.release(Hold.PAUSED)
    with pytest.raises(KvTransferError):
        await _result(paused)
    for _ in range(2):
        prefill.said.put_nowait(_END)
    finish = await _result(waits)
    assert (finish.reason, finish.completion_tokens) == (FinishReason.LENGTH, 0)
    await asyncio.gather(*prefill.runs.tasks())
