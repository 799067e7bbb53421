"""The RPCs that a server is handling: a stop waits for them or cuts them."""

from __future__ import annotations

from millstream_server.runtime.errors import UnavailableError
from millstream_server.runtime.lifecycle.drain import OpenWork
from millstream_server.runtime.rpc.served_call import ServedCall


class OpenCalls(OpenWork):
    """A server's RPCs whose handlers run. All calls come from one event loop."""

    def __init__(self) -> None:
        """Start with no RPC."""
        super().__init__()
        self._calls: set[ServedCall] = set()

    def add(self, call: ServedCall) -> None:
        """Add an RPC whose handler begins."""
        self.begin()
        self._calls.add(call)

    def remove(self, call: ServedCall) -> None:
        """Remove an RPC whose handler has ended."""
        self._calls.discard(call)
        self.end()

    def cut(self) -> None:
        """End open RPCs with our status: if gRPC cut them, the status would have no details."""
        for call in tuple(self._calls):
            call.fail(
                UnavailableError("this server had to shut down before this was done; send it again")
            )
