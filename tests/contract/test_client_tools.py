"""Tools in the client: events, calls, and the loop that runs Python functions."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millstream.v1 import chat_pb2, processor_pb2
from millstream_client import (
    AnswerFormatError,
    CallArguments,
    CallEnded,
    CallStarted,
    ChatTool,
    Client,
    ReasoningPiece,
    RequestCancelledError,
    SyncClient,
    TextPiece,
    ToolLimits,
    ToolResult,
    ToolRoundsError,
    tool_result,
)
from millstream_server.engines.simulated.engine import SimulatedConfig
from millstream_server.engines.simulated.speech import Speech
from millstream_server.processor.text.tokenizer import TextModel
from millstream_testing.in_process import suite
from tests.support.scripted_processor import CALLS, LENGTH, STOP, OutputEvent, called, said, serving


def weather(city: str, days: int = 1) -> str:
    """Tell the weather."""
    return f"{city}: rain for {days} days"


async def test_events_and_the_whole_answer_say_the_same() -> None:
    thought = [OutputEvent(reasoning="I need "), OutputEvent(reasoning="rain.")]
    first = called("weather", '{"city"', ': "Oslo"}')
    cut = called("weather", '{"ci', index=1, incomplete=True)
    script = [*thought, *said("Wait."), *first, *cut]
    async with serving((script, LENGTH)) as (processor, address), Client(address) as client:
        stream = client.chat("Hi", tools=[weather], reasoning=True, tool_choice="weather")
        events = [event async for event in stream.events()]
        answer = stream.result
        assert (answer.reasoning, answer.text) == ("I need rain.", "Wait.")
        whole, half = answer.tool_calls
        assert (whole.id, whole.name, whole.arguments) == ("id0", "weather", {"city": "Oslo"})
        assert not whole.incomplete
        assert (half.incomplete, half.arguments_json) == (True, '{"ci')
        with pytest.raises(AnswerFormatError, match="'weather' isn't whole") as raised:
            _ = half.arguments
        assert raised.value.reason == "TOOL_CALL_INCOMPLETE"
        assert events == [
            *(ReasoningPiece("I need "), ReasoningPiece("rain."), TextPiece("Wait.")),
            *(CallStarted(whole), CallArguments('{"city"', whole)),
            *(CallArguments(': "Oslo"}', whole), CallEnded(whole)),
            *(CallStarted(half), CallArguments('{"ci', half)),
        ]
        start = processor.asked[0].start
        assert start.output == processor_pb2.CHAT_OUTPUT_EVENTS
        assert start.reasoning.enabled
        assert (start.tool_choice.mode, start.tool_choice.name) == (
            processor_pb2.TOOL_CHOICE_MODE_NAMED,
            "weather",
        )


async def test_a_conversation_keeps_calls_and_reasoning() -> None:
    script = [OutputEvent(reasoning="Hm."), *called("weather", '{"city": "Oslo"}')]
    async with serving((script, CALLS), (said("Rain."), STOP)) as (processor, address):
        async with Client(address) as client, client.conversation(tools=[weather]) as talk:
            await talk.say("Weather?").answer()
            await talk.tool_results([tool_result("id0", "wet")]).answer()
            _, model, result, last = talk.messages
        assert processor.results == [["wet"]]
    call = chat_pb2.ToolCall(id="id0", name="weather", arguments_json='{"city": "Oslo"}')
    assert (list(model.tool_calls), model.reasoning, list(model.content)) == ([call], "Hm.", [])
    assert (result.tool_call_id, last.content[0].text) == ("id0", "Rain.")


async def test_functions_are_run_until_the_model_answers() -> None:
    both = called("weather", '{"city": "Oslo"}') + called("slow", "{}", index=1)
    last = called("slow", "{}")
    script = ((both, CALLS), (last, CALLS), (said("Rain."), STOP))

    async def slow() -> dict[str, list[int]]:
        await asyncio.sleep(0)
        return {"n": [1, 2]}

    async with serving(*script) as (processor, address), Client(address) as client:
        async with client.chat("Weather?", tools=[weather, slow]).run_tools() as run:
            events = [event async for event in run]
            assert (await run.answer()).text == "Rain."
        results = [event for event in events if isinstance(event, ToolResult)]
        assert [result.call.name for result in results] == ["weather", "slow", "slow"]
        assert processor.results == [["Oslo: rain for 1 days", {"n": [1, 2]}], [{"n": [1, 2]}]]
        assert [len(answer.tool_calls) for answer in run.answers] == [2, 1, 0]
        assert [chat_pb2.ChatRole.Name(m.role)[10:] for m in run.messages] == [
            *("USER", "ASSISTANT", "TOOL", "TOOL", "ASSISTANT", "TOOL", "ASSISTANT"),
        ]


def raises(what: str) -> str:
    """Fail."""
    raise LookupError(f"no {what}")


def leaves() -> str:
    """End the program."""
    raise SystemExit


def returns_a_megabyte() -> str:
    """Return too much."""
    return "x" * 1_000_000


def returns_no_json() -> object:
    """Return an object."""
    return threading.Lock()


@pytest.mark.parametrize(
    ("tool", "arguments", "error"),
    [
        (raises, '{"what": "luck"}', "LookupError: no luck"),
        (raises, "{}", "ValueError: raises needs what"),
        (raises, '{"what": 1}', "ValueError: what: 1 is no str"),
        (raises, '{"what": "x", "when": 1}', "ValueError: raises takes no when"),
        (leaves, "{}", "SystemExit"),
        (
            returns_a_megabyte,
            "{}",
            "the result has 1000000 bytes, and may have 65536; ask for less",
        ),
        (returns_no_json, "{}", "TypeError: its result has a lock, which JSON hasn't"),
    ],
)
async def test_a_tool_that_fails_ends_in_a_clear_result(
    tool: Any, arguments: str, error: str
) -> None:
    script = ((called(tool.__name__, arguments), CALLS), (said("So be it."), STOP))
    async with serving(*script) as (processor, address), Client(address) as client:
        answer = await client.chat("Go", tools=[tool]).run_tools().answer()
        assert answer.text == "So be it."
        assert processor.results == [[{"error": error}]]


async def test_a_tool_that_hangs_is_left_alone() -> None:
    let_go = threading.Event()

    def hangs() -> str:
        let_go.wait(30)
        return "late"

    async def sleeps() -> None:
        await asyncio.Event().wait()

    calls = called("hangs", "{}") + called("sleeps", "{}", index=1)
    script = ((calls, CALLS), (said("So be it."), STOP))
    limits = ToolLimits(timeout_s=0.2)
    try:
        async with serving(*script) as (processor, address), Client(address) as client:
            await client.chat("Go", tools=[hangs, sleeps]).run_tools(limits).answer()
            assert processor.results == [[{"error": "it didn't finish within 0.2 s"}] * 2]
    finally:
        let_go.set()


async def test_a_tool_that_there_is_not_and_calls_without_end() -> None:
    calls = [*called("rain", "{}"), *called("weather", '{"city": "Oslo"}', index=1)]
    async with serving((calls, CALLS)) as (processor, address), Client(address) as client:
        limits = ToolLimits(rounds=2, calls=1)
        run = client.chat("Go", tools=[weather]).run_tools(limits)
        with pytest.raises(ToolRoundsError, match="after 2 rounds of results") as raised:
            await run.answer()
        assert raised.value.partial is run.answers[-1]
        unknown = {"error": "there is no such tool; there are: weather"}
        assert (
            processor.results
            == [
                [unknown, {"error": "an answer may have 1 calls; call again"}],
            ]
            * 2
        )


async def test_calls_of_other_tools_are_the_callers() -> None:
    script = (called("mail", "{}"), CALLS)
    async with serving(script) as (_, address), Client(address) as client:
        run = client.chat("Go", tools=[weather, ChatTool(name="mail")]).run_tools()
        assert [call.name for call in (await run.answer()).tool_calls] == ["mail"]
        with pytest.raises(TypeError, match="needs Python functions"):
            client.chat("Go", tools=[ChatTool(name="mail")]).run_tools()
        with pytest.raises(TypeError, match="one choice"):
            client.chat("Go", tools=[weather], n=2).run_tools()


async def test_a_run_can_be_cancelled_while_a_tool_works() -> None:
    working = asyncio.Event()

    async def works() -> None:
        working.set()
        await asyncio.Event().wait()

    script = (called("works", "{}"), CALLS)
    async with serving(script) as (processor, address), Client(address) as client:
        run = client.chat("Go", tools=[works]).run_tools()
        reading = asyncio.create_task(run.answer())
        await working.wait()
        run.cancel()
        with pytest.raises(RequestCancelledError, match="cancelled by the caller"):
            await reading
        assert processor.results == []


async def test_a_run_in_a_conversation_leaves_it_open() -> None:
    call = called("weather", '{"city": "Oslo"}')
    script = ((call, CALLS), (said("Rain."), STOP), (said("Bye."), STOP))
    async with serving(*script) as (processor, address), Client(address) as client:
        async with client.conversation(tools=[weather]) as talk:
            assert (await talk.say("Weather?").run_tools().answer()).text == "Rain."
            assert (await talk.say("Thanks").answer()).text == "Bye."
        kinds = [request.WhichOneof("message") for request in processor.asked]
        assert kinds == ["start", "tool_results", "user_turn"]


async def test_it_runs_without_asyncio() -> None:
    call = called("weather", '{"city": "Oslo", "days": 2}')
    script = ((call, CALLS), (said("Rain."), STOP))

    def use(address: str) -> Iterator[Any]:
        with SyncClient(address) as client:
            yield [type(event).__name__ for event in client.chat("?", tools=[weather]).events()]
            run = client.chat("?", tools=[weather]).run_tools()
            yield [type(event).__name__ for event in run]
            yield run.answer().text

    async with serving(*script, script[1]) as (processor, address):
        first, events, text = await asyncio.to_thread(lambda: list(use(address)))
        assert first == ["CallStarted", "CallArguments", "CallEnded"]
        assert (events, text) == (["TextPiece"], "Rain.")
    async with serving(*script) as (processor, address), Client(address) as client:
        with SyncClient(address) as blocking:
            run = blocking.chat("?", tools=[weather]).run_tools()
            assert (await asyncio.to_thread(run.answer)).text == "Rain."
        assert processor.results == [["Oslo: rain for 2 days"]]
        assert not client.connection.running


async def test_a_simulated_engine_makes_calls_in_the_models_own_notation() -> None:
    """The real Processor reads them; the tool's result says what comes next."""
    model = TextModel.load(Path("demo/model"))
    speech = Speech.load(Path("demo/model"))
    assert speech is not None
    config = SimulatedConfig(vocab_size=4096, speech=speech, eos_token_id=speech.end)
    arguments = '{"name": "weather", "arguments": {"city": "Oslo"}}'
    call = f"<think>Hm.</think><tool_call>\n{arguments}\n</tool_call>"

    def weather(city: str) -> str:
        return f'{city}: say "<think>Dry.</think>It is dry."'

    async with suite(model, config) as (front, _), Client(front.address) as client:
        question = f"Please say {json.dumps(call)}"
        run = client.chat(question, tools=[weather]).run_tools()
        answer = await run.answer()
        assert (answer.reasoning, answer.text) == ("Dry.", "It is dry.")
        assert [a.reasoning for a in run.answers] == ["Hm.", "Dry."]
        assert run.answers[0].tool_calls[0].arguments == {"city": "Oslo"}
