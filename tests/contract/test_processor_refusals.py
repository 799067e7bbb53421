"""What the Processor refuses: code, reason and fields; other requests go on."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from millstream.v1 import chat_pb2, processor_pb2, sampling_pb2
from millstream_server.processor.text.tokenizer import TextModel
from millstream_testing.in_process import (
    ALPHABET,
    CONTEXT_LENGTH,
    VOCAB_SIZE,
    InProcessProcessor,
    suite,
)
from millstream_testing.waiting import EOF
from tests.support.models.models import byte_level_model
from tests.support.processor.chats import (
    CANCEL,
    Conversation,
    completion,
    message,
    options,
    start,
    tool_results,
    user_turn,
)
from tests.support.telemetry.logged import fields_of
from tests.support.wire.failures import Failure, refusal

STEPPING = replace(ALPHABET, step_s=0.01)


@contextlib.asynccontextmanager
async def beside_a_healthy_chat(text_model: TextModel) -> AsyncIterator[InProcessProcessor]:
    """A suite where another chat runs on the same channel, which must not notice anything."""
    async with suite(text_model, STEPPING) as (front, one):
        healthy = Conversation(front.stub)
        await healthy.say(start("hi", opts=options(400)))
        await healthy.read()
        yield front
        before = healthy.answers[0].choices[0].token_count
        await healthy.read()
        assert healthy.answers[0].choices[0].token_count > before
        await healthy.say(CANCEL)
        answer = await healthy.answer()
        assert answer.usage.completion_tokens == answer.choices[0].token_count
        await healthy.end()
        assert await healthy.call.code() is grpc.StatusCode.OK
        await one.until_idle()


async def _chat_refusal(front: InProcessProcessor, *requests: Any, **call: Any) -> Failure:
    conversation = Conversation(front.stub, **call)
    await conversation.say(*requests)
    return await refusal(conversation.end())


def _seconds(value: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(int(value * 1e9))
    return duration


CALL = chat_pb2.ToolCall(id="c1", name="f", arguments_json="{}")
UNKNOWN: Any = 77
ASSISTANT, TOOL = chat_pb2.CHAT_ROLE_ASSISTANT, chat_pb2.CHAT_ROLE_TOOL


def _tool(schema: str, name: str = "f") -> chat_pb2.ChatTool:
    return chat_pb2.ChatTool(name=name, parameters_json_schema=schema)


_LATER_PART = chat_pb2.ContentPart.FromString(b"\x9a\x06\x03png")
"""A part whose kind is field 99 of the oneof: one of a newer contract."""


def _message_with(part: chat_pb2.ContentPart) -> chat_pb2.ChatMessage:
    return chat_pb2.ChatMessage(
        role=chat_pb2.CHAT_ROLE_USER, content=[chat_pb2.ContentPart(text="Look: "), part]
    )


def _call_with(arguments: str) -> chat_pb2.ToolCall:
    return chat_pb2.ToolCall(id="c", name="f", arguments_json=arguments)


REFUSED: dict[str, tuple[Any, list[str]]] = {
    "no messages": (start(), ["messages"]),
    "a part of no kind": (
        start(messages=[message("a"), _message_with(chat_pb2.ContentPart())]),
        ["messages[1].content[1]"],
    ),
    "a part of a kind to come": (
        start(messages=[_message_with(_LATER_PART)]),
        ["messages[0].content[1]"],
    ),
    "a grammar of no kind": (
        start("a", opts=options(constraint=sampling_pb2.Constraint())),
        ["options.sampling.constraint"],
    ),
    "no role": (start(messages=[chat_pb2.ChatMessage()]), ["messages[0].role"]),
    "unknown role": (start(messages=[message("a"), message("b", UNKNOWN)]), ["messages[1].role"]),
    "calls last": (
        start(messages=[message("a"), message("b", ASSISTANT, tool_calls=[CALL])]),
        ["messages[1].tool_calls[0]"],
    ),
    "tool result of nothing": (start(messages=[message("a", TOOL)]), ["messages[0].tool_call_id"]),
    "long arguments": (
        start(
            messages=[
                message("a", ASSISTANT, tool_calls=[_call_with("x" * (64 << 10) + "x")]),
                message("b"),
            ]
        ),
        ["messages[0].tool_calls[0].arguments_json"],
    ),
    "schema not JSON": (start("a", tools=[_tool("{")]), ["tools[0].parameters_json_schema"]),
    "schema's reference": (
        start("a", tools=[_tool("{}", "g"), _tool('{"$ref": "https://example.com/a"}')]),
        ["tools[1].parameters_json_schema"],
    ),
    "schema no object": (start("a", tools=[_tool("[]")]), ["tools[0].parameters_json_schema"]),
    "tool twice": (start("a", tools=[_tool(""), _tool("")]), ["tools[1].name"]),
    "tool's name": (start("a", tools=[_tool("", "a b")]), ["tools[0].name"]),
    "long prompt": (start("x" * 3 * CONTEXT_LENGTH), ["messages"]),
    "long answer": (
        start("a", opts=options(CONTEXT_LENGTH)),
        ["options.sampling.max_new_tokens"],
    ),
    "temperature": (start("a", opts=options(temperature=-1)), ["options.sampling.temperature"]),
    "temperature NaN": (
        start("a", opts=options(temperature=math.nan)),
        ["options.sampling.temperature"],
    ),
    "top_p": (start("a", opts=options(top_p=0)), ["options.sampling.top_p"]),
    "several": (
        start("a", opts=options(0, min_p=3)),
        ["options.sampling.min_p", "options.sampling.max_new_tokens"],
    ),
    "stop tokens": (
        start("a", opts=options(stop_token_ids=[VOCAB_SIZE])),
        ["options.sampling.stop_token_ids[0]"],
    ),
    "n 0": (start("a", opts=options(n=0)), ["options.n"]),
    "n 17": (start("a", opts=options(n=17)), ["options.n"]),
    "empty stop": (start("a", opts=options(stop=["x", ""])), ["options.stop[1]"]),
    "long stop": (start("a", opts=options(stop=["x" * 257])), ["options.stop[0]"]),
    "17 stops": (start("a", opts=options(stop=["x"] * 17)), ["options.stop"]),
    "interval": (start("a", opts=options(min_interval=_seconds(10.1))), ["options.min_interval"]),
    "negative interval": (
        start("a", opts=options(min_interval=_seconds(-1))),
        ["options.min_interval"],
    ),
    "top logprobs": (
        start("a", opts=options(logprobs=sampling_pb2.LogprobOptions(top=21))),
        ["options.logprobs.top"],
    ),
    "request id": (start("a", request_id="ü" * 65), ["request_id"]),
    "request id of two lines": (start("a", request_id="r\nlevel=ERROR"), ["request_id"]),
    "request id that rings": (start("a", request_id="r\x1b[2J\x07"), ["request_id"]),
}


async def test_bad_chats_are_refused_by_field(text_model: TextModel) -> None:
    async with beside_a_healthy_chat(text_model) as front:
        for what, (request, fields) in REFUSED.items():
            failed = await _chat_refusal(front, request)
            assert failed.code is grpc.StatusCode.INVALID_ARGUMENT, what
            assert failed.reason == "INVALID_REQUEST", what
            assert list(failed.fields) == [f"start.{field}" for field in fields], what
            assert failed.message.startswith(f"start.{fields[0]}"), what
            assert not failed.retryable
            assert failed.retry_delay_s is None


LATER: dict[str, tuple[Any, list[str]]] = {
    "a part of no kind": (
        processor_pb2.ChatRequest(
            user_turn=processor_pb2.UserTurn(content=[chat_pb2.ContentPart()])
        ),
        ["user_turn.content[0]"],
    ),
    "no content": (
        processor_pb2.ChatRequest(user_turn=processor_pb2.UserTurn()),
        ["user_turn.content"],
    ),
    "options": (user_turn("b", options(n=0)), ["user_turn.options.n"]),
    "sampling": (user_turn("b", options(top_p=0)), ["user_turn.options.sampling.top_p"]),
    "long": (user_turn("x" * 3 * CONTEXT_LENGTH), ["user_turn.content"]),
    "no results": (tool_results(), ["tool_results.messages"]),
    "results of another role": (
        tool_results(message("b", TOOL, tool_call_id="c1"), message("b")),
        ["tool_results.messages[1].role"],
    ),
    "result without a call": (
        tool_results(message("b", TOOL, tool_call_id="c1"), message("b", TOOL)),
        ["tool_results.messages[1].tool_call_id"],
    ),
    "result of another call": (
        tool_results(message("b", TOOL, tool_call_id="c9")),
        ["tool_results.messages[0].tool_call_id"],
    ),
    "long result": (
        tool_results(message("x" * 3 * CONTEXT_LENGTH, TOOL, tool_call_id="c1")),
        ["tool_results.messages"],
    ),
}


@pytest.mark.parametrize("what", LATER)
async def test_bad_later_turns_are_refused_by_their_own_fields(
    text_model: TextModel, what: str
) -> None:
    request, fields = LATER[what]
    async with suite(text_model) as (front, _):
        conversation = Conversation(front.stub)
        called = message("a", ASSISTANT, tool_calls=[CALL])
        answered = message("b", TOOL, tool_call_id="c1")
        await conversation.say(start(messages=[called, answered], opts=options(2)))
        await conversation.answer()
        await conversation.say(request)
        failed = await refusal(conversation.end())
    assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
    assert failed.reason == "INVALID_REQUEST"
    assert list(failed.fields) == fields


async def test_a_wrong_role_is_told_the_roles_as_they_are_written(text_model: TextModel) -> None:
    async with suite(text_model) as (front, _):
        failed = await _chat_refusal(front, start(messages=[message("a", UNKNOWN)]))
    known = [name for name, _ in chat_pb2.ChatRole.items() if name != "CHAT_ROLE_UNSPECIFIED"]
    assert all(name in failed.message for name in known)


async def test_an_unknown_model_is_not_found(text_model: TextModel) -> None:
    async with beside_a_healthy_chat(text_model) as front:
        stub = front.stub
        for call in (
            _chat_refusal(front, start("a", model="who")),
            refusal(stub.Complete(completion("a", model="who"))),
            refusal(stub.Tokenize(processor_pb2.TokenizeRequest(model="who", text="a"))),
            refusal(stub.Detokenize(processor_pb2.DetokenizeRequest(model="who"))),
        ):
            failed = await call
            assert failed.code is grpc.StatusCode.NOT_FOUND
            assert failed.reason == "MODEL_NOT_FOUND"
            assert "'who'" in failed.message
            assert not failed.retryable


async def test_a_model_without_a_template_completes_but_does_not_chat(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = byte_level_model(
        tmp_path_factory.mktemp("bare"), tokenizer_config={"chat_template": None}
    )
    async with suite(TextModel.load(path)) as (front, _):
        failed = await _chat_refusal(front, start("a"))
        assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
        assert (failed.reason, failed.fields) == ("UNSUPPORTED_FEATURE", ("start.messages",))
        models = await front.stub.ListModels(processor_pb2.ListModelsRequest())
        assert not models.models[0].chat


async def test_a_feature_the_engine_lacks_is_named(text_model: TextModel) -> None:
    async with beside_a_healthy_chat(text_model) as front:
        opts = options(constraint=sampling_pb2.Constraint(json_schema="{}"))
        failed = await _chat_refusal(front, start("a", opts=opts))
        assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
        assert failed.reason == "UNSUPPORTED_FEATURE"
        assert failed.fields == ("start.options.sampling.constraint",)


async def test_bad_completions_are_refused_by_field(text_model: TextModel) -> None:
    cases: dict[str, tuple[processor_pb2.CompleteRequest, tuple[str, ...]]] = {
        "no prompt": (processor_pb2.CompleteRequest(), ("prompt",)),
        "empty text": (completion(""), ("text",)),
        "no ids": (completion([]), ("token_ids.ids",)),
        "outside the vocabulary": (completion([1, 2, VOCAB_SIZE]), ("token_ids.ids[2]",)),
        "far outside": (completion([2**32 - 1]), ("token_ids.ids[0]",)),
        "long text": (completion("x" * 3 * CONTEXT_LENGTH), ("text",)),
        "long ids": (completion([5] * CONTEXT_LENGTH), ("token_ids.ids",)),
        "n": (completion("a", options(n=0)), ("options.n",)),
        "top_p": (completion("a", options(top_p=0)), ("options.sampling.top_p",)),
        "request id": (completion("a", request_id="x" * 129), ("request_id",)),
        "request id of two lines": (completion("a", request_id="a\u2028b"), ("request_id",)),
    }
    async with beside_a_healthy_chat(text_model) as front:
        for what, (request, fields) in cases.items():
            failed = await refusal(front.stub.Complete(request))
            assert failed.code is grpc.StatusCode.INVALID_ARGUMENT, what
            assert (failed.reason, failed.fields) == ("INVALID_REQUEST", fields), what


async def test_details_stay_small_however_much_is_wrong(text_model: TextModel) -> None:
    """Trailers have a limit; beyond it a client sees an error about metadata instead of ours."""
    async with beside_a_healthy_chat(text_model) as front:
        bias = {VOCAB_SIZE + i: 1000.0 for i in range(2000)}
        opts = options(logit_bias=bias, stop_token_ids=range(VOCAB_SIZE, VOCAB_SIZE + 256))
        failed = await _chat_refusal(front, start("a", opts=opts))
        assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
        assert failed.reason == "INVALID_REQUEST"
        assert "start.options.sampling.stop_token_ids[0]" in failed.fields
        failed = await _chat_refusal(front, start("a", model="模" * 100_000))
        assert failed.code is grpc.StatusCode.NOT_FOUND
        messages = [message("a", name="no good" * 100, role=UNKNOWN) for _ in range(1000)]
        failed = await _chat_refusal(front, start(messages=messages))
        assert failed.reason == "INVALID_REQUEST"


# ---- bytes


def _raw(front: InProcessProcessor, method: str, *, streaming: bool) -> Any:
    path = f"/millstream.v1.ProcessorService/{method}"
    channel: Any = front.channel
    return channel.stream_stream(path) if streaming else channel.unary_unary(path)


async def test_text_that_is_no_utf8_is_named_by_its_path(text_model: TextModel) -> None:
    good = start("a", opts=options(3, stop=["good", "bad!"])).SerializeToString()
    assert good.count(b"bad!") == 1
    async with beside_a_healthy_chat(text_model) as front:
        call = _raw(front, "Chat", streaming=True)()
        await call.write(good.replace(b"bad!", b"\xc3\x28\xff!"))
        failed = await refusal(call)
        assert failed.code is grpc.StatusCode.INTERNAL
        assert failed.message == "start.options.stop[1]: is not valid UTF-8"


async def test_bad_text_in_a_later_message_ends_that_conversation(text_model: TextModel) -> None:
    async with beside_a_healthy_chat(text_model) as front:
        call = _raw(front, "Chat", streaming=True)()
        await call.write(start("a", opts=options(3)).SerializeToString())
        assert await call.read() is not EOF
        turn = user_turn("bad!").SerializeToString()
        await call.write(turn.replace(b"bad!", b"\xff\xfe\xfd\xfc"))
        failed = await refusal(call)
        assert failed.code is grpc.StatusCode.INTERNAL
        assert failed.message == "user_turn.content[0].text: is not valid UTF-8"


async def test_bad_text_in_a_unary_request(text_model: TextModel) -> None:
    async with beside_a_healthy_chat(text_model) as front:
        good = processor_pb2.TokenizeRequest(text="bad!").SerializeToString()
        bad = good.replace(b"bad!", b"\xff\xfe\xfd\xfc")
        failed = await refusal(_raw(front, "Tokenize", streaming=False)(bad))
        assert failed.code is grpc.StatusCode.INTERNAL
        assert failed.message == "text: is not valid UTF-8"


async def test_bytes_that_are_no_message(text_model: TextModel) -> None:
    async with beside_a_healthy_chat(text_model) as front:
        call = _raw(front, "Chat", streaming=True)()
        await call.write(b"\x0a\xff\xff\xff\xff")
        failed = await refusal(call)
        assert failed.code is grpc.StatusCode.INTERNAL
        assert "millstream.v1.ChatRequest" in failed.message


async def test_a_message_of_ten_megabytes_ends_its_own_rpc(text_model: TextModel) -> None:
    big = "x" * (10 << 20)
    async with beside_a_healthy_chat(text_model) as front:
        failed = await _chat_refusal(front, start(big))
        assert failed.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        failed = await refusal(front.stub.Complete(completion(big)))
        assert failed.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        conversation = Conversation(front.stub)
        await conversation.say(start("a", opts=options(400)))
        await conversation.read()
        await conversation.say(user_turn(big))
        failed = await refusal(conversation.end())
        assert failed.code is grpc.StatusCode.RESOURCE_EXHAUSTED


# ---- our own faults

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"


async def test_an_uncaught_failure_shows_an_id_and_not_its_text(
    text_model: TextModel,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with suite(text_model) as (front, one):

        def broken(*_: object) -> None:
            raise ZeroDivisionError("the secret path /etc/x")

        monkeypatch.setattr(front.core.prompts, "of_chat", broken)
        traced = (("traceparent", f"00-{TRACE_ID}-00f067aa0ba902b7-01"),)
        failed = await _chat_refusal(front, start("a"), metadata=traced)
        await one.until_idle()
    assert failed.code is grpc.StatusCode.INTERNAL
    assert failed.reason == "INTERNAL"
    assert not failed.retryable
    assert failed.error_id
    assert failed.error_id in failed.message
    assert "secret" not in failed.message
    (fields,) = [fields_of(r) for r in caplog.records if r.message == "uncaught failure"]
    assert fields["error_id"] == failed.error_id
    assert fields["trace_id"] == TRACE_ID, "the caller's, to find the failure from either end"
