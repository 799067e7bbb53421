"""Greedy output is the same tokens whatever way they came."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from millstream.v1 import decode_pb2_grpc, prefill_pb2_grpc, processor_pb2_grpc
from tests.e2e.conftest import Suite
from tests.support.engines.bare_sglang import NEW_TOKENS
from tests.support.processes import forked
from tests.support.processor.chats import completion, gather, options
from tests.support.worker.worker_streams import decode_stream, prefill_stream

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

_GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": NEW_TOKENS}
# 24 prompts from 1 to 484 tokens, no two alike.
PROMPTS = [[(7 * i + 13 * j) % 1000 + 16 for j in range(1 + 21 * i)] for i in range(24)]
_SLOTS = range(len(PROMPTS))


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """What `sgl.Engine` alone answers, one prompt after the other."""
    done = forked.run(
        "sglang", "tests.support.engines.bare_sglang", "generate", str(model), json.dumps(PROMPTS)
    )
    assert done.returncode == 0, done.stderr[-4000:]
    outputs = json.loads(done.stdout)
    # A model that answers everything alike would make the comparison worthless.
    assert len({tuple(output) for output in outputs}) == len(PROMPTS)
    return outputs  # type: ignore[no-any-return]


async def test_decode_alone(expected: list[list[int]], suite: Suite) -> None:
    async with grpc.aio.insecure_channel(suite.aggregated.address) as channel:
        stream = decode_stream(decode_pb2_grpc.DecodeServiceStub(channel))
        for slot, prompt in enumerate(PROMPTS):
            await stream.start(slot, prompt, **_GREEDY)
        views = await stream.ended(*_SLOTS)
        await stream.drain()
    assert [view.token_ids for view in views] == expected


async def test_prefill_to_decode(expected: list[list[int]], suite: Suite) -> None:
    async with (
        grpc.aio.insecure_channel(suite.prefill.address) as prefill_channel,
        grpc.aio.insecure_channel(suite.decode.address) as decode_channel,
    ):
        prefill = prefill_stream(prefill_pb2_grpc.PrefillServiceStub(prefill_channel))
        decode = decode_stream(decode_pb2_grpc.DecodeServiceStub(decode_channel))
        for slot, prompt in enumerate(PROMPTS):
            ticket = suite.mint()
            await asyncio.gather(
                prefill.start(slot, prompt, ticket=ticket, **_GREEDY),
                decode.start(slot, prompt, ticket=ticket, **_GREEDY),
            )
        prefilled, decoded = await asyncio.gather(prefill.ended(*_SLOTS), decode.ended(*_SLOTS))
        await asyncio.gather(prefill.drain(), decode.drain())
    assert [view.token_ids for view in decoded] == expected
    assert [view.token_ids for view in prefilled] == [[]] * len(PROMPTS)
    for prompt, view in zip(PROMPTS, decoded, strict=True):
        assert view.finish is not None
        assert view.finish.usage.prompt_tokens == len(prompt)
        assert view.finish.usage.completion_tokens == len(view.token_ids)


@pytest.mark.parametrize("front", ["front_aggregated", "front_disaggregated"])
async def test_through_the_processor(expected: list[list[int]], suite: Suite, front: str) -> None:
    opts = options(return_token_ids=True, **_GREEDY)
    async with grpc.aio.insecure_channel(getattr(suite, front).address) as channel:
        stub = processor_pb2_grpc.ProcessorServiceStub(channel)
        answers = await asyncio.gather(
            *(gather(stub.Complete(completion(prompt, opts))) for prompt in PROMPTS)
        )
    assert [answer.choices[0].token_ids for answer in answers] == expected
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.usage.prompt_tokens == len(prompt)
        assert answer.usage.completion_tokens == len(answer.choices[0].token_ids)
