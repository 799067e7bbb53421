"""Explanations of failures; those with rich details are tested over a socket in test_cli.py."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from millstream_client import FieldViolation, InvalidRequestError
from millstream_client.errors import from_rpc_error
from millstream_server.cli.client import call_processor, explain
from millstream_server.cli.flags import Destination
from millstream_server.cli.main import parse


def failure(code: grpc.StatusCode, details: str, trailer: bytes | None = None) -> list[str]:
    metadata = grpc.aio.Metadata()
    if trailer is not None:
        metadata.add("grpc-status-details-bin", trailer)
    error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details, None)
    return explain(from_rpc_error(error), Destination("host:1"))


@pytest.mark.parametrize(
    ("code", "details", "expected"),
    [
        (
            grpc.StatusCode.UNAVAILABLE,
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:1.2.3.4:1: refused",
            "no server at host:1; start one with `millstream up`",
        ),
        (grpc.StatusCode.UNAVAILABLE, "Socket closed", "the connection to host:1 broke"),
        (grpc.StatusCode.UNAVAILABLE, "DNS resolution failed for host:1", "can't be found"),
        (grpc.StatusCode.UNIMPLEMENTED, "Method not found!", "has no ProcessorService"),
    ],
)
def test_transport_failures_are_hints(code: grpc.StatusCode, details: str, expected: str) -> None:
    (line,) = failure(code, details)
    assert expected in line


def test_a_status_without_details_shows_code_and_message() -> None:
    assert failure(grpc.StatusCode.UNAVAILABLE, "in a while") == ["error: UNAVAILABLE: in a while"]


def test_details_that_contradict_the_status_are_ignored() -> None:
    trailer = status_pb2.Status(code=5, message="other").SerializeToString()
    lines = failure(grpc.StatusCode.INTERNAL, "oops", trailer)
    assert lines == ["error: INTERNAL: oops"]


def test_what_is_no_address_is_said_without_a_call(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def use(*_: object) -> int:
        raise AssertionError("nobody to talk to")

    assert call_processor(parse(["models", "--address", "processor"]), use) == 1
    assert (
        capsys.readouterr().err
        == "error: 'processor' is not HOST:PORT (an IPv6 HOST stands in brackets)\n"
    )


def test_a_single_violation_is_not_said_twice() -> None:
    status = status_pb2.Status(code=3, message="start.n: must be 1 to 16")
    violation = error_details_pb2.BadRequest.FieldViolation(
        field="start.n", description="must be 1 to 16"
    )
    status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    lines = failure(grpc.StatusCode.INVALID_ARGUMENT, status.message, status.SerializeToString())
    assert lines == ["error: INVALID_ARGUMENT: start.n: must be 1 to 16"]


@pytest.mark.parametrize(
    ("address", "words", "field", "says", "shown"),
    [
        ("", ["chat", "hi"], "start.model", "name one of a, b", "--model: name one of a, b"),
        (
            "",
            ["image", "a cat"],
            "model",
            "no model here makes images",
            "--model: no model here makes images; `make up ARGS=--all` starts one",
        ),
        (
            "shop.example:50051",
            ["embed", "a"],
            "model",
            "no model here embeds texts",
            "--model: no model here embeds texts",
        ),
        (
            "",
            ["image", "a cat"],
            "options.guidance_scale",
            "must be 0 or more",
            "--guidance: must be 0 or more",
        ),
        (
            "",
            ["chat", "hi"],
            "start.messages[0].content[0].image.data",
            "is no image",
            "--image: is no image",
        ),
        ("", ["embed", "a"], "inputs[3].text", "is empty", "TEXT: is empty"),
        (
            "",
            ["chat", "hi"],
            "start.messages",
            "has no chat template; use Complete with a prompt",
            "start.messages: has no chat template; use `millstream complete` with a prompt",
        ),
    ],
)
def test_fields_are_told_as_what_was_typed(
    address: str, words: list[str], field: str, says: str, shown: str
) -> None:
    error = InvalidRequestError(f"{field}: {says}", violations=[FieldViolation(field, says)])
    lines = explain(error, Destination(address or "127.0.0.1:50051"), parse(words))
    assert lines == [f"error: INVALID_ARGUMENT: {shown}"]
