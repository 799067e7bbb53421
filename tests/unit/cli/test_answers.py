from __future__ import annotations

import io
import sys

import pytest

from millstream.v1 import generation_pb2, processor_pb2, usage_pb2
from millstream_client import Answer
from millstream_server.cli import answers
from millstream_server.cli.answers import Stopwatch, write_text


class _Clock:
    def __init__(self, *times: float) -> None:
        self._times = list(times)

    def monotonic(self) -> float:
        return self._times.pop(0)


def _delta(text: str, tokens: int, reason: int = 0) -> processor_pb2.ChoiceDelta:
    return processor_pb2.ChoiceDelta(
        text=text,
        token_count=tokens,
        finish_reason=generation_pb2.FinishReason.Name(reason),  # type: ignore[arg-type]
    )


def _stats(watch: Stopwatch, *deltas: processor_pb2.ChoiceDelta, completion: int) -> str:
    answer = Answer()
    for delta in deltas:
        watch.add(delta)
        answer.add(processor_pb2.ChatResponse(choices=[delta]))
    usage = usage_pb2.GenerationUsage(
        prompt_tokens=8, completion_tokens=completion, cached_tokens=6
    )
    answer.add(processor_pb2.ChatResponse(finished=processor_pb2.TurnFinished(usage=usage)))
    return watch.stats(answer)


def test_speed_counts_tokens_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "time", _Clock(10.5, 12.5))
    stats = _stats(Stopwatch(sent_s=10.0), _delta("a", 1), _delta("b", 4), completion=5)
    assert stats == "TTFT 0.500 s · 5 tokens · 2 tokens/s · 6 of 8 prompt tokens cached"


def test_a_burst_has_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "time", _Clock(10.5, 10.5001))
    stats = _stats(Stopwatch(sent_s=10.0), _delta("a", 1), _delta("b", 19), completion=20)
    assert "tokens/s" not in stats


def test_one_token_has_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "time", _Clock(10.25))
    only = _delta("a", 1, generation_pb2.FINISH_REASON_CANCELLED)
    stats = _stats(Stopwatch(sent_s=10.0), only, completion=1)
    assert stats == "TTFT 0.250 s · 1 token · 6 of 8 prompt tokens cached · stopped"


def test_an_empty_answer_has_no_ttft() -> None:
    assert _stats(Stopwatch(), completion=0) == "0 tokens · 6 of 8 prompt tokens cached"


@pytest.mark.parametrize(
    ("version", "shown"),
    [("step-200", " · weights step-200"), ("default", ""), ("", "")],
)
def test_replaced_weights_are_named(version: str, shown: str) -> None:
    answer = Answer()
    finished = processor_pb2.TurnFinished(weight_version=version)
    answer.add(processor_pb2.ChatResponse(finished=finished))
    assert Stopwatch().stats(answer) == f"0 tokens · 0 of 0 prompt tokens cached{shown}"


def test_other_choices_are_left_out() -> None:
    watch = Stopwatch()
    choices = [processor_pb2.ChoiceDelta(index=i, text=str(i), token_count=1) for i in range(2)]
    assert [watch.add(choice) for choice in choices] == ["0", ""]


class _FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_no_steering_controls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", screen := _FakeTerminal())
    write_text("a\x1b[2Jb\tc\n\x07é 漢 👍")
    assert screen.getvalue() == "a[2Jb\tc\né 漢 👍"


def test_a_pipe_gets_every_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", pipe := io.StringIO())
    write_text("a\x1b[2J")
    assert pipe.getvalue() == "a\x1b[2J"
