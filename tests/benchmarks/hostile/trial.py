"""One row's processes: a Processor and a worker of their own, a normal client, an attacker."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.benchmarks.hostile.attacker import Order, Report
from tests.benchmarks.hostile.attacks.calls import FORGED
from tests.benchmarks.hostile.credentials import ATTACKER_KEY, NORMAL_KEY, Files
from tests.benchmarks.hostile.normal import Chat, NormalClient, NormalOptions
from tests.benchmarks.hostile.rows import Row
from tests.support.models.models import byte_level_model
from tests.support.processes.ports import free_port
from tests.support.processes.processes import cpu_s, rss_mb
from tests.support.processes.suite import ServiceProcess, stop_all

TEMPLATE = "{% for message in messages %}{{ message.role }}:{{ message.content }}\n{% endfor %}"
MOST_RSS_MB = 2_500.0
"""An attack that makes the Processor larger is ended: the machine has other users."""
_STEP_S, _SLOW_STEP_S = 0.01, 1.0
_WARM_CHATS = 6
_SAMPLE_S = 0.05
_START_S = 30.0
_PROBE_S = 10.0
_QUIET_S, _QUIET_CORES = 30.0, 0.2
_TURN_ENDED = b": turn ended request="
_QUOTED = re.compile(rb'"(?:[^"\\]|\\.)*"')


@dataclass
class Attacked:
    """What an attack did to the processes."""

    report: Report
    began: float
    ended: float
    idle_mb: float
    peak_mb: float
    processor_cores: float
    worker_cores: float
    stopped: bool
    """Ended early, because of MOST_RSS_MB."""


@dataclass
class Trial:
    """The processes of one row; `running` starts and stops them."""

    row: Row
    folder: Path
    """Of the Processor."""
    source: str
    files: Files
    worker: ServiceProcess = field(init=False)
    slow: list[ServiceProcess] = field(init=False)
    """The worker of the slow model, if the row has one."""
    processor: ServiceProcess = field(init=False)
    health_port: int = field(init=False, default_factory=free_port)
    metrics_port: int = field(init=False, default_factory=free_port)
    log_from: int = 0

    def __post_init__(self) -> None:
        """Make the services; none is started."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for log in self.folder.glob("*.log"):  # of an earlier run with --logs
            log.unlink()
        self.worker = self._worker_of("tiny", _STEP_S)
        self.slow = [self._worker_of("slow", _SLOW_STEP_S)] if self.row.slow_model else []
        secure = self.files.flags(tls=self.row.tls, keys=self.row.keys)
        names = ("tiny", "slow") if self.slow else ("tiny",)
        model = _model(self.folder.parent)
        self.processor = ServiceProcess("millstream_server.processor", {
            "models": ",".join(f"{name}={model}" for name in names),
            "workers": ",".join(worker.address for worker in (self.worker, *self.slow)),
            "health_listen": f"127.0.0.1:{self.health_port}",
            "metrics_listen": f"127.0.0.1:{self.metrics_port}",
            **secure,
        }, self.folder / "processor.log")  # fmt: skip

    def _worker_of(self, model: str, step_s: float) -> ServiceProcess:
        return ServiceProcess("millstream_server.decode", {
            "engine": "simulated", "model_name": model, "context_length": 4096,
            "simulated_vocab_size": 440,
            "simulated_step_s": step_s, "log_level": "warning",
        }, self.folder / f"{model}.log")  # fmt: skip

    def start(self) -> None:
        """Start, and wait until the Processor is healthy."""
        for worker in (self.worker, *self.slow):
            worker.start()
        self.processor.start()
        deadline = time.monotonic() + _START_S
        with grpc.insecure_channel(f"127.0.0.1:{self.health_port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while time.monotonic() < deadline and self.processor.alive:
                with contextlib.suppress(grpc.RpcError):
                    answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=2)
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                time.sleep(0.05)
        raise AssertionError("not serving:\n" + self.processor.log.read_text()[-6000:])

    def stop(self) -> None:
        stop_all(self.processor, self.worker, *self.slow)

    @contextlib.contextmanager
    def normal(self) -> Iterator[NormalClient]:
        """Start a normal client, and wait until its chats are answered."""
        options = NormalOptions(
            address=self.processor.address,
            key=NORMAL_KEY if self.row.keys else None,
            **self.files.of_sound(self.row.tls),
        )
        with NormalClient(options) as client:
            deadline = time.monotonic() + _START_S
            while not _warm(client.chats):
                assert time.monotonic() < deadline, f"no normal chat succeeds: {client.chats[-3:]}"
                time.sleep(_SAMPLE_S)
            yield client

    def attack(self, order: Order) -> Attacked:
        """Run an attack to its end, looking at memory meanwhile."""
        self.log_from = self.processor.log.stat().st_size
        pids = self.processor.pid, self.worker.pid
        idle_mb = peak_mb = rss_mb(pids[0])
        before, began, stopped = [cpu_s(pid) for pid in pids], time.monotonic(), False
        after = before
        process = start_attacker(order)
        while process.poll() is None:
            with contextlib.suppress(OSError, IndexError, ValueError):  # it has just died
                peak_mb = max(peak_mb, rss_mb(pids[0]))
                after = [cpu_s(pid) for pid in pids]
            if peak_mb > MOST_RSS_MB:
                stopped = True
                process.kill()
            time.sleep(_SAMPLE_S)
        ended = time.monotonic()
        report = finish_attacker(process, began)
        spent = [(b - a) / (ended - began) for a, b in zip(before, after, strict=True)]
        return Attacked(report, report.began, ended, idle_mb, peak_mb, spent[0], spent[1], stopped)

    def probed_s(self, seconds: float) -> float:
        """Probe for so long, four times a second; return the longest that one took."""
        until, longest_s = time.monotonic() + seconds, 0.0
        port = self.health_port if self.row.tls else self.processor.port
        url = f"http://127.0.0.1:{port}/livez"
        while (began := time.monotonic()) < until and self.processor.alive:
            with contextlib.suppress(OSError), urlopen(url, timeout=_PROBE_S) as answer:
                answer.read()
            took_s = time.monotonic() - began
            longest_s = max(longest_s, took_s)
            time.sleep(max(0.0, 0.25 - took_s))
        return longest_s

    def order(self, seconds: float) -> Order:
        """Say what the attacker does here."""
        row = self.row
        key = {"nobody": None, "known": ATTACKER_KEY, "wrong": "w" * 32}[row.attacker]
        return Order(
            attack=row.attack,
            port=self.health_port if row.to_health else self.processor.port,
            seconds=max(seconds, row.seconds),
            source=self.source,
            sources=row.sources,
            key=key,
            knobs={**row.knobs, **self.files.of_attacker(row.attack)},
        )

    def until_quiet(self) -> None:
        """Wait until the services have nothing more to do, or for half a minute."""
        deadline = time.monotonic() + _QUIET_S
        with contextlib.suppress(OSError, IndexError, ValueError):
            while time.monotonic() < deadline:
                before = cpu_s(self.processor.pid) + cpu_s(self.worker.pid)
                time.sleep(0.5)
                spent = cpu_s(self.processor.pid) + cpu_s(self.worker.pid) - before
                if spent < 0.5 * _QUIET_CORES:
                    return

    def logged(self) -> tuple[int, int, int]:
        """Count what the Processor wrote since the attack: lines, bytes, forged fields.

        A line for each turn is what an operator wants, so those don't count as lines.
        """
        with self.processor.log.open("rb") as log:
            log.seek(self.log_from)
            text = log.read()
        lines = [line for line in text.splitlines() if _TURN_ENDED not in line]
        return len(lines), len(text), _QUOTED.sub(b"", text).count(f" {FORGED}=".encode())


def start_attacker(order: Order) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.benchmarks.hostile.attacker", json.dumps(vars(order))],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "GRPC_VERBOSITY": "NONE"},
    )


def finish_attacker(process: subprocess.Popen[str], began: float) -> Report:
    """Read the report; one that was killed has none."""
    printed, _ = process.communicate()
    if printed.strip():
        return Report(**json.loads(printed))
    killed = process.returncode < 0
    broken = [] if killed else [f"the attacker failed with {process.returncode}"]
    seconds = time.monotonic() - began
    return Report(began, seconds, 0, 0, 0, 0, 0.0, {"attacker ended early": 1}, broken)


def alone(order: Order, report: Mapping[str, Any], port: int, seconds: float) -> Order:
    """Make an attack's order against a process that discards, with the bytes a second it sent."""
    per_s = report["sent_bytes"] / max(report["seconds"], 0.1)
    return dataclasses.replace(
        order, port=port, seconds=seconds, alone=True, bytes_per_s=max(per_s, 1.0)
    )


def _warm(chats: list[Chat]) -> bool:
    return len(chats) >= _WARM_CHATS and all(c.code == "OK" for c in chats[-_WARM_CHATS:])


def _model(folder: Path) -> Path:
    model = folder / "model"
    if not model.exists():
        byte_level_model(model, tokenizer_config={"chat_template": TEMPLATE})
    return model
