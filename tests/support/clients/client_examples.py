"""What the example client of each language does, and the live suite that it does it to.

An example reads its settings from the environment and writes a JSON object per line. Over one
channel, with the service config, it sends the key and `traceparent` with every call, and

1. asks for health: ``{"event": "health", "status": "SERVING"}``;
2. chats. Each message with text is printed as it comes: ``{"event": "delta", "turn": 1, "text":
   "AB"}``. The first turn, of 400 tokens, is cancelled by a message after its third delta; the
   second one, on the same stream, has 5 tokens. Each ends with ``{"event": "finished", "turn": 1,
   "finish_reason": "FINISH_REASON_CANCELLED", "completion_tokens": 9}``, the stream with
   ``{"event": "ended", "call": "chat", "code": "OK"}``;
3. runs a Complete of 400 tokens with a deadline of 0.5 s: ``{"event": "ended", "call": "deadline",
   "code": "DEADLINE_EXCEEDED"}``;
4. runs Completes that fail, "invalid" (a top_p of 2), "overloaded" (to the model that is full) and
   "no_key" (without a key): ``{"event": "error", "call": "invalid", "code": "INVALID_ARGUMENT",
   "message": "…", "reason": "INVALID_REQUEST", "domain": "millstream.io", "retryable": false,
   "violations": [{"field": "…", "description": "…"}], "retry_delay_s": null}``;
5. runs MILLSTREAM_CALLS (9) Completes of 1 token: ``{"event": "balanced", "calls": 9}``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import secrets
import signal
import subprocess
from collections.abc import Iterator, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from millstream.v1 import processor_pb2, processor_pb2_grpc, sampling_pb2
from millstream_client import service_config
from tests.support.processes.simulated_suite import MODEL, SimulatedSuite
from tests.support.processes.suite import ServiceProcess

API_KEY = secrets.token_hex(16)
FULL_MODEL = "full"
RECOMMENDED = service_config.to_json(service_config.RECOMMENDED)
ROUND_ROBIN = service_config.to_json(
    {**service_config.RECOMMENDED, "loadBalancingConfig": [{"round_robin": {}}]}
)
_RUN_LIMIT_S = 60.0


@dataclass(frozen=True)
class Run:
    """What an example printed, and what each Processor's log says of its trace."""

    events: list[dict[str, Any]]
    logs: list[list[str]]

    def of(self, event: str) -> list[dict[str, Any]]:
        """Return the events of one kind, in order."""
        return [one for one in self.events if one["event"] == event]

    def call(self, name: str) -> dict[str, Any]:
        """Return how a call ended."""
        (found,) = [one for one in self.events if one.get("call") == name]
        return found


@dataclass
class ExampleSuite:
    """Two Processors that want a key, in front of a paced worker and of one that is full.

    Beside them runs a server that says SERVING and fails all calls: who gets by it retries.
    """

    folder: Path
    broken: str = ""
    """That server's address."""
    suite: SimulatedSuite = field(init=False)

    def __post_init__(self) -> None:
        """Add the services."""
        self.suite = SimulatedSuite(self.folder, env={"MILLSTREAM_API_KEYS": f"tests:{API_KEY}"})
        self.suite.add_worker("worker", simulated_step_s=0.02)
        self.suite.add_worker("full", model=FULL_MODEL, simulated_step_s=1, context_length=4096)
        for name in ("processor-1", "processor-2"):
            self.suite.add_processor(
                name,
                max_admitted_requests=1,
                max_queued_requests=1,
                log_level="info",
            )

    @property
    def processors(self) -> list[ServiceProcess]:
        return list(self.suite.processors.values())

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Start all, fill the queues of the full model, stop all."""
        with self.suite.running(), contextlib.ExitStack() as calls:
            self.broken = calls.enter_context(_broken_server())
            for processor in self.processors:
                calls.enter_context(_filled(processor.address))
            yield

    def run(
        self,
        command: Sequence[str],
        *,
        retries: bool = True,
        config: str = RECOMMENDED,
        calls: int = 9,
    ) -> Run:
        """Run an example to its end, and read what it printed."""
        (file := self.folder / "service_config.json").write_text(config)
        trace_id = secrets.token_hex(16)
        addresses = [one.address for one in self.processors] + [self.broken] * retries
        settings = {
            "MILLSTREAM_ADDRESSES": ",".join(addresses),
            "MILLSTREAM_API_KEY": API_KEY,
            "MILLSTREAM_MODEL": MODEL,
            "MILLSTREAM_FULL_MODEL": FULL_MODEL,
            "MILLSTREAM_SERVICE_CONFIG": str(file),
            "MILLSTREAM_CALLS": str(calls),
            "TRACEPARENT": f"00-{trace_id}-{secrets.token_hex(8)}-01",
        }
        done = subprocess.run(
            command,
            env={**os.environ, **settings},
            capture_output=True,
            text=True,
            timeout=_RUN_LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
        events = [json.loads(line) for line in done.stdout.splitlines()]
        return Run(events, [_lines_of(one, trace_id) for one in self.processors])

    def cpu_s(self, command: Sequence[str], config: str, calls: int) -> float:
        """Run an example that makes so many calls; return the CPU time of its process."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.run(command, retries=False, config=config, calls=calls)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    def check_ask(self, command: Sequence[str | Path]) -> None:
        """Run a page's program: it asks a question, and says why the full model refuses."""
        for model, code, out, error in (
            (MODEL, 0, "ABCDE\n5 tokens\n", ""),
            (FULL_MODEL, 1, "", "OVERLOADED: the server is busy"),
        ):
            done = subprocess.run(
                [*command, self.processors[0].address, model],
                env={**os.environ, "MILLSTREAM_API_KEY": API_KEY},
                capture_output=True,
                text=True,
                timeout=_RUN_LIMIT_S,
                check=False,
            )
            assert (done.returncode, done.stdout) == (code, out), done.stderr
            assert error in done.stderr

    def check_cancel(self, command: Sequence[str | Path]) -> None:
        """Run a page's program and end its answer as Ctrl-C does: it says what was generated."""
        many = 400
        program = subprocess.Popen(
            [*command, self.processors[0].address, MODEL, str(many)],
            env={**os.environ, "MILLSTREAM_API_KEY": API_KEY},
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert program.stdout
            assert program.stdout.read(1) == "A"
            program.send_signal(signal.SIGINT)
            out, _ = program.communicate(timeout=_RUN_LIMIT_S)
        finally:
            program.kill()
        (count,) = re.findall(r"\n(\d+) tokens\n$", out)
        assert (program.returncode, 0 < int(count) < many) == (0, True)


def _lines_of(processor: ServiceProcess, trace_id: str) -> list[str]:
    lines = processor.log.read_text().splitlines()
    return [line for line in lines if f"trace_id={trace_id}" in line]


@contextlib.contextmanager
def _broken_server() -> Iterator[str]:
    server: Any = grpc.server(futures.ThreadPoolExecutor(8))
    servicer = health.HealthServicer()
    for name in ("accepting", "millstream.v1.ProcessorService"):
        servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    handlers = {
        "Chat": grpc.stream_stream_rpc_method_handler(_refuse),
        "Complete": grpc.unary_stream_rpc_method_handler(_refuse),
    }
    server.add_registered_method_handlers("millstream.v1.ProcessorService", handlers)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield address
    finally:
        server.stop(0).wait()


def _refuse(_request: Any, context: Any) -> None:
    context.abort(grpc.StatusCode.UNAVAILABLE, "broken on purpose")


@contextlib.contextmanager
def _filled(address: str) -> Iterator[None]:
    """Hold the one request that may run and the one that may wait."""
    request = processor_pb2.CompleteRequest(
        model=FULL_MODEL,
        text="A",
        options=processor_pb2.GenerationOptions(
            sampling=sampling_pb2.SamplingParams(max_new_tokens=4000, ignore_eos=True)
        ),
    )
    with grpc.insecure_channel(address) as plain:
        channel: Any = plain
        stub: Any = processor_pb2_grpc.ProcessorServiceStub(channel)

        def call() -> Any:
            return stub.Complete(request, metadata=[("authorization", f"Bearer {API_KEY}")])

        calls = [call()]
        next(calls[0])
        # Of two more one waits, and the other one is refused.
        calls += [call(), call()]
        with futures.ThreadPoolExecutor(2) as threads:
            codes = [threads.submit(one.code) for one in calls[1:]]
            ended, _ = futures.wait(codes, timeout=30, return_when=futures.FIRST_COMPLETED)
            try:
                assert [one.result() for one in ended] == [grpc.StatusCode.RESOURCE_EXHAUSTED]
                yield
            finally:
                for one in calls:
                    one.cancel()
