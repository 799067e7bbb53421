"""`make up ARGS="--engine vllm"`: prefill and decode on vLLM, as a newcomer starts them."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from millstream.v1 import processor_pb2_grpc
from tests.support.engines.vllm_engines import reference
from tests.support.processes import forked
from tests.support.processes.command_line import suite_up
from tests.support.processor.chats import Conversation, completion, gather, options, start

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not forked.SUITE_PYTHON.is_file(), reason="`up` needs `make setup`"),
]

ROOT = Path(__file__).parents[3]
_PROMPT = [(13 * i) % 900 + 50 for i in range(70)]


async def test_it_chats_over_prefill_and_decode(tmp_path: Path) -> None:
    greedy = options(8, temperature=0, ignore_eos=True, return_token_ids=True)
    flags = ("--engine", "vllm", "--log-dir", str(tmp_path))
    async with suite_up(*flags, python=str(forked.SUITE_PYTHON), cwd=ROOT) as addresses:
        assert {"processor", "prefill-1", "decode-1"} <= addresses.keys()
        async with grpc.aio.insecure_channel(addresses["processor"]) as channel:
            stub = processor_pb2_grpc.ProcessorServiceStub(channel)
            chat = Conversation(stub)
            await chat.say(start("What is Millstream?", opts=options(20)))
            assert (await chat.answer()).text
            got = (await gather(stub.Complete(completion(_PROMPT, greedy)))).choices[0].token_ids
    (wanted,) = await reference(ROOT / "demo" / "model", [_PROMPT], 8)
    assert got[: len(wanted)] == wanted  # transformers ends with an EOS
