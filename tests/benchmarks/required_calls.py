"""How many of 100 required calls have arguments that fit their schema; on real SGLang, on the CPU.

    python -m tests.benchmarks.required_calls              # two minutes; 100 calls each way
    python -m tests.benchmarks.required_calls --calls 1000 --json

The demo model is served aggregated and, by processes of their own, with a hand-off from prefill to
decode. Each chat requires one of two tools, which it hasn't learnt to call: the grammar alone makes
the calls. All have to be whole, to fit, and to end with FINISH_REASON_TOOL_CALLS.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import jsonschema

from millstream.v1 import chat_pb2, generation_pb2, processor_pb2, processor_pb2_grpc
from tests.support.benchmarks.verdict import Verdict, folder_for, parser_of, progress
from tests.support.processes.ports import free_port
from tests.support.processes.suite import ServiceProcess, running
from tests.support.processor.chats import Answer, chat, options

_MODEL = Path(__file__).parents[2] / "demo" / "model"
_AT_ONCE = 16
_REASONING = processor_pb2.ReasoningOptions(max_tokens=32)
_SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "minLength": 1, "maxLength": 20},
            "unit": {"enum": ["C", "F"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
    "book": {
        "type": "object",
        "properties": {
            "from": {"type": "string", "pattern": "^[A-Z]{3}$"},
            "seats": {
                "type": "array",
                "items": {"type": "integer", "minimum": 1, "maximum": 60},
                "minItems": 1,
                "maxItems": 3,
            },
            "window": {"type": "boolean"},
        },
        "required": ["from", "seats"],
        "additionalProperties": False,
    },
}
_TOOLS = [
    chat_pb2.ChatTool(name=name, parameters_json_schema=json.dumps(schema), strict=True)
    for name, schema in _SCHEMAS.items()
]
_REQUIRED = processor_pb2.ToolChoice(mode=processor_pb2.TOOL_CHOICE_MODE_REQUIRED)


def main() -> int:
    """Run both ways; return 1 if an answer isn't as it has to be."""
    parser = parser_of("required_calls", __doc__)
    parser.add_argument("--calls", type=int, default=100)
    arguments = parser.parse_args()
    verdict = Verdict()
    with folder_for(arguments) as folder:
        for way, services in _ways(folder):
            progress(f"{way}: starting")
            with running(*services):
                asyncio.run(_measure(way, services[-1].address, arguments.calls, verdict))
    return verdict.conclude(as_json=arguments.json)


def _ways(folder: Path) -> Iterator[tuple[str, Sequence[ServiceProcess]]]:
    """Yield the services of each way, the Processor last."""
    common = {"model_path": _MODEL, "model_name": "demo", "engine_tokenizer": True}
    prefill = {**common, "bootstrap_port": free_port()}
    decode = {**common, "mode": "disaggregated"}
    for way, workers in (
        ("aggregated", {"decode": common}),
        ("hand-off", {"prefill": prefill, "decode": decode}),
    ):
        started = [
            ServiceProcess(f"millstream_server.{role}", flags, folder / f"{way}-{role}.log")
            for role, flags in workers.items()
        ]
        addresses = ",".join(worker.address for worker in started)
        flags = {"models": f"demo={_MODEL}", "formats": "demo=hermes", "workers": addresses}
        log = folder / f"{way}-processor.log"
        yield way, [*started, ServiceProcess("millstream_server.processor", flags, log)]


async def _measure(way: str, address: str, calls: int, verdict: Verdict) -> None:
    started, turns = time.monotonic(), asyncio.Semaphore(_AT_ONCE)
    async with grpc.aio.insecure_channel(address) as channel:
        stub = processor_pb2_grpc.ProcessorServiceStub(channel)
        answers = await asyncio.gather(*(_ask(stub, number, turns) for number in range(calls)))
    problems = [problem for answer in answers if (problem := _problem(answer))]
    verdict.measured[way] = {
        "calls": calls,
        "valid": calls - len(problems),
        "tokens": sum(answer.usage.completion_tokens for answer in answers),
        "seconds": round(time.monotonic() - started, 1),
    }
    for problem in problems[:10]:
        verdict.expect(holds=False, otherwise=f"{way}: {problem}")


async def _ask(stub: Any, number: int, turns: asyncio.Semaphore) -> Answer:
    async with turns:
        return await chat(
            stub,
            f"Question {number}: what is the weather?",
            tools=_TOOLS,
            tool_choice=_REQUIRED,
            parallel_tool_calls=False,
            reasoning=_REASONING,
            output=processor_pb2.CHAT_OUTPUT_EVENTS,
            opts=options(400, temperature=1),
        )


def _problem(answer: Answer) -> str:
    """Return what is wrong with an answer; empty: nothing is."""
    choice = answer.choices[0]
    said = f"{choice.finish_reason} after {choice.token_count} tokens: {choice.events}"
    if answer.finish_reason != generation_pb2.FINISH_REASON_TOOL_CALLS:
        return f"it ended with {said}"
    if len(choice.tool_calls) != 1 or choice.tool_calls[0].incomplete:
        return f"it has no whole call, or several: {said}"
    (call,) = choice.tool_calls
    try:
        jsonschema.validate(json.loads(call.arguments_json), _SCHEMAS[call.name])
    except (ValueError, LookupError, jsonschema.ValidationError) as error:
        return f"{call.name} {call.arguments_json!r}: {error}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
