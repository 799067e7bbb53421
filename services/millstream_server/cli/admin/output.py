"""Prints results, failures with advice, and progress: for people, or as lines of JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TextIO

import grpc
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from millstream.v1 import engine_control_pb2
from millstream_client import MillstreamError
from millstream_client.errors import CONNECTION_LOST
from millstream_server.cli.admin.results import size
from millstream_server.cli.client import ELSEWHERE
from millstream_server.cli.flags import Destination, explain_tls

_ADVICE: Mapping[str, str] = {
    "OPERATION_CONFLICT": "`millstream admin status` shows what is set, and what runs",
    "ENGINE_BUSY": "give --drain, which waits until open requests have ended",
    "UNSUPPORTED_FEATURE": "`millstream admin status` lists what this engine can do",
    "ADAPTER_EXISTS": "to replace it, `unload-lora` it first",
    "ADAPTER_NOT_FOUND": "`millstream admin list-loras` shows which are loaded",
    "UNAUTHENTICATED": "is it the address of --admin-listen? A suite of `millstream up` takes the "
    "key of its run, which only the user who started it can read: call in the directory of `up`, "
    "or give --log-dir. Others may take a key, from MILLSTREAM_ADMIN_KEY, and over TLS a "
    "certificate (--tls-cert-file, --tls-key-file)",
    "PERMISSION_DENIED": "--admin-peers of the server names the certificates that may call",
    "WORKER_DRAINING": "the worker is shutting down; call the one that takes its place",
}
_OF_COMMANDS: Mapping[tuple[str, str], str] = {
    ("update-weights", "INVALID_WEIGHTS"): "the old weights serve on",
    ("load-lora", "INVALID_WEIGHTS"): "no adapter was loaded",
    ("pause", "UNSUPPORTED_FEATURE"): "give another --mode",
    ("load-lora", "UNSUPPORTED_FEATURE"): "SGLang takes adapters on a worker that was started with "
    "--max-loras-per-batch",
    ("drain", "DEADLINE_EXCEEDED"): "the worker stays out of service: `drain` again waits on, "
    "`undrain` puts it back",
    ("release-memory", "DEADLINE_EXCEEDED"): "nothing was released, and the worker is back in "
    "service: give it more --timeout-s, or send it less",
    ("update-weights", "DEADLINE_EXCEEDED"): "the old weights serve on: give it more --timeout-s",
    ("flush-cache", "DEADLINE_EXCEEDED"): "nothing was flushed: give it more --timeout-s",
}
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


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed call."""

    code: str
    reason: str
    message: str
    advice: str = ""

    @property
    def lines(self) -> list[str]:
        """What people read, the most important line first."""
        kind = f"{self.code} ({self.reason})" if self.reason else self.code
        first = f"error: {kind}: {self.message}" if kind else f"error: {self.message}"
        return [first, *([f"-> {self.advice}"] if self.advice else [])]

    def fields(self) -> dict[str, Any]:
        """What programs read."""
        return {name: value for name, value in asdict(self).items() if value}


def explain(error: MillstreamError, server: Destination, command: str) -> Failure:
    """Explain a failed call of a command."""
    if error.reason in ELSEWHERE and (found := _connection(error, server)):
        return Failure(error.code.name, error.reason, *found)
    message = error.message
    for violation in error.violations:
        if violation.field not in message:
            message += f"; {violation.field}: {violation.description}"
    if error.error_id:
        message += f"; the server's log has more under error id {error.error_id}"
    kind = error.reason or error.code.name
    advice = _OF_COMMANDS.get((command, kind)) or _ADVICE.get(kind, "")
    if error.retry_delay_s and not advice:
        advice = f"try again in {error.retry_delay_s:g} s"
    return Failure(error.code.name, error.reason, message, advice)


def _connection(error: MillstreamError, server: Destination) -> tuple[str, str] | None:
    """Explain a failure of the connection, or a server of another kind; then advise."""
    address, advice = server.address, ""
    if error.code is grpc.StatusCode.UNIMPLEMENTED:
        why = f"{address} doesn't have this operation"
        advice = "give the address of --admin-listen: the Processor has server-status and "
        advice += "set-log-level only, and other ports have none"
    elif tls := explain_tls(error.message, server):
        why = tls
    elif error.code is not grpc.StatusCode.UNAVAILABLE:
        return None
    elif error.reason == CONNECTION_LOST:
        why = f"the connection to {address} broke before the end"
        advice = "does the server still run? `millstream admin status` says what was done"
    else:
        why = f"{address} can't be reached: {' '.join(error.message.split())}"
        advice = "does the server run, with --admin-listen at this address? From another machine "
        advice += "the port is open with TLS only"
    return why, advice


class JsonOutput:
    """Lines of JSON on stdout."""

    def progress(self, label: str, progress: Progress) -> None:
        self._print(label, progress=_fields(progress))

    def result(self, label: str, response: Message, lines: Sequence[str]) -> None:
        self._print(label, ok=True, result=_fields(response))

    def failure(self, label: str, failure: Failure) -> None:
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
        self._print(label, lines, sys.stdout)

    def failure(self, label: str, failure: Failure) -> None:
        self._print(label, failure.lines, sys.stderr)

    def _print(self, label: str, lines: Sequence[str], file: TextIO) -> None:
        if self._shown:  # the line that changes
            sys.stderr.write(_CLEAR)
            sys.stderr.flush()
            self._shown = False
        first, *more = lines
        text = "\n".join([f"{label}: {first}", *(f"  {line}" for line in more)])
        print(text, file=file, flush=True)


Output = JsonOutput | TextOutput
"""Where what happens goes; calls of several servers run at the same time."""


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
