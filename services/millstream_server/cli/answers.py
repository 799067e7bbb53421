"""An answer as it streams in: its text, and the numbers shown under it."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import TextIO

from millstream.v1 import generation_pb2, processor_pb2, usage_pb2

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"
_KEPT_CONTROLS = "\n\t"
_SHORTEST_SPAN_S = 0.005


@dataclass
class Answer:
    """What one turn brought so far. Made when the request is sent: times count from there."""

    sent_s: float = field(default_factory=time.monotonic)
    first_s: float | None = None
    first_tokens: int = 0
    """How many tokens came with the first text: they took no time that we could measure."""
    last_s: float = 0.0
    text: str = ""
    finish_reason: int = generation_pb2.FINISH_REASON_UNSPECIFIED
    usage: usage_pb2.Usage = field(default_factory=usage_pb2.Usage)

    def add(self, message: processor_pb2.ChatResponse | processor_pb2.CompleteResponse) -> str:
        """Take in one message of the stream; answers the new text of choice 0."""
        new = ""
        for choice in message.choices:
            if choice.index != 0:
                continue
            if choice.text or choice.token_count:
                self.last_s = time.monotonic()
                if self.first_s is None:
                    self.first_s, self.first_tokens = self.last_s, choice.token_count
            new += choice.text
            self.finish_reason = choice.finish_reason or self.finish_reason
        if message.HasField("finished"):
            self.usage.CopyFrom(message.finished.usage)
        self.text += new
        return new

    def stats(self) -> str:
        """Give the line under an answer: TTFT, tokens, tokens/s, cached tokens, how it ended."""
        parts = []
        if self.first_s is not None:
            parts.append(f"TTFT {self.first_s - self.sent_s:.3f} s")
        tokens = self.usage.completion_tokens
        parts.append(f"{tokens} token{'' if tokens == 1 else 's'}")
        if (rate := self._tokens_per_s()) is not None:
            parts.append(f"{rate:.0f} tokens/s")
        parts.append(
            f"{self.usage.cached_tokens} of {self.usage.prompt_tokens} prompt tokens cached"
        )
        if ending := _ENDINGS.get(self.finish_reason):
            parts.append(ending)
        return " · ".join(parts)

    def _tokens_per_s(self) -> float | None:
        """Give the speed after the first message; None when all came at once."""
        tokens = self.usage.completion_tokens - self.first_tokens
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


def write_stats(answer: Answer, *, always: bool) -> None:
    """Write the numbers to stderr, if someone looks or ``always``."""
    if always or sys.stderr.isatty():
        print(dim(answer.stats(), sys.stderr), file=sys.stderr)


def dim(text: str, stream: TextIO) -> str:
    """Make text faint where that shows."""
    return f"{_DIM}{text}{_PLAIN}" if stream.isatty() else text
