"""Functions that `millstream chat` offers to a model, read from a file, and how they are called.

Nothing that a model writes reaches a shell or a command line: a command's arguments are those of
the file, and the call's go to its stdin as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from millstream_client import AnswerStream, ChatTool, Function, ToolLimits, ToolRun
from millstream_client.openai_shapes import tools as read_tools
from millstream_client.requests import ChatKnobs
from millstream_server.cli.flags import flag

_COMMAND_S = 30.0
_END_S = 1.0
"""How long the output of a killed command is waited for."""
_ASKED_S = 3600.0
_MOST_OUTPUT = 1 << 20
Ask = Callable[[str], Awaitable[str]]
"""Shows a call to the user, and returns the result that the user types."""


@dataclass(frozen=True)
class ToolFile:
    """Functions, and the commands of those that have one."""

    offered: tuple[ChatTool, ...] = ()
    commands: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def read(cls, file: str) -> Self:
        """Read a file with a JSON list of functions, as OpenAI's API takes them.

        Raises:
            argparse.ArgumentTypeError: it can't be read, or isn't such a list.
        """
        try:
            given = json.loads(Path(file).read_text(encoding="utf-8"))
            if not isinstance(given, list):
                raise TypeError("it must be a list of functions")  # noqa: TRY301 - one sentence for all
            commands = [_take_command(one) for one in given]
            offered = tuple(read_tools(given))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise argparse.ArgumentTypeError(f"can't use {file}: {error}") from error
        named = zip(offered, commands, strict=True)
        return cls(offered, {tool.name: command for tool, command in named if command})

    def tools(self, ask: Ask, *, run: bool) -> list[Function]:
        """Return the functions: their commands are run, if wanted, or the user is asked."""
        return [self._tool(tool, ask, run=run) for tool in self.offered]

    def _tool(self, tool: ChatTool, ask: Ask, *, run: bool) -> Function:
        command = self.commands.get(tool.name)

        async def run_command(**arguments: Any) -> str:
            return await _output(command or (), arguments)

        async def ask_user(**arguments: Any) -> str:
            return await ask(f"{tool.name} {json.dumps(arguments)}")

        if command and run:
            return Function(run_command, tool)
        return Function(ask_user, tool)


def add_tools(parser: argparse._ActionsContainer) -> None:
    """Add the flag that names such a file."""
    flag(
        parser,
        "--tools FILE",
        "functions that the model may call: a JSON file",
        type=ToolFile.read,
        default=ToolFile(),
    )


def add_reasoning(parser: argparse._ActionsContainer) -> None:
    """Add the flag that says whether the model reasons."""
    flag(
        parser,
        "--reasoning HOW",
        "on, off, or how much in the model's own words, such as low; left out: its default",
    )


def reasoning_given(args: argparse.Namespace) -> ChatKnobs:
    """Return the knob that `add_reasoning`'s flag stands for."""
    if args.reasoning is None:
        return {}
    return {"reasoning": {"on": True, "off": False}.get(args.reasoning, args.reasoning)}


def with_tools(stream: AnswerStream, tools: Sequence[Function]) -> AnswerStream | ToolRun:
    """Return a stream, or the run of its tools in its place. Who is asked may take their time."""
    return stream.run_tools(ToolLimits(timeout_s=_ASKED_S)) if tools else stream


def _take_command(given: Any) -> tuple[str, ...]:
    """Take the command out of a function's description."""
    if not isinstance(given, dict):
        raise TypeError(f"a function is an object, not {json.dumps(given)[:80]}")
    command = given.pop("command", None) or ()
    if isinstance(command, str) or not all(isinstance(part, str) for part in command):
        raise ValueError('"command" is a list of texts: ["date", "+%H:%M"]')
    return tuple(command)


async def _output(command: tuple[str, ...], arguments: Mapping[str, Any]) -> str:
    """Run a command; return what it writes. Its stderr is the user's.

    Raises:
        OSError: it can't be started.
        TimeoutError: it takes too long.
        RuntimeError: it fails, or writes too much.
    """
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("it has no pipes")
    try:
        async with asyncio.timeout(_COMMAND_S):
            process.stdin.write(json.dumps(arguments).encode())
            process.stdin.close()  # a command that doesn't read it is free not to
            output = b""
            while len(output) <= _MOST_OUTPUT and (more := await process.stdout.read(1 << 16)):
                output += more
            if len(output) > _MOST_OUTPUT:
                raise RuntimeError(f"it writes more than {_MOST_OUTPUT} bytes")
            code = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            with contextlib.suppress(TimeoutError):  # a child of its own may keep the pipe
                async with asyncio.timeout(_END_S):
                    await process.communicate()
    if code:
        raise RuntimeError(f"it ended with code {code}")
    return output.decode(errors="replace").strip()
