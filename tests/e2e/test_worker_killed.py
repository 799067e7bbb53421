"""Kill -9 of a real SGLang worker: its requests end at once, its engine goes too, it comes back.

In a file of its own, last by name: it restarts a worker of the session's suite.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import grpc
import psutil
import pytest

from millstream.v1 import processor_pb2_grpc
from millstream_testing.waiting import until
from tests.e2e.conftest import Suite
from tests.support.processor.chats import completion, gather, options
from tests.support.wire.failures import failure

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

_PROMPT = list(range(20, 60))
_LONG = options(temperature=0, max_new_tokens=1500, ignore_eos=True, return_token_ids=True)
_SHORT = options(temperature=0, max_new_tokens=8, ignore_eos=True, return_token_ids=True)


async def _read_to_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
        pass


async def test_kill_nine(suite: Suite) -> None:
    worker = suite.aggregated
    children = psutil.Process(worker.pid).children(recursive=True)
    assert children, "SGLang's own processes"
    async with (
        grpc.aio.insecure_channel(suite.front_aggregated.address) as channel,
        grpc.aio.insecure_channel(suite.front_disaggregated.address) as other_channel,
    ):
        stub = processor_pb2_grpc.ProcessorServiceStub(channel)
        other = processor_pb2_grpc.ProcessorServiceStub(other_channel)
        before = await gather(stub.Complete(completion(_PROMPT, _SHORT)))
        calls = [stub.Complete(completion(_PROMPT, _LONG)) for _ in range(4)]
        for call in calls:
            await call.read()
        neighbour = asyncio.ensure_future(gather(other.Complete(completion(_PROMPT, _SHORT))))
        os.kill(worker.pid, signal.SIGKILL)
        killed = time.monotonic()
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await _read_to_end(call)
            lost = failure(caught.value)
            assert lost.code is grpc.StatusCode.UNAVAILABLE
            assert lost.reason == "WORKER_LOST"
            assert lost.retryable
        assert time.monotonic() - killed < 2.0
        assert (await neighbour).choices[0].token_ids == before.choices[0].token_ids
        await until(lambda: not any(child.is_running() for child in children), within_s=10)

        worker.kill()
        worker.start()
        await worker.until_serving(timeout_s=200)
        await suite.front_aggregated.until_serving(timeout_s=20)
        after = await gather(stub.Complete(completion(_PROMPT, _SHORT)))
        assert after.choices[0].token_ids == before.choices[0].token_ids
