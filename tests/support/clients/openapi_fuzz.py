"""Requests that schemathesis makes of the OpenAPI document: bodies that are valid, and others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hypothesis
import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks

_CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)
"""Not that all valid bodies are taken: what a model can do isn't in the document."""
_LATE_S = 20


def fuzz(document: Any, address: str, examples: int, seed: int = 0) -> Sequence[str]:
    """Send ``examples`` of each mode to every operation; return what is wrong.

    The same ``seed`` sends the same. Blocks: call it in a thread if the server is in this process.
    """
    load_all_checks()
    checks = CHECKS.get_by_names(list(_CHECKS))
    schema = schemathesis.openapi.from_dict(document)
    wrong: list[str] = []
    found: Any
    for found in schema.get_all_operations():
        operation = found.ok()
        modes = [GenerationMode.POSITIVE]
        if operation.body:
            modes.append(GenerationMode.NEGATIVE)
        for mode in modes:
            ask = hypothesis.seed(seed)(_asking(operation, mode, checks, address, examples))
            try:
                ask()
            except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001 - as hypothesis makes it
                wrong.append(f"{operation.label} ({mode.value}): {error}")
    return wrong


def _asking(operation: Any, mode: GenerationMode, checks: Any, address: str, examples: int) -> Any:
    """Return the test of an operation."""

    @hypothesis.settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        response = case.call(base_url=f"http://{address}", timeout=_LATE_S)
        case.validate_response(response, checks=checks)

    return ask
