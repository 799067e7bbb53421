"""The failure tree: one class per reason of the contract, and both ways onto the wire."""

from __future__ import annotations

from typing import Any

import pytest
from google.rpc import error_details_pb2

from millstream.v1 import errors_pb2
from millstream_server.protobuf.errors import error_from_proto, error_to_proto
from millstream_server.runtime import errors
from millstream_server.runtime.errors import (
    Code,
    FieldViolation,
    ServingError,
    UnsupportedMethodError,
)
from millstream_server.runtime.rpc.status import to_status, to_trailers


def _classes(cls: type[ServingError] = ServingError) -> list[type[ServingError]]:
    return [c for sub in cls.__subclasses__() for c in (sub, *_classes(sub))]


# It ends a whole RPC, so no stream carries it; its reason is `UnsupportedFeatureError`'s.
CLASSES = [cls for cls in _classes() if cls is not UnsupportedMethodError]
CODES = {
    "INVALID_REQUEST": Code.INVALID_ARGUMENT,
    "UNSUPPORTED_FEATURE": Code.INVALID_ARGUMENT,
    "MODEL_NOT_FOUND": Code.NOT_FOUND,
    "CANCELLED": Code.CANCELLED,
    "DEADLINE_EXCEEDED": Code.DEADLINE_EXCEEDED,
    "OVERLOADED": Code.RESOURCE_EXHAUSTED,
    "UNAVAILABLE": Code.UNAVAILABLE,
    "NO_WORKER": Code.UNAVAILABLE,
    "WORKER_LOST": Code.UNAVAILABLE,
    "WORKER_DRAINING": Code.UNAVAILABLE,
    "WORKER_PAUSED": Code.UNAVAILABLE,
    "ADAPTER_NOT_FOUND": Code.NOT_FOUND,
    "ADAPTER_EXISTS": Code.ALREADY_EXISTS,
    "OPERATION_CONFLICT": Code.FAILED_PRECONDITION,
    "ENGINE_BUSY": Code.FAILED_PRECONDITION,
    "INVALID_WEIGHTS": Code.FAILED_PRECONDITION,
    "ENGINE_FAILED": Code.UNAVAILABLE,
    "KV_TRANSFER_FAILED": Code.UNAVAILABLE,
    "INTERNAL": Code.INTERNAL,
    "UNAUTHENTICATED": Code.UNAUTHENTICATED,
    "PERMISSION_DENIED": Code.PERMISSION_DENIED,
    "UNKNOWN_METHOD": Code.UNIMPLEMENTED,
    "EMBEDDING_TRANSFER_FAILED": Code.UNAVAILABLE,
    "MEDIA_FETCH_FAILED": Code.UNAVAILABLE,
    "STORAGE_FAILED": Code.UNAVAILABLE,
    "REPEATED_LOSS": Code.ABORTED,
    "REPLAY_DIFFERED": Code.ABORTED,
}


def test_every_reason_has_one_class_and_every_class_a_reason() -> None:
    in_contract = {name.removeprefix("ERROR_REASON_") for name, _ in errors_pb2.ErrorReason.items()}
    in_code = [cls.reason for cls in CLASSES]
    assert len(in_code) == len(set(in_code))
    assert set(in_code) == in_contract - {"UNSPECIFIED"}


def test_codes_are_those_the_contract_states() -> None:
    assert {cls.reason: cls.code for cls in CLASSES} == CODES


def test_what_is_retryable() -> None:
    retryable = {Code.UNAVAILABLE, Code.RESOURCE_EXHAUSTED}
    assert all(cls.retryable == (cls.code in retryable) for cls in CLASSES)


def test_the_drawing_names_every_class() -> None:
    assert errors.__doc__ is not None
    assert all(cls.__name__ in errors.__doc__ for cls in _classes())


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("delay_s", [None, 0.0, 1.5])
def test_a_failure_survives_the_worker_stream(
    cls: type[ServingError], delay_s: float | None
) -> None:
    violations = (FieldViolation("a[1].b", "is bad"), FieldViolation("c", "too"))
    sent = cls("a sentence", violations=violations, retry_delay_s=delay_s, error_id="id7")
    wire = error_to_proto(sent).SerializeToString()
    message = errors_pb2.RequestError.FromString(wire)
    assert message.code == cls.code
    assert message.retryable == cls.retryable
    assert message.error_id == "id7"
    received = error_from_proto(message)
    assert type(received) is cls
    assert received.message == str(received) == "a sentence"
    assert received.violations == violations
    assert received.retry_delay_s == delay_s
    assert received.error_id == "id7"


@pytest.mark.parametrize(
    ("retryable", "cls"), [(True, errors.UnavailableError), (False, errors.InternalError)]
)
def test_a_reason_from_a_newer_version_keeps_whether_to_retry(
    retryable: bool,  # noqa: FBT001
    cls: type[ServingError],
) -> None:
    reason: Any = 4711
    message = errors_pb2.RequestError(code=14, reason=reason, message="m", retryable=retryable)
    assert type(error_from_proto(message)) is cls


@pytest.mark.parametrize(
    ("char", "count", "kept"),
    [
        ("x", 1024, 1024),
        ("x", 1025, 1021),
        ("x", 20 << 20, 1021),
        ("é", 1024, 510),
        ("😀", 257, 255),
    ],
)
def test_a_workers_sentence_is_cut(char: str, count: int, kept: int) -> None:
    message = errors_pb2.RequestError(message=char * count, error_id=char * count)
    error = error_from_proto(message)
    ending = "" if kept == count else "…"
    assert len(error.message) == kept + len(ending)
    assert error.message == char * kept + ending
    assert len(error.error_id.encode()) <= 128


@pytest.mark.parametrize(
    ("sizes", "kept"), [([1] * 200_000, 16), ([500] * 5, 4), ([20 << 20, 1], 0)]
)
def test_of_a_workers_violations_the_first_are_kept(sizes: list[int], kept: int) -> None:
    sent = [errors_pb2.FieldViolation(field="f" * size, description="d") for size in sizes]
    error = error_from_proto(errors_pb2.RequestError(message="m", violations=sent))
    assert [len(v.field) for v in error.violations] == sizes[:kept]
    assert all(v.description == "d" for v in error.violations)


@pytest.mark.parametrize(
    ("seconds", "kept_s"), [(-1, 0.0), (10**18, 3600.0), (-(10**18), 0.0), (3599, 3599.0)]
)
def test_a_workers_retry_delay_fits_into_a_status(seconds: int, kept_s: float) -> None:
    message = errors_pb2.RequestError(reason=errors_pb2.ERROR_REASON_OVERLOADED)
    message.retry_delay.seconds = seconds
    error = error_from_proto(message)
    assert error.retry_delay_s == kept_s
    assert len(to_status(error).details) == 2
    assert dict(to_trailers(error)).get("grpc-retry-pushback-ms") == (
        str(int(1000 * kept_s)) if kept_s else None
    )


def test_the_largest_error_of_a_worker_fits_into_trailers() -> None:
    """Clients take 8 KiB; gRPC writes a byte of `grpc-message` that isn't ASCII as three."""
    violation = errors_pb2.FieldViolation(field="f" * 64, description="é" * 32)
    message = errors_pb2.RequestError(message="é" * 4096, violations=[violation] * 100)
    error = error_from_proto(message)
    (_, details), *_ = to_trailers(error)
    assert len(error.violations) == 16
    assert 3 * len(error.message.encode()) + len(details) * 4 / 3 < 8 << 10


def test_a_status_holds_what_applies_and_no_more() -> None:
    status = to_status(errors.InvalidRequestError.of("a.b", "is bad"))
    info, request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert status.code == 3
    assert status.message == "a.b: is bad"
    assert len(status.details) == 2
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(request)
    assert (info.reason, info.domain) == ("INVALID_REQUEST", "millstream.io")
    assert dict(info.metadata) == {"retryable": "false"}
    assert [(v.field, v.description) for v in request.field_violations] == [("a.b", "is bad")]

    status = to_status(errors.NoWorkerError("none", retry_delay_s=0.25))
    retry = error_details_pb2.RetryInfo()
    assert len(status.details) == 2
    assert status.details[1].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 250

    internal = errors.InternalError.with_id()
    assert internal.error_id in internal.message
    status = to_status(internal)
    assert len(status.details) == 1
    assert status.details[0].Unpack(info)
    assert info.metadata["error_id"] == internal.error_id != errors.InternalError.with_id().error_id


@pytest.mark.parametrize(
    ("error", "pushback"),
    [
        (errors.NoWorkerError("none", retry_delay_s=0.25), "250"),
        (errors.NoWorkerError("none"), None),
        (errors.InvalidRequestError("never", retry_delay_s=1.0), None),
    ],
)
def test_grpcs_own_retries_wait_as_long_as_ours(error: ServingError, pushback: str | None) -> None:
    trailers = dict(to_trailers(error))
    assert trailers.pop("grpc-retry-pushback-ms", None) == pushback
    assert list(trailers) == ["grpc-status-details-bin"]
