"""How failures look to callers; those over a socket are in tests/contract."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

import millstream_client as client
from millstream_client.errors import from_rpc_error
from millstream_server.runtime import errors as server_errors
from millstream_server.runtime.rpc.status import GRPC_CODES, to_status


def _rpc_error(
    code: grpc.StatusCode, message: str, status: status_pb2.Status | None = None
) -> grpc.aio.AioRpcError:
    trailer = grpc.aio.Metadata()
    if status is not None:
        trailer.add("grpc-status-details-bin", status.SerializeToString())
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailer, message, None)


def _of(error: server_errors.ServingError) -> client.MillstreamError:
    return from_rpc_error(_rpc_error(GRPC_CODES[error.code], error.message, to_status(error)))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (server_errors.InvalidRequestError("x"), client.InvalidRequestError),
        (server_errors.UnsupportedFeatureError("x"), client.InvalidRequestError),
        (server_errors.ModelNotFoundError("x"), client.NotFoundError),
        (server_errors.RequestCancelledError("x"), client.RequestCancelledError),
        (server_errors.DeadlinePassedError("x"), client.DeadlineExceededError),
        (server_errors.OverloadedError("x"), client.OverloadedError),
        (server_errors.NoWorkerError("x"), client.UnavailableError),
        (server_errors.EngineFailedError("x"), client.UnavailableError),
        (server_errors.InternalError.with_id(), client.InternalError),
    ],
)
def test_each_of_the_servers_failures_has_its_class(
    error: server_errors.ServingError, kind: type[client.MillstreamError]
) -> None:
    failed = _of(error)
    assert type(failed) is kind
    assert (failed.code, failed.reason) == (GRPC_CODES[error.code], error.reason)
    assert (failed.retryable, failed.error_id) == (error.retryable, error.error_id)
    assert failed.message == error.message


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAUTHENTICATED, client.UnauthenticatedError),
        (grpc.StatusCode.PERMISSION_DENIED, client.PermissionDeniedError),
        (grpc.StatusCode.UNIMPLEMENTED, client.MillstreamError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, client.OverloadedError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, client.DeadlineExceededError),
    ],
)
def test_failures_without_details(
    code: grpc.StatusCode, kind: type[client.MillstreamError]
) -> None:
    failed = from_rpc_error(_rpc_error(code, "no"))
    assert type(failed) is kind
    assert (failed.code, failed.reason, failed.retryable) == (code, "", False)
    assert failed.retry_delay_s is None
    assert str(failed) == f"{code.name}: no"


@pytest.mark.parametrize(
    ("code", "message", "retryable"),
    [
        (grpc.StatusCode.UNAVAILABLE, "Socket closed", True),
        (grpc.StatusCode.CANCELLED, "CANCELLED", True),  # by a server that stops
        (grpc.StatusCode.CANCELLED, "Channel closed!", False),  # by our own caller
        (grpc.StatusCode.INTERNAL, "RST_STREAM", False),
    ],
)
def test_what_the_way_does_to_a_call_may_pass(
    code: grpc.StatusCode, message: str, *, retryable: bool
) -> None:
    assert from_rpc_error(_rpc_error(code, message)).retryable is retryable


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("failed to connect to all addresses; last error: Socket closed", "SERVER_NOT_REACHED"),
        ("DNS resolution failed for host:1", "SERVER_NOT_REACHED"),
        ("Stream removed (Socket closed)", "CONNECTION_LOST"),
        ("recvmsg:Connection reset by peer", "CONNECTION_LOST"),
        ("GOAWAY received", "CONNECTION_LOST"),
        ("keepalive timeout", "CONNECTION_LOST"),
        ("no healthy upstream", ""),  # a proxy's
    ],
)
def test_a_connection_that_fails_has_a_reason_and_a_sentence(text: str, reason: str) -> None:
    failed = from_rpc_error(_rpc_error(grpc.StatusCode.UNAVAILABLE, text))
    assert (failed.reason, failed.retryable) == (reason, True)
    sentence = {
        "SERVER_NOT_REACHED": f"no server was reached ({text})",
        "CONNECTION_LOST": "the connection to the server broke before the call ended; "
        f"send the request again ({text})",
    }
    assert failed.message == sentence.get(reason, text)


def test_a_status_that_grpc_lost_may_have_been_one_that_passes() -> None:
    failed = from_rpc_error(_rpc_error(grpc.StatusCode.INTERNAL, "Internal error from Core"))
    assert type(failed) is client.UnavailableError
    assert (failed.code, failed.retryable) == (grpc.StatusCode.UNAVAILABLE, True)


def test_somebody_elses_details_are_not_read_as_ours() -> None:
    status = status_pb2.Status(code=14, message="no")
    info = error_details_pb2.ErrorInfo(reason="NO_WORKER", domain="gateway.example")
    info.metadata["retryable"] = "false"
    status.details.add().Pack(info)
    failed = from_rpc_error(_rpc_error(grpc.StatusCode.UNAVAILABLE, "no", status))
    assert (failed.reason, failed.retryable) == ("", True)


def test_a_line_says_it_all() -> None:
    violation = server_errors.FieldViolation("start.options.n", "at most 16")
    failed = _of(server_errors.InvalidRequestError("one field is wrong", violations=(violation,)))
    failed.request_id = "r-1"
    assert str(failed) == (
        "INVALID_ARGUMENT (INVALID_REQUEST): one field is wrong; start.options.n: at most 16; "
        "request r-1"
    )


def test_what_the_message_says_is_not_said_again() -> None:
    assert str(_of(server_errors.InvalidRequestError.of("start.n", "must be 1 to 16"))) == (
        "INVALID_ARGUMENT (INVALID_REQUEST): start.n: must be 1 to 16"
    )
    apart = server_errors.InvalidRequestError(
        "two are wrong", violations=(server_errors.FieldViolation("n", "is 0"),)
    )
    assert str(_of(apart)).endswith("two are wrong; n: is 0")
