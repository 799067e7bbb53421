"""Controls gather into messages in order, and none is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, cast

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from millstream.v1 import decode_pb2, generation_pb2
from millstream_server.generation.request import GenerationRequest, Prompt
from millstream_server.links import outbox as outbox_module
from millstream_server.links.outbox import BatchOutbox, Outbox, SingleOutbox
from tests.support.played_worker import REQUEST

BROKEN = replace(REQUEST, prompt=Prompt(cast("Any", ["x"])))


@cache
def _batch_type() -> Any:
    """Make a type of requests with `controls`, as the contract is to have it."""
    field = descriptor_pb2.FieldDescriptorProto
    one, many, message = field.LABEL_OPTIONAL, field.LABEL_REPEATED, field.TYPE_MESSAGE
    file = descriptor_pb2.FileDescriptorProto(
        name="test_outbox.proto",
        package="test_outbox",
        syntax="proto3",
        dependency=[generation_pb2.DESCRIPTOR.name],
        message_type=[
            descriptor_pb2.DescriptorProto(
                name="Control",
                field=[
                    field(name=name, number=number, label=one, type=message, type_name=of)
                    for name, number, of in (
                        ("start", 1, ".millstream.v1.StartGeneration"),
                        ("cancel", 2, ".millstream.v1.CancelGeneration"),
                    )
                ],
            ),
            descriptor_pb2.DescriptorProto(
                name="Request",
                field=[
                    field(
                        name="controls",
                        number=3,
                        label=many,
                        type=message,
                        type_name=".test_outbox.Control",
                    )
                ],
            ),
        ],
    )
    pool: Any = descriptor_pool.Default()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("test_outbox.Request"))


def _single() -> Outbox:
    return SingleOutbox(decode_pb2.DecodeRequest)


def _batch() -> Outbox:
    return BatchOutbox(_batch_type())


def _taken(outbox: Outbox) -> list[list[str]]:
    """Take everything: what each message asks for, in its order."""
    taken = []
    while (message := outbox.take()) is not None:
        controls: Sequence[Any] = getattr(message, "controls", None) or [message]
        taken.append(
            [
                f"start {control.start.slot}"
                if control.HasField("start")
                else f"cancel {control.cancel.slot}"
                for control in controls
            ]
        )
    return taken


def test_a_worker_of_an_older_version_gets_one_control_per_message() -> None:
    outbox = _single()
    outbox.start(0, REQUEST)
    outbox.cancel(0)
    outbox.start(1, REQUEST)
    assert _taken(outbox) == [["start 0"], ["cancel 0"], ["start 1"]]
    assert outbox.take() is None


def test_what_has_gathered_leaves_in_one_message_in_order() -> None:
    outbox = _batch()
    outbox.start(0, REQUEST)
    outbox.cancel(0)
    outbox.start(0, REQUEST)
    assert _taken(outbox) == [["start 0", "cancel 0", "start 0"]]
    outbox.cancel(0)
    assert _taken(outbox) == [["cancel 0"]]
    assert outbox.take() is None


def test_a_batch_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "_MAX_BATCH_TOKENS", 5)
    outbox = _batch()

    def start(slot: int, tokens: int) -> None:
        outbox.start(slot, replace(REQUEST, prompt=Prompt(range(tokens))))

    start(0, 3)
    start(1, 2)
    start(2, 1)
    outbox.cancel(0)
    start(3, 9)
    start(4, 1)
    taken = _taken(outbox)
    assert taken == [["start 0", "start 1"], ["start 2", "cancel 0"], ["start 3"], ["start 4"]]


@pytest.mark.parametrize("make", [_single, _batch])
def test_what_cannot_be_written_is_left_out(make: Any) -> None:
    outbox: Outbox = make()
    with pytest.raises(TypeError):
        outbox.start(0, BROKEN)
    assert outbox.take() is None
    outbox.start(0, REQUEST)
    with pytest.raises(TypeError):
        outbox.start(1, BROKEN)
    outbox.cancel(0)
    assert [control for message in _taken(outbox) for control in message] == [
        "start 0",
        "cancel 0",
    ]


@pytest.mark.parametrize("make", [_single, _batch])
def test_a_start_carries_the_request(make: Any) -> None:
    outbox: Outbox = make()
    request = GenerationRequest(
        request_id="r", prompt=Prompt([7, 8]), sampling=replace(REQUEST.sampling, top_k=3)
    )
    outbox.start(5, request)
    assert outbox.filled.is_set()
    message = outbox.take()
    (control,) = getattr(message, "controls", None) or [message]
    assert list(control.start.token_ids) == [7, 8]
    assert control.start.sampling.top_k == 3
    assert control.start.sampling.max_new_tokens == 4
