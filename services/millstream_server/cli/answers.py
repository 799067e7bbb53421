"""An answer as it streams in: its text on the screen, and the numbers shown under it."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import TextIO

from millstream.v1 import generation_pb2
from millstream_client import Answer, AnswerStream, ChoiceDelta

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_KEPT_CONTROLS = "\n\t"
_SHORTEST_SPAN_S = 0.005


@dataclass
class Stopwatch:
    """When the parts of one answer came. Made when the request is sent: times count from there."""

    sent_s: float = field(default_factory=time.monotonic)
    first_s: float | None = None
    first_tokens: int = 0
    """How many tokens came with the first text: they took no time that we could measure."""
    last_s: float = 0.0

    def add(self, delta: ChoiceDelta) -> str:
        """Note what came now; answers the new text, if it is choice 0's."""
        if delta.index != 0:
            return ""
        if delta.text or delta.token_count:
            self.last_s = time.monotonic()
            if self.first_s is None:
                self.first_s, self.first_tokens = self.last_s, delta.token_count
        return delta.text

    def stats(self, answer: Answer) -> str:
        """Give the line under an answer: TTFT, tokens, tokens/s, cached tokens, how it ended."""
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
        if ending := _ENDINGS.get(answer.finish_reason):
            parts.append(ending)
        return " · ".join(parts)

    def _tokens_per_s(self, all_tokens: int) -> float | None:
        """Give the speed after the first message; None when all came at once."""
        tokens = all_tokens - self.first_tokens
        if self.first_s is None or tokens < 1 or self.last_s - self.first_s < _SHORTEST_SPAN_S:
            return None
        return tokens / (self.last_s - self.first_s)


_ENDINGS: dict[int, str] = {
    generation_pb2.FINISH_REASON_LENGTH: "cut off at the token limit",
    generation_pb2.FINISH_REASON_CANCELLED: "stopped",
    generation_pb2.FINISH_REASON_CONTENT_FILTER: "withheld by a content filter",
    generation_pb2.FINISH_REASON_TOOL_CALLS: "wants to call tools",
}


def write_text(text: str) -> None:
    """Write model output at once; towards a terminal, without the controls that steer it."""
    if sys.stdout.isatty():
        text = "".join(c for c in text if c.isprintable() or c in _KEPT_CONTROLS)
    sys.stdout.write(text)
    sys.stdout.flush()


def write_stats(stats: str, *, always: bool) -> None:
    """Write the numbers to stderr, if someone looks or ``always``."""
    if always or sys.stderr.isatty():
        print(dim(stats, sys.stderr), file=sys.stderr)


async def show(stream: AnswerStream, *, always_stats: bool) -> None:
    """Write an answer as it comes, and its numbers under it."""
    watch = Stopwatch()
    try:
        async for delta in stream:
            write_text(watch.add(delta))
    finally:
        if stream.result.text:
            write_text("\n")
    write_stats(watch.stats(stream.result), always=always_stats)


def dim(text: str, stream: TextIO) -> str:
    """Make text faint where that shows."""
    return f"{_DIM}{text}{_PLAIN}" if stream.isatty() else text
