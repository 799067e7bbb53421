"""Every row of docs/metrics.md has series on a suite that has worked; most of them count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc

from millstream.v1 import decode_pb2_grpc
from millstream_client import Client
from millstream_server.transfer.ticket import TicketKey
from tests.support.metrics_table import documented
from tests.support.scraping import scrape
from tests.support.simulated_suite import SimulatedSuite
from tests.support.suite import free_port
from tests.support.waiting import until
from tests.support.worker_streams import decode_stream

FORGED = TicketKey(bytes(32)).mint("127.0.0.1", 1)
STILL_ZERO = {
    "millstream_admission_open_bytes",  # no RPC is open any more
    "millstream_admission_queued_requests",
    "millstream_admission_queued_tokens",
    "millstream_admission_refused_total",
    "millstream_admission_running_requests",
    "millstream_canary_failures_total",
    "millstream_certificate_expiry_timestamp_seconds",  # NaN: no TLS
    "millstream_draining",
    "millstream_engine_queued_requests",
    "millstream_engine_running_requests",
    "millstream_engine_used_blocks",
    "millstream_pacing_interval_seconds",
    "millstream_worker_stream_open_requests",
    "millstream_workers_lost_total",
    "python_gc_objects_uncollectable_total",
}
"""Rows whose series are there and say 0 on an idle suite in good health."""
SGLANG_ONLY = {"sglang:cache_config_info"}
"""tests/integration/sglang_engine/test_metrics.py has these."""


async def test_every_row_is_emitted_by_a_suite_that_worked(tmp_path: Path) -> None:
    made = SimulatedSuite(tmp_path, {"canary_interval_s": 0.2})
    made.add_pair()
    processor = made.add_processor("processor")
    ports = []
    for service in made.services.values():
        ports.append(free_port())
        service.flags = {**service.flags, "metrics_listen": f"127.0.0.1:{ports[-1]}"}
    with made.running():
        await made.until_connected()
        async with Client(processor.address) as client:
            answer = await client.chat("hi", max_new_tokens=8).answer()
            assert answer.text == "ABCDEFGH"
        await _refuse_a_ticket(made.services["decode-1"].address)
        rows = documented().keys() - SGLANG_ONLY

        async def missing() -> set[str]:
            values = await _values(ports)
            silent = {name for name in rows if name not in values}
            return silent | {name for name in rows - STILL_ZERO if not any(values.get(name, ()))}

        async def nothing_is() -> bool:
            return not await missing()

        try:
            await until(nothing_is, 10)
        except AssertionError:
            raise AssertionError(sorted(await missing())) from None


async def _refuse_a_ticket(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = decode_pb2_grpc.DecodeServiceStub(channel)
        stream = decode_stream(stub)
        await stream.start(0, [1], ticket=FORGED)
        (refused,) = await stream.ended(0)
        assert (refused.reason, refused.fields) == ("INVALID_REQUEST", ["ticket.signature"])
        await stream.drain()


async def _values(ports: list[int]) -> dict[str, list[float]]:
    """Gather what all processes say, by the table's names; a histogram says how often."""
    found: dict[str, list[float]] = {}
    for port in ports:
        for family in (await scrape(port)).families.values():
            name = family.name + ("_total" if family.type == "counter" else "")
            for sample in family.samples:
                if family.type != "histogram" or sample.name.endswith("_count"):
                    found.setdefault(name, []).append(sample.value)
    return found
