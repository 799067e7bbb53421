"""Messages that don't parse: the error names the field."""

from __future__ import annotations

import pytest
from grpc_health.v1 import health_pb2

from millstream.v1 import chat_pb2, generation_pb2, processor_pb2
from millstream_server.runtime.errors import MalformedMessageError
from millstream_server.runtime.rpc.served_call import tolerant

BAD = b"\xff\xfe\xfd\xfc"


def _chat(**start: object) -> bytes:
    message = processor_pb2.ChatRequest(start=processor_pb2.ChatStart(**start))  # type: ignore[arg-type]
    return message.SerializeToString()


def _message(*texts: str, name: str = "") -> chat_pb2.ChatMessage:
    return chat_pb2.ChatMessage(
        content=[chat_pb2.ContentPart(text=text) for text in texts], name=name
    )


CASES = {
    "start.model": _chat(model="bad!"),
    "start.messages[0].name": _chat(messages=[_message("a", name="bad!")]),
    "start.messages[2].content[1].text": _chat(
        messages=[_message("a"), _message("b", "c"), _message("d", "bad!")]
    ),
    "start.options.stop[1]": _chat(
        options=processor_pb2.GenerationOptions(stop=["good", "bad!", "bad!"])
    ),
    "start.messages[0].tool_calls[0].id": _chat(
        messages=[chat_pb2.ChatMessage(tool_calls=[chat_pb2.ToolCall(id="bad!")])]
    ),
}


@pytest.mark.parametrize("path", CASES)
def test_the_first_bad_text_is_named_by_its_path(path: str) -> None:
    data = CASES[path].replace(b"bad!", BAD)
    parsed = tolerant(processor_pb2.ChatRequest.FromString)(data)
    assert isinstance(parsed, MalformedMessageError)
    assert parsed.message == f"{path}: is not valid UTF-8"


def test_bytes_fields_may_hold_anything() -> None:
    start = generation_pb2.StartGeneration()
    start.ticket.signature = BAD
    parsed = tolerant(generation_pb2.StartGeneration.FromString)(start.SerializeToString())
    assert parsed == start


@pytest.mark.parametrize("data", [b"\x0a\xff\xff\xff", b"\x07", b"\x0a\x05abc"])
def test_what_is_no_message_at_all_names_the_type(data: bytes) -> None:
    parsed = tolerant(processor_pb2.ChatRequest.FromString)(data)
    assert isinstance(parsed, MalformedMessageError)
    assert "millstream.v1.ChatRequest" in parsed.message


def test_good_messages_and_unknown_fields_pass() -> None:
    good = CASES["start.model"]
    parsed = tolerant(processor_pb2.ChatRequest.FromString)(good + b"\xfa\x3f\x02\xff\xff")
    assert isinstance(parsed, processor_pb2.ChatRequest)
    assert parsed.start.model == "bad!"


def test_a_bad_text_among_unknown_fields_is_still_found() -> None:
    data = b"\xfa\x3f\x02\xff\xff" + CASES["start.model"].replace(b"bad!", BAD)
    parsed = tolerant(processor_pb2.ChatRequest.FromString)(data)
    assert isinstance(parsed, MalformedMessageError)
    assert parsed.message == "start.model: is not valid UTF-8"


def test_a_long_fault_is_not_searched_for() -> None:
    """The search walks every field, on the event loop; anybody may send megabytes."""
    parse = tolerant(health_pb2.HealthCheckRequest.FromString)
    padding = b"\x10\x01" * 40_000
    found = parse(padding + b"\x0a\x01\xff")
    assert isinstance(found, MalformedMessageError)
    assert "grpc.health.v1.HealthCheckRequest" in found.message
    short = parse(b"\x0a\x01\xff")
    assert short.message == "service: is not valid UTF-8"
