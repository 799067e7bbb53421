"""How many images go through Processor and encode worker a second, and what each of them costs.

    python -m tests.benchmarks.media                          # a table, under a minute
    python -m tests.benchmarks.media --family gemma3 --size 1024 768 --json
    python -m tests.benchmarks.media --real                   # SGLang's engines, two minutes

A Processor, an encode worker with transformers' own vision tower on a small random model, and an
aggregated worker on the simulated engine, whose steps take no time; each a process of its own. Each
chat has one image, sent in its one message, and is answered with one token. Rows:

    new       every image is another file: sent, decoded, prepared, through the tower, stored
    cached    the same few files again and again: only their hashes are sent to the encode worker
    one, new; one, cached     the same with one chat at a time
    text      chats of as many prompt tokens without an image, as a yardstick

The images are JPEGs of noise, the dearest to decode. CPU per image is what the kernel charged to a
process, user and system, divided by the images; "decoders" are the encode worker's child processes.
The tower is tiny: a real one costs more, and the rest costs the same. TTFT is measured by the
client from its call to the first token. When "busy" nears the machine's cores, the machine is the
limit, and the client, which is in the figures, one of its users.

With --real all are real: SGLang's tower, a prefill and a decode worker on SGLang, one chat at a
time. The last row is a bare sgl.Engine, alone on the machine, that is given the embeddings of an
image of this size in the same dict: what is above its TTFT is ours (and the hand-off's).
"""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from millstream.v1 import chat_pb2
from tests.support.benchmarks.verdict import folder_for, parser_of
from tests.support.media.media_files import saved
from tests.support.media.media_processes import MediaProcesses, decoders_of, metric
from tests.support.media.media_suite import image, user
from tests.support.models.vision_models import FAMILIES, make_vision_model
from tests.support.processes.processes import cpu_s
from tests.support.processes.simulated_suite import channels_to
from tests.support.processor.chats import Conversation, options, start

_AT_ONCE = 16
_CACHED_FILES = 8
_WARM_UP = 0.2
_CHANNELS = 4
_BARE_TIMES = 100
_ONE_TOKEN = options(1, ignore_eos=True)
_COLUMNS = ("case", "images/s", "processor", "encode", "decoders", "generate", "client")

Message = chat_pb2.ChatMessage


@dataclass
class Row:
    """Figures of one case."""

    case: str
    images: int
    images_per_s: float
    cpu_ms_per_image: dict[str, float]
    ttft_ms_p50: float
    ttft_ms_p99: float
    busy_cores: float
    encoded: int
    """Images that went through the tower."""


@dataclass
class Load:
    """Chats that follow one another."""

    stubs: list[Any]
    messages: Iterator[Message]
    ttft_s: list[float] = field(default_factory=list)

    async def run(self, at_once: int, seconds: float) -> float:
        """Run ``at_once`` chats at a time; return how long it went."""
        began = time.monotonic()
        ends = began + seconds
        await asyncio.gather(*(self._chats(n, ends) for n in range(at_once)))
        return time.monotonic() - began

    async def _chats(self, number: int, ends: float) -> None:
        stub = self.stubs[number % len(self.stubs)]
        while (began := time.monotonic()) < ends:
            chat = Conversation(stub)
            await chat.say(start(messages=[next(self.messages)], opts=_ONE_TOKEN))
            await chat.read()
            self.ttft_s.append(time.monotonic() - began)
            await chat.end()


def jpeg(size: tuple[int, int]) -> bytes:
    """Make a photo's worth of noise."""
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return saved(Image.fromarray(pixels), "JPEG", quality=75)


def prompt_tokens(file: bytes, cell: int, most: int) -> int:
    """Guess how many tokens an image takes, for a text of as many."""
    width, height = Image.open(io.BytesIO(file)).size
    return min(most, int(width // cell) * int(height // cell))


def _new(file: bytes, numbers: Iterator[int]) -> Iterator[Message]:
    # What follows a JPEG's end belongs to the file, and not to the picture.
    return (user("What?", image(file + number.to_bytes(8, "big"))) for number in numbers)


def _cached(file: bytes) -> Iterator[Message]:
    return itertools.cycle([next(_new(file, iter([n]))) for n in range(_CACHED_FILES)])


def _text(tokens: int) -> Iterator[Message]:
    return itertools.repeat(user("x" * tokens))


@dataclass
class Bench:
    """The running services."""

    suite: MediaProcesses
    stubs: list[Any]
    seconds: float

    async def measure(self, case: str, messages: Iterator[Message], at_once: int) -> Row:
        """Warm up, then measure."""
        await Load(self.stubs, messages).run(at_once, _WARM_UP * self.seconds)
        encoded = await self._encoded()
        before, load = self._cpu_s(), Load(self.stubs, messages)
        took_s = await load.run(at_once, self.seconds)
        spent = {name: s - before[name] for name, s in self._cpu_s().items()}
        ttft_ms = sorted(1000 * s for s in load.ttft_s)
        return Row(
            case=case,
            images=len(ttft_ms),
            images_per_s=len(ttft_ms) / took_s,
            cpu_ms_per_image={name: 1000 * s / len(ttft_ms) for name, s in spent.items()},
            ttft_ms_p50=statistics.median(ttft_ms),
            ttft_ms_p99=ttft_ms[int(len(ttft_ms) * 0.99)],
            busy_cores=sum(spent.values()) / took_s,
            encoded=await self._encoded() - encoded,
        )

    def _cpu_s(self) -> dict[str, float]:
        services = self.suite.services
        spent = {name: cpu_s(service.pid) for name, service in services.items()}
        spent["decoders"] = sum(cpu_s(pid) for pid in decoders_of(services["encode"].pid))
        spent["client"] = time.process_time()
        return spent

    async def _encoded(self) -> int:
        encode = self.suite.services["encode"]
        return int(await metric(encode, "millstream_encode_lookups_total", result="miss"))


async def measure(arguments: argparse.Namespace, suite: MediaProcesses) -> list[Row]:
    """Measure all cases on running services."""
    file = jpeg(tuple(arguments.size))
    tokens = prompt_tokens(file, 28, 64)
    numbers = itertools.count(1 << 32)
    cases: dict[str, tuple[Callable[[], Iterator[Message]], int]] = {
        "new": (lambda: _new(file, numbers), _AT_ONCE),
        "cached": (lambda: _cached(file), _AT_ONCE),
        "one, new": (lambda: _new(file, numbers), 1),
        "one, cached": (lambda: _cached(file), 1),
        "text": (lambda: _text(tokens), _AT_ONCE),
        "one, text": (lambda: _text(tokens), 1),
    }
    if arguments.real:
        cases = {name: (make, n) for name, (make, n) in cases.items() if n == 1}
    async with (
        suite.client(),
        channels_to(suite.services["processor"], _CHANNELS) as stubs,
    ):
        bench = Bench(suite, stubs, arguments.seconds)
        return [await bench.measure(name, make(), n) for name, (make, n) in cases.items()]


def bare(arguments: argparse.Namespace, model: Path) -> float:
    """Return the median TTFT of an engine that is called without any service, in ms."""
    size = [str(number) for number in arguments.size]
    run = [
        sys.executable,
        "-m",
        "tests.support.benchmarks.bare_media",
        str(model),
        *size,
        str(_BARE_TIMES),
    ]
    done = subprocess.run(run, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    took_s: list[float] = json.loads(done.stdout)["ttft_s"]
    return 1000 * statistics.median(took_s[_BARE_TIMES // 4 :])


def services(arguments: argparse.Namespace, folder: Path) -> MediaProcesses:
    """Make the services; nothing runs yet."""
    suite = MediaProcesses(folder, make_vision_model(folder / "model", arguments.family))
    if not arguments.real:
        suite.add_encode(engine="transformers")
        suite.add_decode(simulated_step_s=0)
    else:
        suite.add_encode(engine="auto")
        real = {"engine": "sglang", "context_length": None, "simulated_vocab_size": None}
        suite.add_prefill(**real, max_total_tokens=16384)
        suite.add_decode(
            **real, simulated_step_s=None, mode="disaggregated", max_total_tokens=16384
        )
    suite.add_processor()
    return suite


def table(rows: list[Row]) -> str:
    """Lay the figures out for a terminal."""
    line = "{:12}{:>10}" + "{:>11}" * 5 + "{:>12}{:>9}{:>7}{:>9}"
    lines = [
        "CPU in ms per image",
        line.format(*_COLUMNS, "TTFT p50 ms", "p99 ms", "busy", "encoded"),
    ]
    for row in rows:
        cpu = row.cpu_ms_per_image
        spent = [cpu[name] for name in ("processor", "encode", "decoders", "client")]
        spent.insert(3, cpu["decode"] + cpu.get("prefill", 0.0))
        cells = [row.images_per_s, *spent, row.ttft_ms_p50, row.ttft_ms_p99, row.busy_cores]
        share = f"{row.encoded / row.images:.0%}"
        lines.append(line.format(row.case, *(f"{cell:.1f}" for cell in cells), share))
    return "\n".join(lines)


def main() -> None:
    """Parse arguments, measure, print."""
    parser = parser_of("media", __doc__)
    parser.add_argument("--family", choices=FAMILIES, default="qwen3_vl", help="(qwen3_vl)")
    parser.add_argument(
        "--size", type=int, nargs=2, default=[640, 480], metavar=("W", "H"), help="(640 480)"
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="about how long each takes (5)")
    parser.add_argument("--real", action="store_true", help="with SGLang's engines; not Gemma 3")
    arguments = parser.parse_args()
    with folder_for(arguments) as folder:
        suite = services(arguments, folder)
        with suite.running():
            rows = asyncio.run(measure(arguments, suite))
        bare_ms = bare(arguments, suite.model) if arguments.real else None
    if arguments.json:
        print(json.dumps({"rows": [vars(r) for r in rows], "bare_ttft_ms_p50": bare_ms}))  # noqa: T201
    else:
        print(table(rows))  # noqa: T201
        if bare_ms is not None:
            print(f"bare engine with the same embeddings: TTFT p50 {bare_ms:.1f} ms")  # noqa: T201


if __name__ == "__main__":
    main()
