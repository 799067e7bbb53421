"""Greedy output is the same tokens whatever way they came."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from millstream_server.transfer.ticket import TicketKey
from millstream_server.worker_stream.convert import ticket_to_proto
from tests.e2e.conftest import Suite
from tests.support.raw import RawStream, complete, start
from tests.support.suite import TICKET_KEY

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

_NEW_TOKENS = 24
# 24 prompts from 1 to 484 tokens, no two alike.
PROMPTS = [[(7 * i + 13 * j) % 1000 + 16 for j in range(1 + 21 * i)] for i in range(24)]


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """What `sgl.Engine` alone answers."""
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-m", "tests.support.bare_sglang", str(model)],
        input=json.dumps({"prompts": PROMPTS, "max_new_tokens": _NEW_TOKENS}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    outputs = json.loads(done.stdout.splitlines()[-1])["outputs"]
    assert [len(output) for output in outputs] == [_NEW_TOKENS] * len(PROMPTS)
    # A model that answers everything alike would make the comparison worthless.
    assert len({tuple(output) for output in outputs}) == len(PROMPTS)
    return outputs


async def test_decode_alone(expected: list[list[int]], suite: Suite) -> None:
    async with grpc.aio.insecure_channel(suite.aggregated.address) as channel:
        stream = RawStream(channel)
        for slot, prompt in enumerate(PROMPTS):
            await stream.start(start(slot, prompt, _NEW_TOKENS))
        await stream.until_ended(*range(len(PROMPTS)))
        await stream.close()
    assert stream.errors == {}
    assert [stream.tokens[slot] for slot in range(len(PROMPTS))] == expected


async def test_prefill_to_decode(expected: list[list[int]], suite: Suite) -> None:
    key = TicketKey.from_hex(TICKET_KEY)
    bootstrap_port = int(str(suite.prefill.flags["bootstrap_port"]))
    async with (
        grpc.aio.insecure_channel(suite.prefill.address) as prefill_channel,
        grpc.aio.insecure_channel(suite.decode.address) as decode_channel,
    ):
        prefill = RawStream(prefill_channel, prefill=True)
        decode = RawStream(decode_channel)
        for slot, prompt in enumerate(PROMPTS):
            ticket = ticket_to_proto(key.mint("127.0.0.1", bootstrap_port))
            message = start(slot, prompt, _NEW_TOKENS, ticket=ticket)
            await asyncio.gather(prefill.start(message), decode.start(message))
        slots = range(len(PROMPTS))
        await asyncio.gather(prefill.until_ended(*slots), decode.until_ended(*slots))
        await asyncio.gather(prefill.close(), decode.close())
    assert prefill.errors == decode.errors == {}
    assert prefill.tokens == {}
    assert [decode.tokens[slot] for slot in slots] == expected
    for slot, prompt in enumerate(PROMPTS):
        assert decode.finishes[slot].usage.prompt_tokens == len(prompt)
        assert decode.finishes[slot].usage.completion_tokens == _NEW_TOKENS


@pytest.mark.parametrize("front", ["front_aggregated", "front_disaggregated"])
async def test_through_the_processor(expected: list[list[int]], suite: Suite, front: str) -> None:
    async with grpc.aio.insecure_channel(getattr(suite, front).address) as channel:
        answers = await asyncio.gather(
            *(complete(channel, prompt, _NEW_TOKENS) for prompt in PROMPTS)
        )
    assert [ids for ids, _ in answers] == expected
    for prompt, (_, finished) in zip(PROMPTS, answers, strict=True):
        assert finished.usage.prompt_tokens == len(prompt)
        assert finished.usage.completion_tokens == _NEW_TOKENS
