"""The messages of a turn: some are sent at once, the others are yielded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from millstream.v1 import processor_pb2
from millstream_server.processor.choice import Delta
from millstream_server.processor.turn_messages import TurnMessages


class Call:
    """Takes messages while it is open; keeps what it has sent."""

    caller_key = "ipv4:10.0.0.7"

    def __init__(self) -> None:
        self.open = True
        self.sent: list[processor_pb2.ChatResponse] = []

    def send_now(self, message: processor_pb2.ChatResponse) -> bool:
        if self.open:
            copy = processor_pb2.ChatResponse()
            copy.CopyFrom(message)
            self.sent.append(copy)
        return self.open

    def fail(self, error: Exception) -> None:
        raise AssertionError(error)


def test_what_is_added_to_a_yielded_message_is_not_in_later_ones() -> None:
    call, outlets = Call(), list[Any]()
    generation = SimpleNamespace(
        options=SimpleNamespace(n=1, return_token_ids=False),
        request=SimpleNamespace(logprobs=None, request_id="r", model="m"),
        complete=False,
        send_through=lambda outlet, *_: outlets.append(outlet),
    )
    made: Any = TurnMessages(generation, call, processor_pb2.ChatResponse)  # type: ignore[arg-type]
    (send,) = outlets
    deltas = [[Delta(index=0, text=text, token_ids=[1])] for text in "ABCD"]
    assert send(deltas[0])
    assert send(deltas[1])
    call.open = False
    assert not send(deltas[2])
    (message,) = made.of(deltas[2])
    message.draining.SetInParent()  # as the servicer does when the server begins to shut down
    call.open = True
    assert send(deltas[3])
    assert [each.choices[0].text for each in call.sent] == ["A", "B", "D"]
    assert [each.HasField("draining") for each in call.sent] == [False] * 3
    assert call.sent[0].HasField("started")
