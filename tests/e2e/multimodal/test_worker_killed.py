"""Kill -9 of a decode worker that runs chats with pictures, on real SGLang.

Late by name: it restarts a worker that the others use.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from millstream.v1 import processor_pb2
from tests.e2e.multimodal.conftest import NAME, Suite, talking
from tests.e2e.multimodal.test_cancel import never_seen
from tests.support.media.vision_chats import Question, photo
from tests.support.processes.suite import ServiceProcess, running
from tests.support.processor.chats import Conversation, options, start, until_connected
from tests.support.wire.failures import refusal
from tests.support.wire.long_streams import load_of

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]


async def _begun(stub: Any, question: Question, tokens: int) -> Conversation:
    chat = Conversation(stub)
    opts = options(tokens, temperature=0, ignore_eos=True, return_token_ids=True)
    await chat.say(start(messages=[question.message], opts=opts))
    return chat


async def test_pictures_go_on_elsewhere_until_the_first_token(suite: Suite, tmp_path: Path) -> None:
    """Behind it the loss is told: their embeddings have been given back."""
    workers = (suite.encode, suite.prefill, suite.decode, suite.aggregated)
    flags = {
        "models": f"{NAME}={suite.model}",
        "workers": ",".join(worker.address for worker in workers),
        "handoff": "always",
    }
    front = ServiceProcess("millstream_server.processor", flags, tmp_path / "front.log")
    with running(front):
        async with talking(front.address) as stub, load_of(suite.prefill.address) as prefill:
            await until_connected(stub, len(workers))
            question = never_seen()
            decoding = await _begun(stub, Question.of("Hi ", photo(seed=1)), 1500)
            while not decoding.answers or not decoding.answers[0].choices:
                assert await decoding.read()
            await prefill.idle(20)
            waiting = await _begun(stub, question, 8)
            await prefill.busy(10)  # for a hundred steps
            os.kill(suite.decode.pid, signal.SIGKILL)
            lost = await refusal(decoding.end())
            assert (lost.reason, lost.retryable) == ("WORKER_LOST", True)
            answer = await waiting.answer()
            assert answer.finished
            ((way, tokens),) = [(r.way, r.token_count) for r in answer.finished.redispatches]
            assert (way, tokens) == (processor_pb2.REDISPATCH_WAY_AGAIN, 0)
            undisturbed = await (await _begun(stub, question, 8)).answer()
            assert answer.choices[0].token_ids == undisturbed.choices[0].token_ids
            assert answer.usage.media_tokens == undisturbed.usage.media_tokens > 0
    suite.decode.kill()
    suite.decode.start()
    await asyncio.gather(
        suite.decode.until_serving(timeout_s=200), suite.front.until_serving(timeout_s=200)
    )
