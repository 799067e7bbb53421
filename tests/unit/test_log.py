"""One line per event, whose fields are fields, with the trace it belongs to."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from opentelemetry import trace

from millstream_server.runtime.telemetry import log

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = trace.NonRecordingSpan(
    trace.SpanContext(int(TRACE_ID, 16), 1, is_remote=True, trace_flags=trace.TraceFlags(1))
)
FORGED = "2026-11-20 10:00:00,000 INFO millstream_server.x: forged"
events = log.get_log("millstream_server.test")


@pytest.fixture(autouse=True)
def _root_logger() -> Iterator[None]:
    """The root logger is given back as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


class Written:
    """What a configured process has written to stderr."""

    def __init__(
        self, line_format: Literal["text", "json"], capfd: pytest.CaptureFixture[str]
    ) -> None:
        log.configure("info", line_format)
        self._capfd = capfd

    def lines(self) -> list[str]:
        return self._capfd.readouterr().err.splitlines()

    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines()]


@pytest.fixture
def text(capfd: pytest.CaptureFixture[str]) -> Written:
    return Written("text", capfd)


@pytest.fixture
def as_json(capfd: pytest.CaptureFixture[str]) -> Written:
    return Written("json", capfd)


def _fail(message: str) -> None:
    try:
        raise ValueError(message)  # noqa: TRY301
    except ValueError as error:
        events.error("it failed", error=error)


# ---- text


def test_a_line_has_time_level_logger_event_and_fields(text: Written) -> None:
    before = time.time()
    events.info("worker connected", worker="127.0.0.1:1", slots=3, share=0.5, ready=True)
    (line,) = text.lines()
    at, rest = line[:23], line[23:]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}", at)
    written = time.mktime(time.strptime(at[:19], "%Y-%m-%d %H:%M:%S"))
    assert before - 1 <= written <= time.time()
    assert rest == (
        " INFO millstream_server.test: worker connected "
        "worker=127.0.0.1:1 slots=3 share=0.5 ready=true"
    )


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("plain", "plain"),
        ("ünïcode", "ünïcode"),
        ("two words", '"two words"'),
        ("a=b", '"a=b"'),
        ('say "hi"', r'"say \"hi\""'),
        ("", '""'),
        (None, "None"),
        ("\ud800", r"\ud800"),
        ("\x1b[2J", r"\x1b[2J"),
        ("x" * 5000, f'"{"x" * 4096}… (904 more)"'),
    ],
)
def test_a_value_is_quoted_when_it_needs_it(text: Written, value: object, written: str) -> None:
    events.info("seen", value=value)
    (line,) = text.lines()
    assert line.endswith(f": seen value={written}")


@pytest.mark.parametrize(
    "value",
    [
        "req outcome=STOP",
        'req" outcome=STOP x="',
        'req" outcome=STOP x="\\',
        "req\toutcome=STOP",
        "req\noutcome=STOP",
        "req\u2028outcome=STOP",
        "req\u00a0outcome=STOP",
        "req\u3000outcome=STOP",
        "req\x1b[31m outcome=STOP",
        "outcome=STOP outcome=STOP",
    ],
)
def test_a_value_forges_no_field_for_any_reader_of_lines(text: Written, value: str) -> None:
    events.info("turn ended", request=value, outcome="ABANDONED")
    (line,) = text.lines()
    assert re.findall(r"\boutcome=(\S+)", line) == ["ABANDONED"]
    fields = line.partition(": turn ended ")[2].split(" outcome=ABANDONED")[0]
    written = re.sub(r"\\x([0-9a-f]{2})", r"\\u00\1", fields.partition("=")[2])
    assert json.loads(written) == value


@pytest.mark.parametrize("value", ["a\u2800outcome\uff1dSTOP", "a\u3164b", "a\uff1db", "a\uff02b"])
def test_a_value_that_only_looks_like_a_field_is_quoted(text: Written, value: str) -> None:
    events.info("seen", value=value)
    assert text.lines()[0].endswith(f': seen value="{value}"')


@pytest.mark.parametrize("breaks", ["\n", "\r", "\r\n", "\x0b", "\x1c", "\x85", "\u2028"])
def test_what_a_client_sends_cannot_begin_a_line(text: Written, breaks: str) -> None:
    events.info("seen", value=f"a{breaks}{FORGED}")
    logging.getLogger("a.library").warning("took %s", f"a{breaks}{FORGED}")
    lines = text.lines()
    assert len(lines) == 2
    assert all(FORGED in line and not line.startswith(FORGED) for line in lines)


def test_a_traceback_follows_indented(text: Written) -> None:
    _fail(f"no such token\n{FORGED}")
    first, *rest = text.lines()
    assert " ERROR millstream_server.test: it failed" in first
    assert rest[0] == "  Traceback (most recent call last):"
    assert rest[-2:] == ["  ValueError: no such token", f"  {FORGED}"]
    assert all(line.startswith("  ") for line in rest)


def test_a_line_names_the_current_trace(text: Written) -> None:
    with trace.use_span(SPAN):
        events.info("seen")
        events.info("seen", trace_id="its own")
    first, second = text.lines()
    assert first.endswith(f": seen trace_id={TRACE_ID}")
    assert second.endswith(': seen trace_id="its own"')


def test_a_phase_is_a_field(text: Written) -> None:
    events.phase("loading the model")
    (line,) = text.lines()
    assert line.endswith('millstream_server.test: phase phase="loading the model"')


def test_the_level_counts(text: Written) -> None:
    events.debug("unseen")
    events.info("seen")
    assert len(text.lines()) == 1


# ---- JSON


def test_fields_are_keys_of_the_object(as_json: Written) -> None:
    events.info("worker connected", worker="a\nb", slots=3, share=0.5, ready=True, path=object)
    (line,) = as_json.objects()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert line == {
        "level": "INFO",
        "logger": "millstream_server.test",
        "message": "worker connected",
        "worker": "a\nb",
        "slots": 3,
        "share": 0.5,
        "ready": True,
        "path": "<class 'object'>",
    }


def test_keys_of_every_line_are_not_overwritten(as_json: Written) -> None:
    events.info("seen", time="t", level="l", logger="g", message="m", exception="e")
    (line,) = as_json.objects()
    assert (line["level"], line["logger"], line["message"]) == (
        "INFO",
        "millstream_server.test",
        "seen",
    )
    assert [line[f"{name}_"] for name in ("time", "level", "logger", "message", "exception")] == [
        *"tlgme"
    ]


def test_a_failure_is_one_line(as_json: Written) -> None:
    with trace.use_span(SPAN):
        _fail(f"no such token\n{FORGED}")
    (line,) = as_json.objects()
    assert line["message"] == "it failed"
    assert line["trace_id"] == TRACE_ID
    assert line["exception"].endswith(f"ValueError: no such token\n{FORGED}")


# ---- how much


def _repeats() -> Any:
    (found,) = [h.repeats for h in logging.getLogger().handlers if hasattr(h, "repeats")]
    return found


def test_warnings_that_repeat_are_dropped_and_counted(
    as_json: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(_repeats(), "_clock", lambda: now)
    for number in range(100):
        events.warning("refused", number=number)
        events.info("served")
        events.caused("ended", number=number)
    events.warning("another")
    lines = as_json.objects()
    for event in ("refused", "ended"):
        written = [line for line in lines if line["message"] == event]
        assert [line["number"] for line in written] == list(range(30))
        assert written[-1]["repeats"] == "dropped for a minute"
        assert not any("repeats" in line for line in written[:-1])
    assert sum(line["message"] == "served" for line in lines) == 100
    assert lines[-1]["message"] == "another"

    now += 61
    events.info("served")
    events.warning("refused", number=0)
    first, second, *rest = as_json.objects()
    for line, event in ((first, "refused"), (second, "ended")):
        assert (line["message"], line["event"], line["dropped"]) == (
            "lines were dropped",
            event,
            70,
        )
    assert [line["message"] for line in rest] == ["served", "refused"]


def test_no_action_of_an_operator_is_dropped(as_json: Written) -> None:
    for number in range(100):
        events.action("operator action", number=number)
    lines = as_json.objects()
    assert [(line["level"], line["number"]) for line in lines] == [
        ("WARNING", number) for number in range(100)
    ]


def test_text_of_a_caller_makes_no_new_cause(text: Written) -> None:
    for number in range(5000):
        logging.getLogger("a.library").warning(f"client {number}")  # noqa: G004
    assert len(text.lines()) == 30


def test_more_causes_than_are_remembered_are_one(
    text: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(_repeats(), "_clock", lambda: now)
    for number in range(5000):
        events.warning(f"event {number}")
    assert len(text.lines()) == 1000 + 30
    now += 61
    for number in range(500):
        events.warning(f"event {number}")
    dropped, *rest = text.lines()
    assert 'event="other causes" dropped=3970' in dropped
    assert len(rest) == 500


def _raise(depth: int) -> None:
    if depth:
        _raise_too(depth - 1)
    raise ValueError("x" * 10_000)


def _raise_too(depth: int) -> None:
    _raise(depth)


def test_tracebacks_are_bounded_in_lines(text: Written) -> None:
    """Those of one place are written once a minute; long ones are cut in the middle."""
    for _ in range(40):
        try:
            _raise(200)
        except ValueError as error:
            events.error("it failed", error=error)
    lines = text.lines()
    assert len(lines) == 30 + 151
    assert all(len(line) < 700 for line in lines)
    assert sum(" ERROR " in line for line in lines) == 30
    assert " error=" not in lines[0]
    assert lines[151].startswith("  ValueError: xxx")
    assert ' error="ValueError: xxx' in lines[-1]
    for _ in range(3):
        try:
            int("another failure")
        except ValueError as error:
            logging.getLogger("a.library").exception("took %s", "long", exc_info=error)
    first, second, third = (line for line in text.lines() if not line.startswith("  "))
    assert "error=" not in first
    assert all("error=" in line for line in (second, third))


# ---- libraries


KEY = "Bearer a-key-of-a-caller"


def _library_lines() -> None:
    """Write as hpack does: its lines hold every header."""
    for name in ("hpack.hpack", "hpack.table", "some.library"):
        logging.getLogger(name).debug("Decoded %s", KEY)
        logging.getLogger(name).info("Decoded %s", KEY)


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_no_level_shows_what_libraries_say_of_callers(
    level: str, capfd: pytest.CaptureFixture[str]
) -> None:
    log.configure(level)
    _library_lines()
    events.error("ours")
    logging.getLogger("some.library").error("it failed")
    said = capfd.readouterr().err
    assert "ours" in said
    assert "it failed" in said
    assert KEY not in said


@pytest.mark.parametrize("named", ["hpack", "hpack.hpack"])
def test_a_library_that_is_named_is_shown(named: str, capfd: pytest.CaptureFixture[str]) -> None:
    log.configure("info")
    logging.getLogger(named).setLevel(logging.DEBUG)
    try:
        _library_lines()
    finally:
        logging.getLogger(named).setLevel(logging.NOTSET)
    assert "hpack.hpack: Decoded Bearer" in capfd.readouterr().err
