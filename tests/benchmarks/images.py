"""Images per minute through Processor and diffusion worker, against the bare pipeline.

    python -m tests.benchmarks.images                     # the demo model, about two minutes
    python -m tests.benchmarks.images --steps 50 --rounds 9 --json

The same prompt, size, steps and seeds, in turns: the bare diffusers pipeline in a process of its
own makes N images, then N requests of one image each go over real sockets to a Processor and from
there to a worker with the same pipeline. Only one of the two works at a time, on one thread each.
"one at a time" sends a request when the one before has ended; "queued" sends all N at once, so the
device never waits for the network. The overhead is how much longer an image takes than with the
bare pipeline in the same round: the median of the rounds, and the middle half of them. Rounds are
short and many, since neighbours slow a shared host for seconds at a time. Every image is compared
with the bare one, pixel for pixel. CPU is what the kernel charged to a process, divided by the
images. "idle" is how long per image the model's thread neither ran nor waited for a core: the time
in which we keep the device from working, and nobody else does. Each request gets a progress message
per step.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

from millstream_client import Client
from tests.support.benchmarks.verdict import folder_for, parser_of
from tests.support.engines.bare_pictures import PROMPT, BarePipeline, pixels_digest
from tests.support.processes.ports import free_port
from tests.support.processes.processes import cpu_s, rss_mb
from tests.support.processes.suite import ServiceProcess, running

_DEMO = Path(__file__).parents[2] / "demo" / "drawing" / "model"


@dataclass
class Case:
    """Figures of one way to make images."""

    name: str
    s: list[float] = field(default_factory=list)
    """Seconds per image, one number per round."""
    cpu_ms: dict[str, list[float]] = field(default_factory=dict)
    """CPU per image by process."""
    rss_mb: dict[str, float] = field(default_factory=dict)
    idle_ms: list[float] = field(default_factory=list)
    """Time per image in which the model's thread was blocked."""
    equal: bool = True
    """Whether all images were those of the bare pipeline."""

    @property
    def median_s(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.s)

    def overheads(self, bare: Case) -> list[float]:
        """Return how much longer than with the bare pipeline, of each round, in order of size."""
        return sorted(ours / its - 1 for ours, its in zip(self.s, bare.s, strict=True))


@contextmanager
def services(arguments: argparse.Namespace, folder: Path) -> Iterator[dict[str, ServiceProcess]]:
    """Run a worker and a Processor."""
    worker = ServiceProcess(
        "millstream_server.diffusion",
        {
            "kind": "image",
            "engine": "diffusers",
            "model_path": arguments.model,
            "model_name": "drawing",
            "log_level": "warning",
            "canary_interval_s": 0,
        },
        folder / "diffusion.log",
        free_port(),
        interpreter=True,
    )
    processor = ServiceProcess(
        "millstream_server.processor",
        {"models": "drawing", "workers": worker.address, "log_level": "warning"},
        folder / "processor.log",
        free_port(),
        interpreter=True,
    )
    with running(worker, processor):
        yield {"diffusion": worker, "processor": processor}


async def requests(
    client: Client, arguments: argparse.Namespace, count: int, *, at_once: bool
) -> list[str]:
    """Make images of the seeds 0 to count-1; return the SHA-256 of each one's pixels."""

    async def one(seed: int) -> str:
        stream = client.generate_image(
            PROMPT,
            width=arguments.size,
            height=arguments.size,
            steps=arguments.steps,
            guidance_scale=arguments.guidance,
            seed=seed,
        )
        media = await stream.result()
        pixels = Image.open(io.BytesIO(media.files[0].data)).tobytes()
        return pixels_digest(pixels)

    if at_once:
        return list(await asyncio.gather(*(one(seed) for seed in range(count))))
    return [await one(seed) for seed in range(count)]


class ModelThread:
    """Of a process the thread that has run the most since this was made."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._before = self._read()
        self._began_s = time.perf_counter()

    def _read(self) -> dict[str, tuple[float, float]]:
        """Return how long each thread ran, and waited for a core, in seconds."""
        found = {}
        for task in Path(f"/proc/{self._pid}/task").iterdir():
            ran, waited, _ = (task / "schedstat").read_text().split()
            found[task.name] = int(ran) / 1e9, int(waited) / 1e9
        return found

    def idle_s(self) -> float:
        """Return how long it has neither run nor waited for a core."""
        took_s = time.perf_counter() - self._began_s
        spent = []
        for name, (ran, waited) in self._read().items():
            ran_before, waited_before = self._before.get(name, (0.0, 0.0))
            spent.append((ran - ran_before, waited - waited_before))
        return max(0.0, took_s - sum(max(spent)))


async def measure(
    arguments: argparse.Namespace, bare: BarePipeline, processes: dict[str, ServiceProcess]
) -> list[Case]:
    """Measure in turns."""
    alone, one, queued = Case("bare pipeline"), Case("one at a time"), Case("queued")
    async with Client(processes["processor"].address) as client:
        await requests(client, arguments, 2, at_once=False)
        for _ in range(arguments.rounds):
            thread = ModelThread(bare.pid)
            found = await asyncio.to_thread(bare.make, arguments.images)
            alone.idle_ms.append(1000 * thread.idle_s() / arguments.images)
            alone.s.append(found["s"])
            alone.cpu_ms.setdefault("bare", []).append(1000 * found["cpu_s"])
            alone.rss_mb["bare"] = found["rss_mb"]
            for case, at_once in ((one, False), (queued, True)):
                before = {name: cpu_s(p.pid) for name, p in processes.items()}
                thread = ModelThread(processes["diffusion"].pid)
                began_s = time.perf_counter()
                digests = await requests(client, arguments, arguments.images, at_once=at_once)
                case.s.append((time.perf_counter() - began_s) / arguments.images)
                case.idle_ms.append(1000 * thread.idle_s() / arguments.images)
                case.equal &= digests == found["sha256"]
                for name, process in processes.items():
                    spent_s = cpu_s(process.pid) - before[name]
                    case.cpu_ms.setdefault(name, []).append(1000 * spent_s / arguments.images)
                    case.rss_mb[name] = rss_mb(process.pid)
    return [alone, one, queued]


def table(cases: list[Case]) -> str:
    """Lay the figures out for a terminal."""
    line = "{:16}{:>12}{:>10}  {:18}{:>9}{:>7}  {}"
    lines = [line.format("", "images/min", "overhead", "(half)", "idle ms", "equal", "CPU, RSS")]
    for case in cases:
        overheads = case.overheads(cases[0])
        quarter = len(overheads) // 4
        spread = f"({overheads[quarter]:+.1%} to {overheads[-1 - quarter]:+.1%})"
        spent = ", ".join(
            f"{name} {statistics.median(ms):.1f} ms {case.rss_mb[name]:.0f} MB"
            for name, ms in case.cpu_ms.items()
        )
        equal = "yes" if case.equal else "NO"
        overhead, rate = f"{statistics.median(overheads):+.1%}", f"{60 / case.median_s:.1f}"
        idle = f"{statistics.median(case.idle_ms):.1f}"
        lines.append(line.format(case.name, rate, overhead, spread, idle, equal, spent))
    return "\n".join(lines)


def main() -> int:
    """Parse arguments, measure, print; return 1 if an image was another than the bare one's."""
    parser = parser_of("images", __doc__)
    parser.add_argument("--model", type=Path, default=_DEMO, help="a pipeline's folder (the demo)")
    parser.add_argument("--images", type=int, default=5, help="images per round (5)")
    parser.add_argument("--rounds", type=int, default=20, help="(20)")
    parser.add_argument("--size", type=int, default=64, help="pixels of a side (64)")
    parser.add_argument("--steps", type=int, default=20, help="(20)")
    parser.add_argument("--guidance", type=float, default=3.0, help="(3)")
    arguments = parser.parse_args()
    with folder_for(arguments) as folder:
        bare = BarePipeline(
            arguments.model,
            width=arguments.size,
            height=arguments.size,
            steps=arguments.steps,
            guidance_scale=arguments.guidance,
        )
        try:
            bare.wait_ready()
            with services(arguments, folder) as processes:
                cases = asyncio.run(measure(arguments, bare, processes))
        finally:
            bare.close()
    if arguments.json:
        print(json.dumps([vars(case) for case in cases]))  # noqa: T201
    else:
        print(table(cases))  # noqa: T201
    return int(not all(case.equal for case in cases))


if __name__ == "__main__":
    sys.exit(main())
