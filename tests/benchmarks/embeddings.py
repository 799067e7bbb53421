"""Inputs a second through Processor and embedding worker, beside a bare engine on the same model.

    python -m tests.benchmarks.embeddings                     # the demo model, about a minute
    python -m tests.benchmarks.embeddings --direct            # without the Processor
    python -m tests.benchmarks.embeddings --rounds 5 --json

A worker on SGLang with a Processor before it, and a bare sgl.Engine, each in processes of their
own, take turns on the machine: in each round every case runs on one and then on the other, and the
ratio is the median of the rounds'. The bare engine is called within its process, with lists of
token ids, and its vectors stay there; ours go to a client over gRPC, which shares the machine's
cores. The smaller the model, the more of the time that is. CPU is that of the processes without
SGLang's own, which are the same for both; RSS likewise.

Cases: inputs per call x tokens per input, and how many calls at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from millstream.v1 import embedding_pb2, embedding_pb2_grpc
from millstream_testing.waiting import EOF
from tests.support.benchmarks.verdict import folder_for, parser_of
from tests.support.engines.bare_vectors import BareProcess
from tests.support.processes.processes import cpu_s, rss_mb
from tests.support.processes.suite import ServiceProcess, stop_all

_DEMO = Path(__file__).parents[2] / "demo" / "embedder" / "model"
_CASES = ((64, 64, 4), (64, 64, 1), (1, 8, 32), (1, 8, 1))
_WARM_UP = 0.2
_SMALLEST_VOCABULARY = 1000


@dataclass
class Row:
    """Figures of one case; lists have one entry per round."""

    case: str
    bare_per_s: list[float] = field(default_factory=list)
    served_per_s: list[float] = field(default_factory=list)
    bare_cpu_us: list[float] = field(default_factory=list)
    served_cpu_us: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """Return our rate over the bare engine's, of each round."""
        return [ours / bare for ours, bare in zip(self.served_per_s, self.bare_per_s, strict=True)]

    def figures(self) -> dict[str, Any]:
        """Return the medians."""
        return {
            "case": self.case,
            "bare_per_s": statistics.median(self.bare_per_s),
            "served_per_s": statistics.median(self.served_per_s),
            "ratio": statistics.median(self.ratios),
            "ratios": sorted(self.ratios),
            "bare_cpu_us_per_input": statistics.median(self.bare_cpu_us),
            "served_cpu_us_per_input": statistics.median(self.served_cpu_us),
        }


def inputs_of(count: int, tokens: int) -> list[list[int]]:
    """Make inputs that differ from each other from their first token on."""
    ids = _SMALLEST_VOCABULARY - 10
    return [[(7 * number + place) % ids + 5 for place in range(tokens)] for number in range(count)]


class Client:
    """Batches on one stream, so many at a time."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        stub: Any = embedding_pb2_grpc.EmbeddingServiceStub(channel)
        self._call = stub.Embed()

    async def calls(self, inputs: Sequence[Sequence[int]], at_once: int, seconds: float) -> int:
        """Send batches for so long, wait for all; return how many they were."""
        ends, done = time.monotonic() + seconds, 0
        for slot in range(at_once):
            await self._start(slot, inputs)
        running = at_once
        while running:
            response: Any = await self._call.read()
            assert response is not EOF
            assert not response.errors, response.errors
            for end in response.finished:
                done += 1
                if time.monotonic() < ends:
                    await self._start(end.slot, inputs)
                else:
                    running -= 1
        return done

    async def _start(self, slot: int, inputs: Sequence[Sequence[int]]) -> None:
        start = embedding_pb2.StartEmbed(slot=slot)
        for ids in inputs:
            start.inputs.add().token_ids.ids.extend(ids)
        await self._call.write(embedding_pb2.EmbedRequest(start=start))

    def close(self) -> None:
        """End the stream."""
        self._call.cancel()


@dataclass
class Bench:
    """Both, while they run."""

    bare: BareProcess
    services: dict[str, ServiceProcess]
    client: Client
    seconds: float

    async def measure(self, row: Row, count: int, tokens: int, at_once: int) -> None:
        """Run a case once on each."""
        inputs = inputs_of(count, tokens)
        job = {"inputs": inputs, "at_once": at_once}
        await asyncio.to_thread(self.bare.ask, **job, seconds=_WARM_UP * self.seconds)
        before = cpu_s(self.bare.pid)
        told = await asyncio.to_thread(self.bare.ask, **job, seconds=self.seconds)
        done = told["calls"] * count
        row.bare_per_s.append(done / told["took_s"])
        row.bare_cpu_us.append(1e6 * (cpu_s(self.bare.pid) - before) / done)
        await self.client.calls(inputs, at_once, _WARM_UP * self.seconds)
        before, began = self._cpu_s(), time.monotonic()
        done = await self.client.calls(inputs, at_once, self.seconds) * count
        row.served_per_s.append(done / (time.monotonic() - began))
        row.served_cpu_us.append(1e6 * (self._cpu_s() - before) / done)

    def _cpu_s(self) -> float:
        return sum(cpu_s(service.pid) for service in self.services.values())


async def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start both, measure, return what was measured."""
    bare = BareProcess(arguments.model)
    services = make_services(arguments, folder)
    rows = [Row(f"{count} x {tokens}, {at_once} at once") for count, tokens, at_once in _CASES]
    try:
        for service in services.values():
            service.start()
        for service in services.values():
            await service.until_serving(300)
        await asyncio.to_thread(bare.ask, inputs=[[5]])
        async with grpc.aio.insecure_channel(list(services.values())[-1].address) as channel:
            client = Client(channel)
            bench = Bench(bare, services, client, arguments.seconds)
            for _, (row, case) in itertools.product(
                range(arguments.rounds), zip(rows, _CASES, strict=True)
            ):
                await bench.measure(row, *case)
            client.close()
        rss = {name: rss_mb(service.pid) for name, service in services.items()}
        rss["bare"] = rss_mb(bare.pid)
    finally:
        bare.close()
        stop_all(*services.values(), timeout_s=60)
    return {"rows": [row.figures() for row in rows], "rss_mb": rss}


def make_services(arguments: argparse.Namespace, folder: Path) -> dict[str, ServiceProcess]:
    """Make what is measured, and start nothing; clients talk to the last one."""
    common = {"log_level": "warning"}
    worker = ServiceProcess(
        "millstream_server.embedding",
        {**common, "model_path": arguments.model, "model_name": "embedder"},
        folder / "worker.log",
    )
    if arguments.direct:
        return {"worker": worker}
    front = ServiceProcess(
        "millstream_server.processor",
        {**common, "models": f"embedder={arguments.model}", "workers": worker.address},
        folder / "processor.log",
    )
    return {"worker": worker, "processor": front}


def table(found: dict[str, Any]) -> str:
    """Lay the figures out for a terminal."""
    line = "{:22}{:>12}{:>12}{:>8}{:>16}{:>14}{:>14}"
    lines = [
        "inputs per second; CPU in us per input",
        line.format("case", "bare", "ours", "ratio", "(rounds)", "bare CPU", "our CPU"),
    ]
    for row in found["rows"]:
        spread = f"{row['ratios'][0]:.2f}-{row['ratios'][-1]:.2f}"
        cells = (f"{row[name]:.0f}" for name in ("bare_per_s", "served_per_s"))
        cpu = (f"{row[f'{who}_cpu_us_per_input']:.0f}" for who in ("bare", "served"))
        lines.append(line.format(row["case"], *cells, f"{row['ratio']:.2f}", spread, *cpu))
    lines.append("RSS: " + ", ".join(f"{name} {mb:.0f} MB" for name, mb in found["rss_mb"].items()))
    return "\n".join(lines)


def main() -> None:
    """Parse arguments, measure, print."""
    parser = parser_of("embeddings", __doc__)
    parser.add_argument("--model", type=Path, default=_DEMO, help="a model's folder (the demo's)")
    parser.add_argument("--direct", action="store_true", help="measure without the Processor")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement (2)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured (3)")
    arguments = parser.parse_args()
    with folder_for(arguments) as folder:
        found = asyncio.run(run(arguments, folder))
    print(json.dumps(found) if arguments.json else table(found))  # noqa: T201


if __name__ == "__main__":
    main()
