"""A diffusion language model behind Chat and Complete: a real one, on SGLang."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from millstream.v1 import generation_pb2, processor_pb2, processor_pb2_grpc, sampling_pb2
from tests.e2e.generate.conftest import DLLM, Suite, model_of
from tests.support.processes import forked
from tests.support.processor.chats import (
    CANCEL,
    Answer,
    Conversation,
    chat,
    completion,
    gather,
    message,
    options,
    start,
)
from tests.support.wire.failures import failure
from tests.support.wire.long_streams import load_of

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

QUESTIONS = ["What is a diffusion language model?", "What is prefill?", "Count to ten.", "Hi", "7"]
END_TOKENS = [5, 2]
MOST = 40


@pytest.fixture
async def stub(suite: Suite) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(suite.front.address) as channel:
        yield processor_pb2_grpc.ProcessorServiceStub(channel)


async def ask(stub: Any, question: str, most: int = MOST, **fields: Any) -> Answer:
    opts = options(most, return_token_ids=True, **fields)
    return await chat(stub, question, opts=opts, model=DLLM)


async def prompt_of(stub: Any, question: str) -> list[int]:
    conversation = processor_pb2.Conversation(messages=[message(question)])
    request = processor_pb2.TokenizeRequest(model=DLLM, conversation=conversation)
    return list((await stub.Tokenize(request)).token_ids)


async def test_tokens_equal_the_engines_own(stub: Any) -> None:
    """All chats at once, against one after the other on SGLang with its own defaults."""
    prompts = [await prompt_of(stub, question) for question in QUESTIONS]
    params = {"temperature": 0, "max_new_tokens": MOST, "stop_token_ids": END_TOKENS}
    cases = [{"input_ids": prompt, "sampling_params": params} for prompt in prompts]
    bare = asyncio.to_thread(
        forked.run,
        *("sglang", "tests.support.engines.bare_sglang"),
        *("denoise", str(model_of(DLLM)), json.dumps(cases)),
    )
    answers = await asyncio.gather(*(ask(stub, question) for question in QUESTIONS))
    done = await bare
    assert done.returncode == 0, done.stderr[-4000:]
    expected = json.loads(done.stdout)
    assert len({tuple(found["token_ids"]) for found in expected}) > 2, "else it shows nothing"
    for prompt, answer, found in zip(prompts, answers, expected, strict=True):
        (choice,) = answer.choices.values()
        assert choice.token_ids == found["token_ids"]
        kind = found["finish"]["type"].upper()
        assert choice.finish_reason == generation_pb2.FinishReason.Value(f"FINISH_REASON_{kind}")
        assert answer.usage.prompt_tokens == len(prompt)
        assert answer.usage.completion_tokens == len(choice.token_ids)
    by_ids = await gather(
        stub.Complete(completion(prompts[0], options(MOST, return_token_ids=True), model=DLLM))
    )
    assert by_ids.choices[0].token_ids == expected[0]["token_ids"]


async def test_the_model_says_what_it_learnt(stub: Any) -> None:
    answer = await ask(stub, "What is a diffusion language model?")
    assert "masks" in answer.text
    assert answer.finish_reason == generation_pb2.FINISH_REASON_STOP


async def test_a_stop_string_ends_the_answer_and_is_not_in_it(stub: Any) -> None:
    whole = await ask(stub, QUESTIONS[0])
    stop = whole.text.split()[3]
    cut = await ask(stub, QUESTIONS[0], stop=[stop])
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason == generation_pb2.FINISH_REASON_STOP
    matched = cut.choices[0].matched_stop
    assert matched is not None
    assert matched.text == stop
    assert cut.usage.completion_tokens < whole.usage.completion_tokens


async def test_a_cancel_frees_the_engine(suite: Suite, stub: Any) -> None:
    conversation = Conversation(stub)
    opts = options(900, ignore_eos=True)
    await conversation.say(start(QUESTIONS[0], opts=opts, model=DLLM))
    await conversation.read()
    await conversation.say(CANCEL)
    answer = await conversation.answer()
    assert answer.finish_reason == generation_pb2.FINISH_REASON_CANCELLED
    assert answer.usage.completion_tokens < 900
    await conversation.end()
    async with load_of(suite.workers[DLLM].address) as load:
        await load.idle(10)
    assert (await ask(stub, QUESTIONS[0], 8)).usage.completion_tokens == 8


@pytest.mark.parametrize(
    ("knobs", "field"),
    [
        ({"temperature": 0.7}, "sampling.temperature"),
        ({"constraint": sampling_pb2.Constraint(regex="a+")}, "sampling.constraint"),
        ({"logprobs": sampling_pb2.LogprobOptions(top=2)}, "logprobs"),
    ],
)
async def test_what_the_engine_would_ignore_is_refused_by_name(
    stub: Any, knobs: dict[str, Any], field: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(stub, "Hi", **knobs)
    refused = failure(caught.value)
    assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
    assert (refused.reason, refused.fields) == ("UNSUPPORTED_FEATURE", (f"start.options.{field}",))
