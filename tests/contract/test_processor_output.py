"""What comes out: stops, logprobs, choices, token ids, pacing, counts; raw prompts and ids."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from millstream.v1 import (
    generation_pb2,
    processor_pb2,
    sampling_pb2,
    worker_pb2,
)
from millstream_server.processor.text.tokenizer import TextModel
from millstream_testing.in_process import (
    ALPHABET,
    CONTEXT_LENGTH,
    MODEL,
    VOCAB_SIZE,
    processor,
    suite,
    worker,
)
from tests.support.processor.chats import Conversation, chat, completion, gather, options, start
from tests.support.wire.failures import refusal

STOP = generation_pb2.FINISH_REASON_STOP
LENGTH = generation_pb2.FINISH_REASON_LENGTH
STEPPING = replace(ALPHABET, step_s=0.005)
A = 35  # the id of "A"; the alphabet goes on from there


# ---- stop strings


@pytest.mark.parametrize("step_s", [0.0, 0.002])
@pytest.mark.parametrize(
    ("stops", "text", "tokens"),
    [
        (["EFG"], "ABCD", 7),
        (["E"], "ABCD", 5),
        (["ABC"], "", 3),
        (["XYZ", "DEF", "EF"], "ABC", 6),
        (["CDX", "FGHIJ"], "ABCDE", 10),
    ],
)
async def test_a_stop_ends_the_text_before_it_and_counts_to_its_end(
    text_model: TextModel, step_s: float, stops: list[str], text: str, tokens: int
) -> None:
    async with suite(text_model, replace(ALPHABET, step_s=step_s)) as (front, one):
        opts = options(400, stop=stops, return_token_ids=True)
        answer = await chat(front.stub, "hi", opts=opts)
        assert answer.text == text
        assert answer.finish_reason == STOP
        matched = answer.choices[0].matched_stop
        assert matched is not None
        assert matched.text in stops
        assert answer.usage.completion_tokens == tokens == answer.choices[0].token_count
        assert answer.choices[0].token_ids == list(range(A, A + tokens))
        await one.until_idle()


async def test_no_part_of_a_stop_is_ever_sent(text_model: TextModel) -> None:
    async with suite(text_model, STEPPING) as (front, _):
        conversation = Conversation(front.stub)
        await conversation.say(start("hi", opts=options(400, stop=["DEFGHIJ"])))
        await conversation.call.done_writing()
        while await conversation.read():
            assert conversation.answers[0].text in ("A", "AB", "ABC")
        assert conversation.answers[0].messages > 3, "it came in too few pieces to tell"


async def test_a_stop_that_does_not_complete_is_text(text_model: TextModel) -> None:
    async with suite(text_model) as (front, _):
        answer = await chat(front.stub, "hi", opts=options(5, stop=["DEX", "EF"]))
        assert answer.text == "ABCDE"
        assert answer.finish_reason == LENGTH
        assert answer.usage.completion_tokens == 5


async def test_a_stop_token_counts_but_its_text_is_not_sent(text_model: TextModel) -> None:
    async with suite(text_model) as (front, one):
        opts = options(400, stop_token_ids=[A + 4], return_token_ids=True)
        answer = await chat(front.stub, "hi", opts=opts)
        assert answer.text == "ABCD"
        assert answer.finish_reason == STOP
        matched = answer.choices[0].matched_stop
        assert matched is not None
        assert matched.token_id == A + 4
        assert answer.usage.completion_tokens == 5
        assert answer.choices[0].token_ids == list(range(A, A + 5))
        await one.until_idle()


async def test_the_models_eos_ends_unless_it_is_ignored(text_model: TextModel) -> None:
    async with suite(text_model, replace(ALPHABET, eos_token_id=A + 3)) as (front, _):
        answer = await chat(front.stub, "hi", opts=options(9))
        assert answer.text == "ABC"
        assert answer.finish_reason == STOP
        assert answer.usage.completion_tokens == 4
        answer = await chat(front.stub, "hi", opts=options(9, ignore_eos=True))
        assert answer.text == "ABCDEFGHI"
        answer = await chat(front.stub, "hi", opts=options(9, min_new_tokens=4))
        assert answer.text == "ABC"
        answer = await chat(front.stub, "hi", opts=options(9, min_new_tokens=5))
        assert answer.text == "ABCDEFGHI"


async def test_special_tokens_are_text_only_when_asked_for(text_model: TextModel) -> None:
    async with suite(text_model) as (front, _):
        plain = await gather(front.stub.Complete(completion([0], options(4))))
        assert plain.text == '!"'
        opts = options(4, include_special_tokens=True)
        shown = await gather(front.stub.Complete(completion([0], opts)))
        assert shown.text == '<|im_start|><|im_end|>!"'
        assert plain.usage == shown.usage
        opts = options(9, include_special_tokens=True, stop_token_ids=[2])
        stopped = await gather(front.stub.Complete(completion([0], opts)))
        assert stopped.text == "<|im_start|><|im_end|>"


# ---- logprobs


async def test_logprobs_carry_text_and_bytes(text_model: TextModel) -> None:
    asked = sampling_pb2.LogprobOptions(top=2, prompt=True)
    async with suite(text_model) as (front, _):
        answer = await gather(
            front.stub.Complete(completion([A, A + 1], options(3, logprobs=asked)))
        )
        assert answer.text == "CDE"
        entries = answer.choices[0].logprobs
        assert [(e.token_id, e.text, e.token_bytes, e.logprob) for e in entries] == [
            (A + 2, "C", b"C", -0.5),
            (A + 3, "D", b"D", -0.5),
            (A + 4, "E", b"E", -0.5),
        ]
        assert [(t.text, t.logprob) for t in entries[0].top] == [("C", -0.5), ("D", -1.0)]
        assert all(not t.top for t in entries[0].top)
        assert answer.finished is not None
        first, second = answer.prompt_logprobs
        assert (first.text, second.text, second.logprob) == ("A", "B", -0.5)
        assert math.isnan(first.logprob)


async def test_part_of_a_character_shows_as_such_in_logprobs(text_model: TextModel) -> None:
    first_byte = text_model.encode("ÿ", add_special_tokens=False)[0]
    assert len(text_model.encode("ÿ", add_special_tokens=False)) == 2
    async with suite(text_model) as (front, _):
        opts = options(1, logprobs=sampling_pb2.LogprobOptions())
        answer = await gather(front.stub.Complete(completion([first_byte - 1], opts)))
        (entry,) = answer.choices[0].logprobs
        assert entry.text == "\ufffd"
        assert entry.token_bytes == "ÿ".encode()[:1]
        assert answer.text == "\ufffd"
        assert list(entry.top) == []


async def test_logprobs_end_with_the_stop(text_model: TextModel) -> None:
    """Also when the stop lies amid tokens that were gathered."""
    interval = Duration()
    interval.FromMilliseconds(100)
    asked = sampling_pb2.LogprobOptions()
    async with suite(text_model) as (front, _):
        opts = options(
            40, stop=["CD"], logprobs=asked, min_interval=interval, return_token_ids=True
        )
        answer = await chat(front.stub, "hi", opts=opts)
        assert [entry.text for entry in answer.choices[0].logprobs] == ["A", "B", "C", "D"]
        assert answer.choices[0].token_ids == list(range(A, A + 4))
        assert answer.usage.completion_tokens == 4
        assert answer.finished is not None
        assert list(answer.prompt_logprobs) == []


MOST_BYTES = 4 << 20
"""What gRPC libraries take unless told otherwise."""


async def test_a_long_prompts_logprobs_come_in_messages_that_clients_take(
    text_model: TextModel,
) -> None:
    prompt = [A + at % 20 for at in range(300_000)]
    asked = sampling_pb2.LogprobOptions(prompt=True)
    roomy = replace(ALPHABET, context_length=400_000)
    async with suite(text_model, roomy) as (front, _):
        call = front.stub.Complete(completion(prompt, options(1, logprobs=asked)))
        messages = [message async for message in call]
    sizes = [message.ByteSize() for message in messages]
    assert sum(sizes) > MOST_BYTES > max(sizes)
    assert [e.token_id for message in messages for e in message.prompt_logprobs] == prompt


async def test_many_choices_with_logprobs_too(text_model: TextModel) -> None:
    """Gathered for one message, the output would be larger than clients take."""
    interval = Duration(seconds=2)
    asked = sampling_pb2.LogprobOptions(top=20)
    roomy = replace(ALPHABET, context_length=10_000, max_running_requests=16)
    async with suite(text_model, roomy) as (front, _):
        opts = options(1_000, n=16, logprobs=asked, min_interval=interval)
        messages = [message async for message in front.stub.Complete(completion([A], opts))]
    sizes = [message.ByteSize() for message in messages]
    assert sum(sizes) > MOST_BYTES > max(sizes)
    assert sum(len(delta.logprobs) for m in messages for delta in m.choices) == 16 * 1_000
    assert [m.HasField("finished") for m in messages].index(True) == len(messages) - 1


async def test_a_text_of_too_many_tokens_is_refused(text_model: TextModel) -> None:
    async with suite(text_model) as (front, _):
        request = processor_pb2.TokenizeRequest(text="ÿ" * (1 << 20) + "z" * (1 << 20))
        refused = await refusal(front.stub.Tokenize(request))
        assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
        assert refused.fields == ("text",)
        assert "divide it" in refused.message


# ---- choices


@pytest.mark.parametrize("n", [1, 3, 16])
async def test_n_choices_of_one_prompt(text_model: TextModel, n: int) -> None:
    async with suite(text_model) as (front, one):
        answer = await chat(front.stub, "hi", opts=options(4, n=n, seed=2**63 - 1))
        assert sorted(answer.choices) == list(range(n))
        assert {choice.text for choice in answer.choices.values()} == {"ABCD"}
        assert answer.usage.completion_tokens == 4 * n
        alone = await chat(front.stub, "hi", opts=options(1))
        assert answer.usage.prompt_tokens == alone.usage.prompt_tokens
        await one.until_idle()


async def test_choices_stop_each_by_itself(text_model: TextModel) -> None:
    async with suite(text_model, STEPPING) as (front, one):
        answer = await chat(front.stub, "hi", opts=options(30, n=4, stop=["HI"]))
        assert [choice.text for choice in answer.choices.values()] == ["ABCDEFG"] * 4
        assert answer.usage.completion_tokens == 4 * 9
        await one.until_idle()


# ---- ids, counts, pacing


async def test_token_ids_come_when_asked_for(text_model: TextModel) -> None:
    async with suite(text_model) as (front, _):
        opts = options(5, return_token_ids=True)
        answer = await gather(front.stub.Complete(completion([A], opts)))
        assert answer.choices[0].token_ids == list(range(A + 1, A + 6))
        answer = await gather(front.stub.Complete(completion([A], options(5))))
        assert answer.choices[0].token_ids == []
        assert answer.choices[0].token_count == 5


async def test_min_interval_gathers_tokens_but_never_the_first(text_model: TextModel) -> None:
    async with suite(text_model, STEPPING) as (front, _):
        interval = Duration()
        interval.FromMilliseconds(150)
        opts = options(90, min_interval=interval)
        conversation = Conversation(front.stub)
        began = time.monotonic()
        await conversation.say(start("hi", opts=opts))
        await conversation.call.done_writing()
        arrivals = []
        while await conversation.read():
            arrivals.append(time.monotonic() - began)
        answer = conversation.answers[0]
        assert answer.usage.completion_tokens == 90
        assert arrivals[0] < 0.15
        # All but the last, which carries the end and needn't wait.
        assert len(arrivals) <= 2 + arrivals[-1] / 0.15
        assert answer.finished is not None
        assert answer.finished.longest_pacing_interval.ToMilliseconds() == 150


async def test_without_an_interval_tokens_come_as_they_are_made(text_model: TextModel) -> None:
    async with suite(text_model, replace(ALPHABET, step_s=0.03)) as (front, _):
        answer = await chat(front.stub, "hi", opts=options(15))
        assert answer.messages >= 8


# ---- Complete


async def test_complete_text_and_ids_agree(text_model: TextModel) -> None:
    async with suite(text_model) as (front, one):
        by_text = await gather(front.stub.Complete(completion("say A", options(5))))
        ids = (await front.stub.Tokenize(processor_pb2.TokenizeRequest(text="say A"))).token_ids
        by_ids = await gather(front.stub.Complete(completion(ids, options(5), request_id="r")))
        assert by_text.text == by_ids.text == "BCDEF"
        assert by_text.usage == by_ids.usage
        assert by_text.usage.prompt_tokens == len(ids)
        assert by_text.finish_reason == LENGTH
        assert by_ids.started == processor_pb2.TurnStarted(request_id="r", model=MODEL)
        await one.until_idle()


async def test_complete_is_stopped_by_leaving(text_model: TextModel) -> None:
    async with suite(text_model, STEPPING) as (front, one):
        call = front.stub.Complete(completion("A", options(400)))
        await call.read()
        call.cancel()
        await one.until_idle()
        call = front.stub.Complete(completion("A", options(400)), timeout=0.2)
        failed = await refusal(call)
        assert failed.code is grpc.StatusCode.DEADLINE_EXCEEDED
        await one.until_idle()


# ---- Tokenize, Detokenize, ListModels


@pytest.mark.parametrize("text", ["hello world", "naïve 世界 😀\n\t", "", "A" * 5000])
async def test_tokenize_and_detokenize_are_inverse(text_model: TextModel, text: str) -> None:
    async with suite(text_model) as (front, _):
        tokens = await front.stub.Tokenize(processor_pb2.TokenizeRequest(text=text))
        assert list(tokens.token_ids) == text_model.encode(text, add_special_tokens=True)
        assert tokens.rendered_prompt == ""
        back = await front.stub.Detokenize(
            processor_pb2.DetokenizeRequest(token_ids=tokens.token_ids)
        )
        assert back.text == text


async def test_detokenize_special_tokens_and_halves(text_model: TextModel) -> None:
    async with suite(text_model) as (front, _):

        async def text(ids: Sequence[int], *, special: bool = False) -> str:
            request = processor_pb2.DetokenizeRequest(token_ids=ids, include_special_tokens=special)
            answer = await front.stub.Detokenize(request)
            return str(answer.text)

        assert await text([1, A, 2]) == "A"
        assert await text([1, A, 2], special=True) == "<|im_start|>A<|im_end|>"
        half = text_model.encode("ÿ", add_special_tokens=False)[:1]
        assert await text(half) == "\ufffd"
        failed = await refusal(
            front.stub.Detokenize(processor_pb2.DetokenizeRequest(token_ids=[0, VOCAB_SIZE]))
        )
        assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
        assert (failed.reason, failed.fields) == ("INVALID_REQUEST", ("token_ids[1]",))


async def test_tokenize_refuses_by_field(text_model: TextModel) -> None:
    async with suite(text_model) as (front, _):
        failed = await refusal(front.stub.Tokenize(processor_pb2.TokenizeRequest()))
        assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
        assert failed.fields == ("input",)
        request = processor_pb2.TokenizeRequest(conversation=processor_pb2.Conversation())
        failed = await refusal(front.stub.Tokenize(request))
        assert failed.fields == ("conversation.messages",)


async def test_text_is_served_without_workers(text_model: TextModel) -> None:
    async with processor({MODEL: text_model}, ["127.0.0.1:1"], wait=False) as front:
        tokens = await front.stub.Tokenize(processor_pb2.TokenizeRequest(text="A"))
        assert list(tokens.token_ids) == [A]
        models = (await front.stub.ListModels(processor_pb2.ListModelsRequest())).models
        tasks = [processor_pb2.MODEL_TASK_CHAT, processor_pb2.MODEL_TASK_COMPLETE]
        files = processor_pb2.TextFiles(
            tokenizer="tokenizer.json", chat_template="the checkpoint's"
        )
        assert models == [
            processor_pb2.ServedModel(
                name=MODEL, context_length=4096, chat=True, default_of=tasks, text_files=files
            )
        ]


async def test_models_are_listed_by_name_with_their_workers(text_model: TextModel) -> None:
    models = {"zeta": text_model, MODEL: text_model}
    async with (
        worker() as one,
        worker() as two,
        processor(models, [one.address, two.address]) as front,
    ):
        listed = (await front.stub.ListModels(processor_pb2.ListModelsRequest())).models
        assert [model.name for model in listed] == [MODEL, "zeta"]
        assert [model.ready for model in listed] == [True, False]
        assert listed[0].context_length == CONTEXT_LENGTH
        assert list(listed[0].workers) == [
            processor_pb2.ModelWorkers(role=worker_pb2.WORKER_ROLE_AGGREGATED, connected=2)
        ]
