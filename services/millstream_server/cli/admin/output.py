"""Prints results, errors and progress: for people, or as lines of JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any, Protocol

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from millstream.v1 import engine_control_pb2
from millstream_server.cli.admin.failures import Failure
from millstream_server.cli.admin.results import size

_BAR = 20
_PLAIN_STEP_PERCENT = 10
_PLAIN_STEP_S = 2.0
_CLEAR = "\r\x1b[K"
_DOING = {
    engine_control_pb2.OPERATION_STAGE_CHECKING: "checking",
    engine_control_pb2.OPERATION_STAGE_DRAINING: "draining",
    engine_control_pb2.OPERATION_STAGE_APPLYING: "applying",
    engine_control_pb2.OPERATION_STAGE_DONE: "done",
}
Progress = engine_control_pb2.OperationProgress


class Output(Protocol):
    """Where what happens goes; calls of several servers run at the same time."""

    def progress(self, label: str, progress: Progress) -> None:
        """Print how far a server is."""
        ...

    def result(self, label: str, response: Message, lines: Sequence[str]) -> None:
        """Print what a server did."""
        ...

    def failure(self, label: str, failure: Failure) -> None:
        """Print why a server didn't."""
        ...


class JsonOutput:
    """Lines of JSON on stdout."""

    def progress(self, label: str, progress: Progress) -> None:
        """See `Output.progress`."""
        self._print(label, progress=_fields(progress))

    def result(self, label: str, response: Message, lines: Sequence[str]) -> None:
        """See `Output.result`."""
        self._print(label, ok=True, result=_fields(response))

    def failure(self, label: str, failure: Failure) -> None:
        """See `Output.failure`."""
        self._print(label, ok=False, error=failure.fields())

    def _print(self, label: str, **fields: Any) -> None:
        print(json.dumps({"server": label, **fields}), flush=True)


class TextOutput:
    """Results on stdout; errors and progress on stderr, on a terminal in a line that changes."""

    def __init__(self, *, several: bool) -> None:
        """``several`` servers share the terminal: their progress is a line each time."""
        self._live = sys.stderr.isatty() and not several
        self._said: dict[str, tuple[object, float]] = {}
        self._shown = False

    def progress(self, label: str, progress: Progress) -> None:
        """See `Output.progress`."""
        if progress.stage == engine_control_pb2.OPERATION_STAGE_DONE:
            return  # the result follows
        line = f"{label}: {progress_line(progress)}"
        if self._live:
            sys.stderr.write(_CLEAR + line)
            sys.stderr.flush()
            self._shown = True
            return
        step = (progress.stage, _percent(progress) // _PLAIN_STEP_PERCENT)
        before, said_s = self._said.get(label, (None, 0.0))
        if step != before or time.monotonic() - said_s > _PLAIN_STEP_S:
            self._said[label] = step, time.monotonic()
            print(line, file=sys.stderr, flush=True)

    def result(self, label: str, response: Message, lines: Sequence[str]) -> None:
        """See `Output.result`."""
        self._clear()
        first, *more = lines
        print("\n".join([f"{label}: {first}", *(f"  {line}" for line in more)]), flush=True)

    def failure(self, label: str, failure: Failure) -> None:
        """See `Output.failure`."""
        self._clear()
        first, *more = failure.lines
        text = "\n".join([f"{label}: {first}", *(f"  {line}" for line in more)])
        print(text, file=sys.stderr, flush=True)

    def _clear(self) -> None:
        if self._shown:
            sys.stderr.write(_CLEAR)
            sys.stderr.flush()
            self._shown = False


def progress_line(progress: Progress) -> str:
    """Return how far an operation is."""
    parts = [_DOING.get(progress.stage, "running")]
    if progress.bytes_total:
        percent = _percent(progress)
        full = percent * _BAR // 100
        parts.append(f"[{'#' * full}{'-' * (_BAR - full)}] {percent} %")
        parts.append(f"of {size(progress.bytes_total)}")
    elif progress.bytes_done:
        parts.append(size(progress.bytes_done))
    if progress.stage == engine_control_pb2.OPERATION_STAGE_DRAINING:
        several = "" if progress.open_requests == 1 else "s"
        parts.append(f"{progress.open_requests} request{several} open")
    return f"{' '.join(parts)} ({progress.elapsed.ToMicroseconds() / 1e6:.1f} s)"


def _percent(progress: Progress) -> int:
    if not progress.bytes_total:
        return 0
    return min(100, progress.bytes_done * 100 // progress.bytes_total)


def _fields(message: Message) -> dict[str, Any]:
    return MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
