"""A failed RPC as a client reads it: the code and the rich details of its trailer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from millstream_server.runtime.rpc.status import DOMAIN
from millstream_testing.waiting import EOF


@dataclass(frozen=True)
class Failure:
    """What a status says."""

    code: grpc.StatusCode
    message: str
    reason: str = ""
    fields: tuple[str, ...] = ()
    retryable: bool = False
    retry_delay_s: float | None = None
    error_id: str = ""


def failure(error: Any) -> Failure:
    """Read an error; a status without our details has no reason."""
    status = rpc_status.from_call(error)
    if status is None:
        return Failure(error.code(), error.details() or "")
    info = error_details_pb2.ErrorInfo()
    request = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    found = {d.type_url: d.Unpack(m) for d in status.details for m in (info, request, retry)}
    assert len(found) == len(status.details), "a detail twice"
    assert info.domain == DOMAIN
    return Failure(
        code=error.code(),
        message=status.message,
        reason=info.reason,
        fields=tuple(violation.field for violation in request.field_violations),
        retryable=info.metadata["retryable"] == "true",
        retry_delay_s=retry.retry_delay.ToNanoseconds() / 1e9
        if any(d.Is(retry.DESCRIPTOR) for d in status.details)
        else None,
        error_id=info.metadata["error_id"],
    )


async def refusal(call: Any) -> Failure:
    """Run a call that must fail, one answer or a stream of them; say how it did."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _to_its_end(call)
    return failure(caught.value)


async def _to_its_end(call: Any) -> None:
    if hasattr(call, "read"):
        while await call.read() is not EOF:
            pass
    else:
        await call
