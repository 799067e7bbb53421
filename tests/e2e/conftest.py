"""The whole suite on real SGLang, on the CPU: one aggregated and one disaggregated topology."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from millstream_server.generation.ticket import Ticket, TicketKey
from tests.support.models.models import make_random_model
from tests.support.processes.ports import free_port
from tests.support.processes.suite import TICKET_KEY, ServiceProcess, stop_all

# A prompt of some 1,900 tokens takes a second of prefill then: time enough to cancel in.
_SLOW_PREFILL = "--chunked-prefill-size 16 --disable-radix-cache"
_TRANSFER_TIMEOUT_S = 15
# How long blocks of a broken transfer are kept, lest prefill still writes; 30 s by default.
_KEPT = {"SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT": "5"}


@dataclass
class Suite:
    """Addresses of the running services; `decode` and `prefill` are one hand-off pair."""

    model: Path
    aggregated: ServiceProcess
    prefill: ServiceProcess
    decode: ServiceProcess
    front_aggregated: ServiceProcess
    front_disaggregated: ServiceProcess

    def mint(self) -> Ticket:
        """Make a ticket for the hand-off pair, as a Processor does."""
        port = int(str(self.prefill.flags["bootstrap_port"]))
        return TicketKey.from_hex(TICKET_KEY).mint("127.0.0.1", port)

    @property
    def services(self) -> tuple[ServiceProcess, ...]:
        return (
            self.aggregated,
            self.prefill,
            self.decode,
            self.front_aggregated,
            self.front_disaggregated,
        )


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="package")
def suite(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    logs = tmp_path_factory.mktemp("logs")
    common = {
        "model_path": model,
        "model_name": "tiny",
        "max_total_tokens": 16384,
        "engine_tokenizer": True,  # for constraints
    }
    aggregated = ServiceProcess("millstream_server.decode", common, logs / "aggregated.log")
    pair = {**common, "transfer_timeout_s": _TRANSFER_TIMEOUT_S}
    prefill = ServiceProcess(
        "millstream_server.prefill",
        {**pair, "bootstrap_port": free_port(), "engine_args": _SLOW_PREFILL},
        logs / "prefill.log",
    )
    decode = ServiceProcess(
        "millstream_server.decode",
        {**pair, "mode": "disaggregated"},
        logs / "decode.log",
        env=_KEPT,
    )
    fronts = [
        ServiceProcess(
            "millstream_server.processor",
            {"models": f"tiny={model}", "formats": "tiny=hermes", "workers": workers},
            logs / f"{name}.log",
        )
        for name, workers in (
            ("front-aggregated", aggregated.address),
            ("front-disaggregated", f"{prefill.address},{decode.address}"),
        )
    ]
    started = Suite(model, aggregated, prefill, decode, *fronts)
    try:
        for service in started.services:
            service.start()
        for service in started.services:
            service.wait_serving(timeout_s=300)
        yield started
    finally:
        stop_all(*started.services)
