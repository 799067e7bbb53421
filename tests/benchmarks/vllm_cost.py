"""What a token of vLLM costs the process that serves it: our worker beside vLLM's own server.

    .venv-vllm/bin/python -m tests.benchmarks.vllm_cost              # a table, about ten minutes
    .venv-vllm/bin/python -m tests.benchmarks.vllm_cost --metrics --streams 64 --rounds 3

Streams of a tiny model on the CPU, one token a step and stream. Two servers take turns, each with
a vLLM of its own, started with the same arguments:

- worker: a decode worker, `python -m millstream_server.decode --engine vllm`, its tokens sent over
  its stream to this process, as to a Processor,
- server: vLLM's API server in the way that costs it least: `--tokens-only`, so token ids in and out
  at /inference/v1/generate, streamed; no tokenizer, no access log.

Neither keeps metrics; with `--metrics` both do, as they do by default.

A figure is CPU µs per token, user and system, of all threads of the server's main process: without
vLLM's core process and its workers, without this client. Medians of the rounds, beside the lowest
and the highest; `ratio` is that of a round, worker to server. The first round warms up; who begins
changes from round to round. `load` is the machine's, when a row is done.

A message is what one stream got at once. vLLM's server puts several tokens into one when it falls
behind, which makes its tokens cheaper: see `tokens_per_message`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp
import uvloop

from millstream_server.engines.vllm import config as vllm_config
from millstream_server.engines.vllm import launch
from tests.benchmarks.against import spread
from tests.support.benchmarks.token_load import Spent, over_the_wire, prompt
from tests.support.models.models import make_random_model
from tests.support.processes.ports import free_port
from tests.support.processes.processes import cpu_s
from tests.support.processes.suite import ServiceProcess

_POOL_TOKENS = 131_072
_START_S = 600
_STOP_S = 90
_KINDS = ("worker", "server")

Burst = Callable[[int, int], Spent]
"""Runs so many streams of so many tokens."""


@dataclass(frozen=True)
class Row:
    """Of so many streams: by kind, and the ratio of worker to server; min, median and max."""

    streams: int
    tokens: int
    rounds: int
    us_per_token: dict[str, dict[str, float]]
    tokens_per_message: dict[str, dict[str, float]]
    ratio: dict[str, float]
    load: float


class ApiServer:
    """vLLM's API server in a process of its own."""

    def __init__(self, engine: vllm_config.VllmEngineConfig, log: Path, *, metrics: bool) -> None:
        self._url = f"http://127.0.0.1:{free_port()}"
        self._log = log
        arguments = vllm_config.engine_arguments(engine)
        block_size = int(str(arguments["block_size"]))
        blocks = vllm_config.total_blocks(engine, block_size)
        arguments["num_gpu_blocks_override"] = blocks
        flags = ["--host", "127.0.0.1", "--port", self._url.rpartition(":")[2]]
        flags += ["--tokens-only", "--disable-uvicorn-access-log"]
        flags += [] if metrics else ["--disable-log-stats"]
        environment = {**os.environ, **vllm_config.engine_environment(engine)}
        path = (str(launch.ON_PATH), os.environ.get("PYTHONPATH", ""))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [*command, *flags, *_as_flags(arguments)],
                stdout=output,
                stderr=output,
                env=environment,
            )

    async def until_started(self) -> None:
        """Wait until it answers."""
        deadline = time.monotonic() + _START_S
        async with aiohttp.ClientSession(self._url) as session:
            while time.monotonic() < deadline and self._process.poll() is None:
                with contextlib.suppress(aiohttp.ClientConnectionError):
                    async with session.get("/health") as answer:
                        if answer.status == 200:
                            return
                await asyncio.sleep(0.2)
        raise AssertionError(f"vLLM's server doesn't answer:\n{self._log.read_text()[-6000:]}")

    async def spend(self, streams: int, tokens: int) -> Spent:
        """Run a burst."""
        unlimited = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            self._url, connector=unlimited, timeout=aiohttp.ClientTimeout()
        ) as session:
            before = cpu_s(self._process.pid)
            counts = await asyncio.gather(
                *(_stream(session, number, tokens) for number in range(streams))
            )
            spent_s = cpu_s(self._process.pid) - before
        assert [count for count, _ in counts] == [tokens] * streams
        return Spent(spent_s, sum(messages for _, messages in counts))

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()


def _as_flags(arguments: Mapping[str, object]) -> Iterator[str]:
    """Write arguments of vLLM's engine as its command line has them."""
    for name, value in arguments.items():
        if value is False:
            continue
        yield "--" + name.replace("_", "-")
        if value is not True:
            yield json.dumps(value) if isinstance(value, dict) else str(value)


async def _stream(session: aiohttp.ClientSession, number: int, tokens: int) -> tuple[int, int]:
    """Run one request; return the number of its tokens and of its messages."""
    sampling = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    body = {"token_ids": prompt(number), "sampling_params": sampling, "stream": True}
    got = messages = 0
    async with session.post("/inference/v1/generate", json=body) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                got += len(json.loads(line[6:])["choices"][0]["token_ids"])
                messages += 1
    return got, messages


@contextlib.contextmanager
def started(folder: Path, streams: int, *, metrics: bool) -> Iterator[dict[str, Burst]]:
    """Start both; give what runs a burst on each."""
    model = str(make_random_model(folder / "tiny", heads=2))
    flags = {
        "engine": "vllm",
        "model_path": model,
        "model_name": "tiny",
        "max_running_requests": streams,
        "max_total_tokens": _POOL_TOKENS,
        "metrics_listen": f"127.0.0.1:{free_port()}" if metrics else "",
    }
    worker = ServiceProcess("millstream_server.decode", flags, folder / "worker.log")
    engine = vllm_config.VllmEngineConfig(
        model_path=model,
        served_model_name="tiny",
        max_running_requests=streams,
        max_total_tokens=_POOL_TOKENS,
    )
    with (
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        contextlib.ExitStack() as stack,
    ):
        server = ApiServer(engine, folder / "server.log", metrics=metrics)
        stack.callback(server.stop)
        stack.callback(worker.stop, _STOP_S)
        worker.start()  # both load at the same time
        worker.wait_serving(_START_S)
        runner.run(server.until_started())
        yield {
            "worker": lambda n, tokens: runner.run(over_the_wire(worker, n, tokens)),
            "server": lambda n, tokens: runner.run(server.spend(n, tokens)),
        }


def measure(streams: Sequence[int], tokens: int, rounds: int, *, metrics: bool) -> Iterator[Row]:
    """Measure one row after the other."""
    with (
        tempfile.TemporaryDirectory() as folder,
        started(Path(folder), max(streams), metrics=metrics) as kinds,
    ):
        for count in streams:
            found: dict[str, list[Spent]] = {kind: [] for kind in _KINDS}
            for number in range(rounds + 1):
                for kind in _KINDS if number % 2 else reversed(_KINDS):
                    spent = kinds[kind](count, tokens)
                    if number:
                        found[kind].append(spent)
            yield _row(count, tokens, found)


def _row(streams: int, tokens: int, found: Mapping[str, Sequence[Spent]]) -> Row:
    each = streams * tokens
    costs = {kind: [1e6 * s.cpu_s / each for s in spent] for kind, spent in found.items()}
    ratios = [a / b for a, b in zip(costs["worker"], costs["server"], strict=True)]
    return Row(
        streams=streams,
        tokens=tokens,
        us_per_token={kind: _spread(us, 1) for kind, us in costs.items()},
        tokens_per_message={
            kind: _spread([each / s.messages for s in spent], 2) for kind, spent in found.items()
        },
        ratio=_spread(ratios, 2),
        rounds=len(ratios),
        load=round(os.getloadavg()[0], 1),
    )


def _spread(values: Sequence[float], digits: int) -> dict[str, float]:
    return {name: round(value, digits) for name, value in spread(values).items()}


def _line(row: Row) -> str:
    costs = ", ".join(
        f"{kind} {_said(us)}, {_said(row.tokens_per_message[kind])} tokens a message"
        for kind, us in row.us_per_token.items()
    )
    return (
        f"{row.streams} streams, {row.rounds} rounds, load {row.load}: µs per token: {costs}; "
        f"worker / server {_said(row.ratio)}"
    )


def _said(values: Mapping[str, float]) -> str:
    return f"{values['median']} ({values['min']} to {values['max']})"


def main() -> int:
    """Parse arguments, measure, report."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.vllm_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object a line, no table")
    parser.add_argument("--streams", default="64,128,256", help="how many at once (64,128,256)")
    parser.add_argument("--tokens", type=int, default=150, help="of each answer (150)")
    parser.add_argument("--rounds", type=int, default=5, help="of each kind (5)")
    parser.add_argument("--metrics", action="store_true", help="with the metrics of both")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    streams = [int(count) for count in arguments.streams.split(",")]
    rows = measure(streams, arguments.tokens, arguments.rounds, metrics=arguments.metrics)
    for row in rows:
        print(json.dumps(asdict(row)) if arguments.json else _line(row), flush=True)  # noqa: T201
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
