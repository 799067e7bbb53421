"""`millstream render` and `millstream parse`: what Chat does before and behind the engine."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from millstream_client import Answer, AnswerReading, Client, RenderResponse
from millstream_client.requests import ChatKnobs
from millstream_server.cli.answers import dim, printable, write_text
from millstream_server.cli.client import call_processor
from millstream_server.cli.flags import MODEL_HELP, Commands, add_processor, command, fail, flag
from millstream_server.cli.tool_files import add_reasoning, add_tools, reasoning_given

_RENDER = """\
Print the prompt that a chat sends to the model.

Nothing is generated: it shows what the model's chat template makes of a question. With --json you
also get its token ids, and under "reading" what `millstream parse --reading` needs.

examples:
  millstream render "What is Millstream?" --system "Be short."
  millstream render --messages conversation.json --tools tools.json
  millstream render "Hi" --json | jq -c .token_ids
"""
_PARSE = """\
Tell reasoning, text and calls of an answer on stdin apart.

The answer comes from stdin: its text with the special tokens that mark something, or with --ids a
JSON list of its token ids. Reasoning and calls go to stderr: stdout has the answer only.

examples:
  millstream parse --format hermes --json < answer.txt
  millstream parse --ids --reading prompt.json < ids.json
"""


def add_render(commands: Commands) -> None:
    """Add the command that shows prompts."""
    parser = command(commands, "render", _run_render, _RENDER)
    flag(parser, "question QUESTION", "a user's message; - reads it from stdin", nargs="*")
    flag(
        parser,
        "--messages FILE",
        "a whole conversation: a JSON list of messages, as OpenAI's API takes them",
        type=_json_list,
    )
    flag(parser, "--system TEXT", "instructions to the model")
    add_tools(parser)
    add_reasoning(parser)
    _add_common(parser)


def add_parse(commands: Commands) -> None:
    """Add the command that reads answers."""
    parser = command(commands, "parse", _run_parse, _PARSE)
    flag(
        parser,
        "--reading FILE",
        "what `millstream render --json` printed of the prompt",
        type=_reading,
        default=AnswerReading(),
    )
    flag(parser, "--format NAME", "how the model writes (default: the prompt's or model's)")
    add_tools(parser)
    flag(parser, "--ids", "stdin has token ids: a JSON list")
    _add_common(parser)


def _add_common(parser: argparse.ArgumentParser) -> None:
    add_processor(parser)
    flag(parser, "--model NAME", MODEL_HELP, default="")
    flag(parser, "--json", "print all that is known, as JSON")


def _json_list(file: str) -> list[Any]:
    try:
        found = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"can't use {file}: {error}") from error
    if not isinstance(found, list):
        raise argparse.ArgumentTypeError(f"can't use {file}: it must be a JSON list")
    return found


def _reading(file: str) -> AnswerReading:
    try:
        found = json.loads(Path(file).read_text(encoding="utf-8"))
        return json_format.ParseDict(found["reading"], AnswerReading())
    except (OSError, ValueError, TypeError, KeyError, json_format.ParseError) as error:
        sentence = f"can't use {file}: it isn't what `render --json` prints: {error}"
        raise argparse.ArgumentTypeError(sentence) from error


def _run_render(args: argparse.Namespace) -> int:
    question = " ".join(args.question)
    if bool(question) == (args.messages is not None):
        return fail("give a QUESTION, or a conversation by --messages FILE")
    said = args.messages if args.messages is not None else question
    if said == "-":
        said = sys.stdin.read()
    return call_processor(args, lambda client, _: _render(client, args, said))


async def _render(client: Client, args: argparse.Namespace, said: str | list[Any]) -> int:
    knobs: ChatKnobs = {"model": args.model, "tools": args.tools.offered, **reasoning_given(args)}
    try:
        rendered = await client.render(said, system=args.system, **knobs)
    except (TypeError, ValueError) as error:  # a message that can't be sent
        return fail(error)
    if args.json:
        print(json.dumps(_fields(rendered), ensure_ascii=False))
    else:
        write_text(rendered.rendered_prompt + _end_of_line(rendered.rendered_prompt))
    return 0


def _end_of_line(text: str) -> str:
    """Return what a terminal needs behind a text; a pipe gets the text alone."""
    return "\n" if sys.stdout.isatty() and not text.endswith("\n") else ""


def _fields(rendered: RenderResponse) -> dict[str, Any]:
    reading = json_format.MessageToDict(rendered.reading, preserving_proto_field_name=True)
    return {
        "model": rendered.model,
        "prompt": rendered.rendered_prompt,
        "token_ids": list(rendered.token_ids),
        "stop_token_ids": list(rendered.stop_token_ids),
        "reading": reading,
    }


def _run_parse(args: argparse.Namespace) -> int:
    said: Any = sys.stdin.read()
    if args.ids:
        try:
            said = json.loads(said)
        except ValueError:
            said = None
        if not isinstance(said, list) or not all(type(each) is int for each in said):
            return fail("--ids needs a JSON list of token ids on stdin, such as [1, 2]")
    reading = args.reading
    reading.model = args.model or reading.model
    reading.format = args.format or reading.format
    reading.tools.extend(args.tools.offered)
    return call_processor(args, lambda client, _: _parse(client, said, reading, as_json=args.json))


async def _parse(
    client: Client, said: str | list[int], reading: AnswerReading, *, as_json: bool
) -> int:
    answer = await client.parse(said, reading)
    if as_json:
        print(json.dumps(_told(answer), ensure_ascii=False))
        return 0
    if answer.reasoning:
        _note(answer.reasoning)
    write_text(answer.text + _end_of_line(answer.text))
    for call in answer.tool_calls:
        cut = " (incomplete)" if call.incomplete else ""
        _note(f"→ {call.name} {call.arguments_json}{cut}")
    return 0


def _note(text: str) -> None:
    print(dim(printable(text, sys.stderr), sys.stderr), file=sys.stderr)


def _told(answer: Answer) -> dict[str, Any]:
    return {
        "reasoning": answer.reasoning,
        "text": answer.text,
        "tool_calls": [
            {
                "id": call.id,
                "name": call.name,
                "arguments_json": call.arguments_json,
                "incomplete": call.incomplete,
            }
            for call in answer.tool_calls
        ],
        "reasoning_tokens": answer.usage.reasoning_tokens,
    }
