"""The memory that requests on slot streams may take."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from millstream_server.runtime.errors import OverloadedError
from millstream_server.runtime.retry_delay import jittered
from millstream_server.runtime.telemetry import metrics

_RETRY_S = 1.0


class HeldBytes:
    """Counts the bytes of open requests; one per process.

    Messages of other RPCs count until the RPC ends (`runtime.rpc.limits`). A slot stream may stay
    open for days, so its requests count until they end.
    """

    def __init__(self, max_bytes: int) -> None:
        """Allow ``max_bytes`` in all."""
        self.used = 0
        self._max = max_bytes

    @contextlib.contextmanager
    def hold(self, nbytes: int) -> Iterator[None]:
        """Count ``nbytes`` during the ``with`` block.

        Raises:
            OverloadedError: the limit would be exceeded.
        """
        if self.used + nbytes > self._max:
            metrics.ADMISSION_REFUSED.labels("bytes").inc()
            raise OverloadedError(
                f"the server is busy: open requests hold {self.used} of the {self._max} bytes it "
                f"has for them, and this one needs {nbytes}; retry later",
                retry_delay_s=jittered(_RETRY_S),
            )
        self.used += nbytes
        try:
            yield
        finally:
            self.used -= nbytes
