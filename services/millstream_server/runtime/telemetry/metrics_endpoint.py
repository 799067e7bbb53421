"""GET /metrics on its own port, for Prometheus.

Threads serve it: a slow scraper doesn't delay the event loop, nor a busy event loop the scrape.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Iterable
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, MetricsHandler
from prometheus_client.registry import Collector

from millstream_server.runtime.settings import SettingsError
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.telemetry.metrics import BUILD_INFO, REGISTRY

log = get_log(__name__)

PATH = "/metrics"
_OPENMETRICS = "application/openmetrics-text"
# Enough for two Prometheus servers, an agent and curl. Each connection takes a thread and a file
# descriptor, which the gRPC port needs too.
MOST_CONNECTIONS = 16
CLOSE_LIMIT_S = 2.0  # for scrapes in progress; a scrape waits up to 1.5 s for its engine
_CONNECTION_LIMIT_S = 30.0  # Prometheus gives up after 10 s by default
_SILENCE_LIMIT_S = 10.0  # between two bytes of a request, and for taking the response


class MetricsEndpoint:
    """Serves our metrics and those of ``collectors`` until it is closed."""

    def __init__(
        self,
        address: str,
        service: str,
        collectors: Iterable[Collector] = (),
        connection_limit_s: float = _CONNECTION_LIMIT_S,
    ) -> None:
        """Listen on ``address``, HOST:PORT, and serve; ``service`` is this service's name.

        A connection is cut after ``connection_limit_s``, whatever it does.

        Raises:
            SettingsError: the address is not HOST:PORT.
            OSError: it can't be bound.
        """
        BUILD_INFO.labels(version("millstream"), service).set(1)
        # Collectors may yield other metrics at each scrape.
        registry = CollectorRegistry(support_collectors_without_names=True)
        for collector in (REGISTRY, *collectors):
            registry.register(collector)
        self._server = _bind(address, _Handler.factory(registry), connection_limit_s)
        self._thread = threading.Thread(
            # How often it looks for connections above the limit.
            target=self._server.serve_forever,
            args=(connection_limit_s / 10,),
            name="metrics",
            daemon=True,
        )
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    async def close(self) -> None:
        """Stop listening; a scrape in progress has 2 s to finish. May be called twice."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        if self._thread.is_alive():
            with contextlib.suppress(OSError):  # wakes the thread; not on every system
                self._server.socket.shutdown(socket.SHUT_RDWR)
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()
        self._server.end_connections()


class _Server(ThreadingHTTPServer):
    """Limits the number of connections and the duration of each."""

    request_queue_size = 64

    def __init__(
        self, address: tuple[str, int], handler: type[MetricsHandler], limit_s: float
    ) -> None:
        self._limit_s = limit_s
        self._changed = threading.Condition()
        self._ends: dict[socket.socket, float] = {}  # of the open connections
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Bind without the DNS query for this host's name that HTTPServer makes."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return len(self._ends) < MOST_CONNECTIONS

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._changed:
            self._ends[request] = time.monotonic() + self._limit_s
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._changed:
            super().shutdown_request(request)
            self._ends.pop(request, None)
            self._changed.notify_all()

    def service_actions(self) -> None:
        """Cut connections older than the limit; called now and then."""
        self._cut(socket.SHUT_RDWR, time.monotonic())

    def end_connections(self) -> None:
        """Let requests in progress finish, up to a limit; accept no others."""
        self._cut(socket.SHUT_RD)
        with self._changed:
            self._changed.wait_for(lambda: not self._ends, CLOSE_LIMIT_S)
        self._cut(socket.SHUT_RDWR)

    def _cut(self, how: int, until: float = math.inf) -> None:
        with self._changed:  # else it may be closed meanwhile and its descriptor reused
            for connection, end in self._ends.items():
                if end <= until:
                    with contextlib.suppress(OSError):  # the scraper has closed it
                        connection.shutdown(how)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log; the default prints to stderr. A scraper that disconnects is no error."""
        error = sys.exception()
        if isinstance(error, (ConnectionError, TimeoutError)):
            log.debug("scraper disconnected", error=error)
        else:
            log.error("scrape failed", error=error)


class _V6Server(_Server):
    address_family = socket.AF_INET6


class _Handler(MetricsHandler):
    timeout = _SILENCE_LIMIT_S

    def do_GET(self) -> None:  # noqa: N802 - the standard library's name
        if urlsplit(self.path).path == PATH:
            self._leave_names_alone()
            super().do_GET()
            return
        text = f"The metrics are at {PATH}\n".encode()
        self.send_response(HTTPStatus.NOT_FOUND)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _leave_names_alone(self) -> None:
        """Request unescaped names: else the library's OpenMetrics writes sglang_x for sglang:x."""
        accepted = self.headers.get("Accept", "")
        del self.headers["Accept"]
        if _OPENMETRICS in accepted:
            self.headers["Accept"] = f"{_OPENMETRICS}; version=1.0.0; escaping=allow-utf-8"


def _bind(address: str, handler: type[MetricsHandler], limit_s: float) -> _Server:
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal():
        raise SettingsError(f"--metrics-listen: {address!r} is not HOST:PORT")
    kind = _V6Server if host.startswith("[") else _Server
    try:
        return kind((host.strip("[]"), int(port)), handler, limit_s)
    except (OSError, OverflowError) as error:
        raise OSError(
            f"can't listen on {address} (--metrics-listen): is the port taken? {error}"
        ) from error
