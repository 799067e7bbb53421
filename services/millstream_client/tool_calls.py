"""Runs the functions that a model calls; whatever they do, a text comes of it for the model."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import enum
import inspect
import json
import threading
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millstream.v1 import chat_pb2
from millstream_client.events import ToolCall
from millstream_client.functions import Function

_MAX_ERROR_CHARS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolLimits:
    """What a run of tools may take."""

    rounds: int = 8
    """Most answers with calls; a further one ends the run with a ToolRoundsError."""
    calls: int = 16
    """Most calls of one answer that are run; further ones get an error as their result."""
    timeout_s: float = 30.0
    """Longest time of a call."""
    result_bytes: int = 64 << 10
    """Largest result, as text in UTF-8; of a larger one the model gets an error."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a call returned, or why it didn't."""

    call: ToolCall
    content: str
    """What the model gets: the function's text, or JSON; ``{"error": …}`` if it failed."""
    error: BaseException | None = None
    """Why it failed."""
    choice: int = 0

    def to_message(self) -> chat_pb2.ChatMessage:
        return chat_pb2.ChatMessage(
            role=chat_pb2.CHAT_ROLE_TOOL,
            content=[chat_pb2.ContentPart(text=self.content)],
            tool_call_id=self.call.id,
            name=self.call.name,
        )


class _CallError(Exception):
    """A call failed; the text is for the model."""


async def run_calls(
    calls: Sequence[ToolCall], functions: Mapping[str, Function], limits: ToolLimits
) -> list[ToolResult]:
    """Run the calls of one answer, all at the same time; return their results in order."""
    runs = [_run(call, functions, limits) for call in calls[: limits.calls]]
    sentence = f"an answer may have {limits.calls} calls; call again"
    refused = [_failed(call, _CallError(sentence)) for call in calls[limits.calls :]]
    return [*await asyncio.gather(*runs), *refused]


async def _run(call: ToolCall, functions: Mapping[str, Function], limits: ToolLimits) -> ToolResult:
    function = functions.get(call.name)
    if function is None:
        return _failed(
            call, _CallError(f"there is no such tool; there are: {', '.join(functions)}")
        )
    try:
        arguments = function.bind(call.arguments)
    except ValueError as error:
        return _failed(call, error)
    content, failure = await _outcome(_started(function, arguments), limits.timeout_s)
    if failure is not None:
        return _failed(call, failure)
    if (nbytes := len(content.encode())) > limits.result_bytes:
        sentence = (
            f"the result has {nbytes} bytes, and may have {limits.result_bytes}; ask for less"
        )
        return _failed(call, _CallError(sentence))
    return ToolResult(call, content)


_Outcome = tuple[str, BaseException | None]


def _started(function: Function, arguments: dict[str, Any]) -> asyncio.Future[_Outcome]:
    """Start a call: a coroutine in this loop, a plain function in a thread of its own."""
    if inspect.iscoroutinefunction(function.call):
        return asyncio.ensure_future(_awaited(function.call(**arguments)))
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_Outcome] = loop.create_future()
    context = contextvars.copy_context()

    def set_result(outcome: _Outcome) -> None:
        if not future.done():
            future.set_result(outcome)

    def work() -> None:
        try:
            outcome: _Outcome = _as_text(context.run(function.call, **arguments)), None
        except BaseException as error:  # noqa: BLE001 - it is the tool's; SystemExit too ends a call only
            outcome = "", error
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(set_result, outcome)

    # No executor's: the interpreter would wait at its exit for a function that hangs.
    threading.Thread(target=work, name=f"tool {function.tool.name}", daemon=True).start()
    return future


async def _awaited(coroutine: Coroutine[Any, Any, Any]) -> _Outcome:
    try:
        return _as_text(await coroutine), None
    except (Exception, SystemExit) as error:  # noqa: BLE001 - it is the tool's
        return "", error


async def _outcome(started: asyncio.Future[_Outcome], timeout_s: float) -> _Outcome:
    """Wait for a call; one that takes too long is left alone."""
    try:
        done, _ = await asyncio.wait({started}, timeout=timeout_s)
    finally:
        started.cancel()  # nothing happens to one that is done
    if not done:
        return "", TimeoutError(f"it didn't finish within {timeout_s:g} s")
    return ("", _CallError("it was cancelled")) if started.cancelled() else started.result()


def _as_text(value: Any) -> str:
    """Return the text that the model gets: a text as it is, all else as JSON.

    Raises:
        TypeError: it has something that JSON hasn't.
        ValueError: likewise, or it isn't valid Unicode.
    """
    if not isinstance(value, str):
        dump = getattr(value, "model_dump_json", None)
        value = dump() if dump else json.dumps(value, ensure_ascii=False, default=_plain)
    value.encode()
    text: str = value
    return text


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, enum.Enum):
        return value.value
    raise TypeError(f"its result has a {type(value).__name__}, which JSON hasn't")


def _failed(call: ToolCall, error: BaseException) -> ToolResult:
    said = str(error).encode(errors="replace").decode()[:_MAX_ERROR_CHARS]
    ours = isinstance(error, (_CallError, TimeoutError)) and said
    text = said if ours else f"{type(error).__name__}: {said}".removesuffix(": ")
    return ToolResult(call, json.dumps({"error": text}, ensure_ascii=False), error)
