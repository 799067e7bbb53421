"""Render and Parse: what Chat does before and behind the engine, each alone."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import pytest

from millstream.v1 import chat_pb2, processor_pb2
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.runtime.work.pool import WorkPool
from millstream_testing.alphabet import alphabet_model
from millstream_testing.in_process import ALPHABET, MODEL, InProcessProcessor, processor, worker
from tests.support.processor.chats import Answer, Choice, chat, options, start
from tests.support.processor.saying import saying
from tests.support.wire.failures import refusal

EVENTS = processor_pb2.CHAT_OUTPUT_EVENTS
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}"
    "{% for m in messages %}{{ m.content }}|{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}no {% else %}<think>{% endif %}"
)
TOOLS = [
    chat_pb2.ChatTool(name="f", parameters_json_schema='{"properties": {"n": {"type": "integer"}}}')
]
CALL = "<tool_call>\n<function=f>\n<parameter=n>\n7\n</parameter>\n</function>\n</tool_call>"
SPOKEN = f"hm, ÿ</think>\n\nLet me see.\n{CALL}"
Request = processor_pb2.ParseRequest
Reading = processor_pb2.AnswerReading


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    folder: Path = alphabet_model(tmp_path_factory.mktemp("model"))
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text("utf-8")) | {"chat_template": TEMPLATE}
    file.write_text(json.dumps(config), "utf-8")
    return TextModel.load(folder)


@contextlib.asynccontextmanager
async def serving(model: TextModel, form: str = "qwen-xml") -> AsyncIterator[InProcessProcessor]:
    config = replace(ALPHABET, context_length=2048)
    formats = {MODEL: form} if form else {}
    async with (
        worker(config) as one,
        processor({MODEL: model}, [one.address], formats=formats) as front,
    ):
        yield front


async def render(front: InProcessProcessor, *texts: str, **fields: Any) -> Any:
    asked = start(*texts, **fields).start
    return await front.stub.Render(processor_pb2.RenderRequest(start=asked))


async def parse(
    front: InProcessProcessor, *requests: processor_pb2.ParseRequest
) -> tuple[list[Any], processor_pb2.ParseFinished]:
    """Return the pieces of the answer, with neighbours of a kind joined, and its end."""
    *others, last = [response async for response in front.stub.Parse(iter(requests))]
    assert not any(response.HasField("finished") for response in others)
    return pieces(e for r in [*others, last] for e in r.events), last.finished


def pieces(events: Iterable[processor_pb2.OutputEvent]) -> list[Any]:
    found: list[Any] = []
    for event in events:
        kind = event.WhichOneof("event")
        value = getattr(event, kind or "text")
        if isinstance(value, str) and found and found[-1][0] == kind:
            found[-1] = (kind, found[-1][1] + value)
        elif kind == "tool_call_start":
            found.append((kind, value.index, value.name))  # ids are random
        else:
            found.append((kind, value if isinstance(value, str) else value.incomplete))
    return found


def ids(values: Sequence[int]) -> processor_pb2.TokenIds:
    return processor_pb2.TokenIds(ids=values)


async def complete(front: InProcessProcessor, rendered: Any) -> Choice:
    request = processor_pb2.CompleteRequest(
        token_ids=ids(rendered.token_ids),
        options=processor_pb2.GenerationOptions(sampling=rendered.sampling, return_token_ids=True),
    )
    answer = Answer()
    async for response in front.stub.Complete(request):
        answer.add(response)
    return answer.choices[0]


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_render_complete_parse_is_chat(model: TextModel, size: int) -> None:
    opts = options(200, temperature=0)
    asked: dict[str, Any] = {"tools": TOOLS, "output": EVENTS, "opts": opts}
    async with serving(model) as front:
        with saying(model, SPOKEN, SPOKEN) as prompts:
            chatted = await chat(front.stub, "hi", **asked)
            rendered = await render(front, "hi", **asked)
            said = (await complete(front, rendered)).token_ids
        assert prompts == [rendered.rendered_prompt] * 2 == ["f;hi|<think>"] * 2
        parts = [said[at : at + size] for at in range(0, len(said), size)]
        parsed, end = await parse(
            front,
            Request(reading=rendered.reading),
            *[Request(token_ids=ids(part)) for part in parts],
        )
    assert parsed == pieces(chatted.choices[0].events)
    assert parsed[0] == ("reasoning", "hm, ÿ")
    (call,) = end.tool_calls
    assert (call.name, call.arguments_json, call.incomplete) == ("f", '{"n": 7}', False)
    assert end.reasoning_tokens == chatted.usage.reasoning_tokens > 0
    assert rendered.model == MODEL
    assert list(rendered.stop_token_ids) == list(model.eos_token_ids)
    assert rendered.sampling.max_new_tokens == 200


async def test_text_is_parsed_as_its_tokens_are(model: TextModel) -> None:
    async with serving(model) as front:
        reading = Reading(model=MODEL, prompt_end="<think>", tools=TOOLS)
        whole, _ = await parse(front, Request(reading=reading, text=SPOKEN))
        split, end = await parse(
            front, Request(reading=reading), *[Request(text=char) for char in SPOKEN]
        )
        long, _ = await parse(front, Request(reading=reading, text="é" * 100_000))
    assert whole == split
    assert [name for name, *_ in whole] == [
        "reasoning",
        "text",
        "tool_call_start",
        "tool_call_arguments_json",
        "tool_call_end",
    ]
    assert end.reasoning_tokens == 0
    assert long == [("reasoning", "é" * 100_000)]


async def test_the_reading_says_how_the_answer_is_read(model: TextModel) -> None:
    hermes = '<tool_call>\n{"name": "f", "arguments": {"n": 7}}\n</tool_call>'
    async with serving(model) as front:
        plain = (await parse(front, Request(reading=Reading(), text="hm</think>x")))[0]
        named, end = await parse(
            front,
            Request(reading=Reading(format="hermes", tools=TOOLS, one_call=True), text=hermes * 2),
        )
        off = await render(
            front, "hi", reasoning=processor_pb2.ReasoningOptions(enabled=False), tools=TOOLS
        )
    assert plain == [("text", "hmx")]  # nothing had begun the reasoning
    assert [piece[0] for piece in named].count("tool_call_start") == 1
    assert [call.arguments_json for call in end.tool_calls] == ['{"n": 7}']
    assert off.rendered_prompt == "f;hi|no "
    assert off.reading.format == "qwen-xml"
    assert off.reading.prompt_end == off.rendered_prompt
    assert list(off.reading.tools) == TOOLS


async def test_what_takes_long_in_parse_is_done_in_the_text_threads(model: TextModel) -> None:
    run, seconds = WorkPool.run, []

    async def watched(
        threads: WorkPool, work: Callable[[], Any], estimate: float, *, batch: bool = False
    ) -> Any:
        seconds.append(estimate)
        return await run(threads, work, estimate, batch=batch)

    large = json.dumps({"properties": {f"a{at}": {} for at in range(1000)}})
    tool = chat_pb2.ChatTool(name="f", parameters_json_schema=large)
    long = "x" * 1024 * 140
    pieces_of_1024 = [Request(text=long[:1024])] * 140
    async with serving(model) as front:
        with mock.patch.object(WorkPool, "run", watched):
            reading = Reading(format="hermes", tools=[tool], begun="so " * 1000)
            begin = Request(reading=reading, text='<tool_call>{"name": "f", "arguments": {"a": "')
            _, end = await parse(front, begin, *pieces_of_1024, Request(text='"}}'))
        schemas, begun, *end_s = seconds
        assert (schemas, begun) == (0.3e-6 * len(large), 5e-6 * 3000)
        assert 2 <= len(end_s) < 20, "what comes when much has been read: a call may end in it"
        refused = await refusal(
            front.stub.Parse(iter([Request(reading=Reading(begun=CALL, tools=TOOLS))]))
        )
    (call,) = end.tool_calls
    assert call.arguments_json == json.dumps({"a": long})
    assert refused.fields == ("reading.begun",)


async def test_a_render_is_refused_as_a_chat_is(model: TextModel) -> None:
    async with serving(model) as front:
        wrong: list[dict[str, Any]] = [
            {"opts": options(3, top_p=2)},
            {"model": "no-such"},
            {"opts": options(5000)},
            {"messages": []},
        ]
        for asked in wrong:
            chatted = await refusal(chat(front.stub, "hi", **asked))
            failed = await refusal(render(front, "hi", **asked))
            assert (failed.code, failed.reason, failed.fields, failed.message) == (
                chatted.code,
                chatted.reason,
                chatted.fields,
                chatted.message,
            )
        empty = await refusal(front.stub.Render(processor_pb2.RenderRequest()))
        assert (empty.code, empty.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ("start",))


@pytest.mark.parametrize(
    ("requests", "field"),
    [
        ([], "reading"),
        ([Request(text="x")], "reading"),
        ([Request(reading=Reading(), text="x"), Request(reading=Reading())], "reading"),
        ([Request(reading=Reading(format="morse"), text="x")], "reading.format"),
        ([Request(reading=Reading(tools=[chat_pb2.ChatTool(name="?")]))], "reading.tools[0].name"),
        ([Request(reading=Reading(), token_ids=ids([1, 1 << 20]))], "token_ids.ids[1]"),
        ([Request(reading=Reading(), text="x"), Request(token_ids=ids([1]))], "token_ids.ids"),
        ([Request(reading=Reading(), token_ids=ids([1])), Request(text="x")], "text"),
    ],
)
async def test_parse_refuses_by_field(
    model: TextModel, requests: list[processor_pb2.ParseRequest], field: str
) -> None:
    async with serving(model) as front:
        failed = await refusal(parse(front, *requests))
    assert (failed.code, failed.fields) == (grpc.StatusCode.INVALID_ARGUMENT, (field,))


async def test_an_unknown_format_is_said_and_a_parse_needs_no_worker(model: TextModel) -> None:
    async with processor({MODEL: model}, ["127.0.0.1:1"], wait=False) as front:
        reading = Reading(format="qwen-xml", tools=TOOLS)
        read, _ = await parse(front, Request(reading=reading, text=CALL))
        assert read[0] == ("tool_call_start", 0, "f")
        failed = await refusal(render(front, "hi"))
        assert failed.reason == "NO_WORKER"
