"""Failures as OpenAI's API says them: `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import msgspec

from millstream_server.runtime.errors import Failure, FieldViolation, ServingError
from millstream_server.runtime.rpc.http import Refusal, Refuse, retry_after, status_of

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    504: "timeout_error",
}
_CODES = {
    "UNAUTHENTICATED": "invalid_api_key",
    "MODEL_NOT_FOUND": "model_not_found",
    "OVERLOADED": "rate_limit_exceeded",
    "UNKNOWN_METHOD": "unknown_url",
}
_SERVER_FAULT = 500
_TOO_LONG = re.compile(r"the context length of \d+ tokens")
_RENAMED = (
    (re.compile(r"\b(?:start\.)?(?:options\.)?(?:sampling\.)?max_new_tokens\b"), "max_tokens"),
    (re.compile(r"\b(?:start\.)?(?:options\.)?(?:sampling\.)?min_new_tokens\b"), "min_tokens"),
    (re.compile(r"\b(?:start\.)?(?:options\.)?(?:sampling\.)?constraint\b"), "response_format"),
    (re.compile(r"\btool_choice\.(?:mode|name)\b"), "tool_choice"),
    (re.compile(r"\blogprobs\.top\b"), "top_logprobs"),
    (re.compile(r"\bstart\.output\b"), "tools"),
    (re.compile(r"\bstart\.request_id\b"), "x-request-id"),
    (re.compile(r"\btoken_ids\.ids\b"), "prompt"),
    (re.compile(r"\.parameters_json_schema\b"), ".function.parameters"),
    (re.compile(r"\.arguments_json\b"), ".function.arguments"),
    (re.compile(r"\]\.strict\b"), "].function.strict"),
    (re.compile(r"^(?:start\.)?(?:options\.)?sampling\."), ""),
    (re.compile(r"^start\."), ""),
    (re.compile(r"\bCHAT_ROLE_(?=[A-Z])"), ""),
    (re.compile(r"\bListModels\b"), "GET /v1/models"),
)
"""Names of the gRPC contract, whose checks are the same, as names of this API."""
Rename = Callable[[str], str]
"""Puts the names of an endpoint in place of the contract's."""


class Error(msgspec.Struct):
    """A failure; `param` is the field that it is about."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """The body of a failure, and what an event says of one."""

    error: Error


def refuse(failure: Failure) -> Refusal:
    """Return the response of a failure."""
    return refused(failure, renamed)


def refused(failure: Failure, rename: Rename) -> Refusal:
    """Return the response of a failure, in the names of an endpoint."""
    status = status_of(failure)
    body = msgspec.json.encode(ErrorBody(_error(failure, status, rename)))
    return Refusal(
        status=status,
        body=body,
        headers=retry_after(failure),
        event=b"data: " + body + b"\n\ndata: [DONE]\n\n",
    )


def _error(failure: Failure, status: int, rename: Rename) -> Error:
    server = status >= _SERVER_FAULT
    kind = _TYPES.get(status, "server_error" if server else "invalid_request_error")
    violations = _violations(failure)
    param = rename(violations[0].field) if violations else None
    return Error(sentence(failure, rename), kind, param, _code(failure))


def sentence(failure: Failure, rename: Rename | None = None) -> str:
    """Return what a failure says, in the names of this API or of an endpoint."""
    rename = rename or renamed
    violations = _violations(failure)
    if not violations:
        return rename(failure.message)
    return "; ".join([f"{rename(v.field)}: {rename(v.description)}" for v in violations])


def _violations(failure: Failure) -> Sequence[FieldViolation]:
    return failure.violations if isinstance(failure, ServingError) else ()


def _code(failure: Failure) -> str:
    if _TOO_LONG.search(failure.message):
        return "context_length_exceeded"  # agents compact their history on it
    return _CODES.get(failure.reason, failure.reason.lower())


def renamed(text: str) -> str:
    """Return a text of the pipeline in this API's names."""
    for pattern, name in _RENAMED:
        text = pattern.sub(name, text)
    return text


Names = Sequence[tuple[re.Pattern[str], str]]
"""Patterns of names, and what replaces them."""


def refusing(names: Names) -> Refuse:
    """Return what says failures of an endpoint that has ``names`` of its own."""

    def rename(text: str) -> str:
        for pattern, name in names:
            text = pattern.sub(name, text)
        return renamed(text)

    return lambda failure: refused(failure, rename)
