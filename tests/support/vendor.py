"""Cases that run a vendor's own code to show its bug: for `make test-vendor`, not `make test`.

The same test runs on our code in `make test`. A trap that no longer fails is reported, not failed:
then our way around it may go.
"""

from __future__ import annotations

import pytest

STOCK = pytest.mark.vendor
"""Marks a case of a vendor's own code that behaves."""


def trap(
    reason: str, raises: type[BaseException] | tuple[type[BaseException], ...] = AssertionError
) -> tuple[pytest.MarkDecorator, pytest.MarkDecorator]:
    """Mark a case of a vendor's own code that fails because of its bug."""
    return STOCK, pytest.mark.xfail(strict=False, raises=raises, reason=reason)
