"""Prints on a terminal: an answer while it streams, its times and token counts; tables."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import TextIO

from rich.console import Console

from millstream.v1 import generation_pb2
from millstream_client import (
    Answer,
    AnswerStream,
    CallEnded,
    ChoiceDelta,
    GenerationUsage,
    ReasoningPiece,
    TextPiece,
    ToolResult,
    ToolRun,
)
from millstream_client.events import EventReader
from millstream_client.tool_run import RunEvent

_UNSEEN_WIDTH = 160
_LINE = 200
"""Most characters of a line about a call."""
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_KEPT_CONTROLS = "\n\t"
_SHORTEST_SPAN_S = 0.005
_NEVER_REPLACED = ("", "default")
"""Versions of weights that no operator has replaced; "default" is SGLang's word."""
_ENDINGS: dict[int, str] = {
    generation_pb2.FINISH_REASON_LENGTH: "cut off at the token limit",
    generation_pb2.FINISH_REASON_CANCELLED: "stopped",
    generation_pb2.FINISH_REASON_CONTENT_FILTER: "withheld by a content filter",
    generation_pb2.FINISH_REASON_TOOL_CALLS: "wants to call tools",
}


def open_console() -> Console:
    """Make a console on stdout; for a file or a pipe without line breaks inside paths."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_UNSEEN_WIDTH)


@dataclass
class Stopwatch:
    """Measures one answer's times, from its construction, when the request is sent."""

    sent_s: float = field(default_factory=time.monotonic)
    first_s: float | None = None
    first_tokens: int = 0
    """Number of tokens in the first message: not part of the measured speed."""
    last_s: float = 0.0

    def add(self, delta: ChoiceDelta) -> str:
        """Record a delta; return its text if it is choice 0's."""
        if delta.index != 0:
            return ""
        if delta.text or delta.token_count:
            self.see(delta.token_count)
        return delta.text

    def see(self, tokens: int) -> None:
        """Record that some tokens came now."""
        self.last_s = time.monotonic()
        if self.first_s is None:
            self.first_s, self.first_tokens = self.last_s, tokens

    def stats(self, answer: Answer) -> str:
        """Return the line after an answer: TTFT, tokens, tokens/s, prompt, weights, its end."""
        parts = []
        if self.first_s is not None:
            parts.append(f"TTFT {self.first_s - self.sent_s:.3f} s")
        tokens = answer.usage.completion_tokens
        parts.append(f"{tokens} token{'' if tokens == 1 else 's'}")
        if (rate := self._tokens_per_s(tokens)) is not None:
            parts.append(f"{rate:.0f} tokens/s")
        parts.append(
            f"{answer.usage.cached_tokens} of {answer.usage.prompt_tokens} prompt tokens cached"
        )
        if answer.usage.media_tokens:
            parts.append(f"{answer.usage.media_tokens} for images and videos")
        if answer.weight_version not in _NEVER_REPLACED:
            parts.append(f"weights {answer.weight_version}")
        if ending := _ENDINGS.get(answer.finish_reason):
            parts.append(ending)
        return " · ".join(parts)

    def _tokens_per_s(self, all_tokens: int) -> float | None:
        """Return the tokens per second after the first message; None if there was only one."""
        tokens = all_tokens - self.first_tokens
        if self.first_s is None or tokens < 1 or self.last_s - self.first_s < _SHORTEST_SPAN_S:
            return None
        return tokens / (self.last_s - self.first_s)


def add_usage(total: GenerationUsage, more: GenerationUsage) -> None:
    """Add one answer's token counts to a conversation's."""
    for field_ in GenerationUsage.DESCRIPTOR.fields:
        setattr(total, field_.name, getattr(total, field_.name) + getattr(more, field_.name))


def usage_line(usage: GenerationUsage) -> str:
    """Return a conversation's token counts in words."""
    media = f", {usage.media_tokens} for images and videos" if usage.media_tokens else ""
    return (
        f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached{media}), "
        f"{usage.completion_tokens} answer tokens"
    )


def write_text(text: str) -> None:
    """Write and flush model output; on a terminal without control characters."""
    sys.stdout.write(printable(text, sys.stdout))
    sys.stdout.flush()


def printable(text: str, stream: TextIO) -> str:
    """Leave control characters out of text for a terminal."""
    if not stream.isatty():
        return text
    return "".join(c for c in text if c.isprintable() or c in _KEPT_CONTROLS)


def write_stats(stats: str, *, always: bool) -> None:
    """Write the numbers to stderr if it is a terminal, or ``always``."""
    if always or sys.stderr.isatty():
        print(dim(stats, sys.stderr), file=sys.stderr)


class Screen:
    """Shows an answer: its text on stdout; calls, and reasoning if wanted, on stderr, as lines."""

    def __init__(self, *, reasoning: bool = False) -> None:
        self._reasoning = reasoning
        self._open: TextIO | None = None
        """Where the last line isn't ended."""

    async def show(self, source: AnswerStream | ToolRun, watch: Stopwatch) -> None:
        """Write what comes; the last line is ended, also after a failure."""
        try:
            async for event in _timed(source, watch):
                self._event(event)
        finally:
            self._end_line()

    def _event(self, event: RunEvent) -> None:
        match event:
            case TextPiece(text, 0):
                self._piece(sys.stdout, text)
            case ReasoningPiece(text, 0) if self._reasoning:
                self._piece(sys.stderr, text)
            case CallEnded(call, 0):
                self._line(f"→ {call.name} {call.arguments_json}")
            case ToolResult(content=content):
                self._line(f"← {content}")

    def _piece(self, stream: TextIO, text: str) -> None:
        if not text:
            return
        if self._open is not stream:
            self._end_line()
        if stream is sys.stdout:
            write_text(text)
        else:
            print(dim(printable(text, stream), stream), end="", file=stream, flush=True)
        self._open = stream

    def _line(self, text: str) -> None:
        self._end_line()
        first = text.replace("\n", " ")
        cut = first if len(first) <= _LINE else first[: _LINE - 1] + "…"
        print(dim(printable(cut, sys.stderr), sys.stderr), file=sys.stderr)

    def _end_line(self) -> None:
        if self._open is not None:
            print(file=self._open, flush=True)
            self._open = None


async def _timed(
    source: AnswerStream | ToolRun, watch: Stopwatch
) -> AsyncGenerator[RunEvent, None]:
    if isinstance(source, ToolRun):
        async for event in source:
            watch.see(1)
            yield event
        return
    reader = EventReader(source.result)
    async for delta in source:
        watch.add(delta)
        for event in reader.read(delta):
            yield event


async def show(source: AnswerStream | ToolRun, screen: Screen, *, always_stats: bool) -> None:
    """Write an answer while it streams, and its numbers after it."""
    watch = Stopwatch()
    await screen.show(source, watch)
    write_stats(watch.stats(answers(source)[-1]), always=always_stats)


def answers(source: AnswerStream | ToolRun) -> list[Answer]:
    """Return the answers that were shown."""
    return source.answers if isinstance(source, ToolRun) else [source.result]


def dim(text: str, stream: TextIO) -> str:
    """Make text faint on a terminal."""
    return f"{_DIM}{text}{_PLAIN}" if stream.isatty() else text
