"""A worker's status becomes the failure that it was."""

from __future__ import annotations

import grpc
import pytest

from millstream_server.links.grpc_channel import call_error
from millstream_server.runtime import errors
from millstream_server.runtime.errors import FieldViolation, ServingError
from millstream_server.runtime.rpc.status import GRPC_CODES, to_trailers


def _status(code: grpc.StatusCode, trailers: object = ()) -> grpc.aio.AioRpcError:
    metadata = grpc.aio.Metadata(*trailers)  # type: ignore[misc]
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, "words of gRPC", None)


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidRequestError("no", violations=(FieldViolation("pairs[1]", "is empty"),)),
        errors.OverloadedError("busy", retry_delay_s=1.5),
        errors.WorkerDrainingError("leaving", retry_delay_s=0.1),
        errors.InternalError.with_id(),
    ],
)
def test_a_worker_s_own_failure_is_the_same_here(error: ServingError) -> None:
    found = call_error(_status(GRPC_CODES[error.code], to_trailers(error))).failure()
    assert type(found) is type(error)
    assert vars(found) == vars(error)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.WorkerLostError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlinePassedError),
        (grpc.StatusCode.CANCELLED, errors.RequestCancelledError),
        (grpc.StatusCode.UNKNOWN, errors.InternalError),
    ],
)
def test_a_status_of_grpc_is_translated_without_its_words(
    code: grpc.StatusCode, kind: type[ServingError]
) -> None:
    found = call_error(_status(code)).failure()
    assert type(found) is kind
    assert "gRPC" not in found.message
