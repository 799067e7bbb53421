"""The calls that a process serves: counted, refused when it shuts down, and what they may hold."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from millstream_server.runtime.drain import OpenWork
from millstream_server.runtime.errors import UnavailableError
from millstream_server.runtime.rpc.ledger import Ledger

MAX_HELD_BYTES = 512 << 20


class OpenCalls:
    """One per process."""

    def __init__(self, max_held_bytes: int = MAX_HELD_BYTES) -> None:
        """Requests on slot streams, and answers that are put together, may take so much together.

        Messages of other RPCs count until the RPC ends (`runtime.rpc.limits`). A slot stream may
        stay open for days, so its requests count until they end.
        """
        self.work = OpenWork()
        self.held = Ledger(
            max_held_bytes,
            busy="the server is busy: open requests hold {used} of the {most} bytes it has for "
            "them, and this one needs {amount}; retry later",
        )

    def begin_call(self, on_drain: Callable[[], None] | None = None) -> None:
        """Count an RPC as open until `end_call`.

        ``on_drain`` is called if the server begins to shut down.

        Raises:
            UnavailableError: this process is shutting down. Turns admitted before still run.
        """
        if self.work.refusing:
            raise UnavailableError(
                "this server is shutting down; retry on another one", retry_delay_s=0.1
            )
        self.work.begin(on_drain)

    def end_call(self, on_drain: Callable[[], None] | None = None) -> None:
        self.work.end(on_drain)

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Count an RPC as open during a ``with`` block.

        Raises:
            UnavailableError: this process is shutting down.
        """
        self.begin_call()
        try:
            yield
        finally:
            self.end_call()
