"""`millstream top` against workers that load, run, go away and come back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from millstream.v1 import worker_pb2, worker_pb2_grpc
from millstream_server.cli.flags import Destination
from millstream_server.cli.main import main
from millstream_server.cli.suite.running import RunningSuite
from millstream_server.cli.top.rows import WorkerState, status_of
from millstream_server.cli.top.workers import Workers
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.routing.discovery.sources import Addresses
from millstream_server.runtime.errors import WorkerDrainingError
from millstream_server.runtime.lifecycle.server import Server, ServerOptions
from millstream_server.runtime.security.tls import ServerTls, TlsFiles
from millstream_testing.fake_processor import FakeServer
from millstream_testing.in_process import MODEL, suite, worker
from millstream_testing.waiting import until
from tests.support.clients.clients import tell_serving
from tests.support.processes.command_line import Terminal, millstream
from tests.support.processes.ports import free_port
from tests.support.processor.chats import chat, options
from tests.support.processor.fake_kubernetes import (
    NAMESPACE,
    FakeApiServer,
    endpoint,
    endpoint_slice,
)
from tests.support.wire.certificates import Authority, SecretMount
from tests.support.worker.scripted_admin import control

SERVICE = "millstream.v1.WorkerService"


@dataclass
class PlayedWorker:
    """A worker that says what a test sets."""

    worker_id: str = "one"
    load: worker_pb2.LoadReport = field(default_factory=worker_pb2.LoadReport)
    progress: worker_pb2.WatchLoadProgressResponse | None = None
    """While it is set the worker loads."""
    ends: asyncio.Event = field(default_factory=asyncio.Event)
    """Set: it begins to shut down."""
    intervals: list[float] = field(default_factory=list)
    serves: bool = True
    address: str = ""

    async def WatchWorkerInfo(self, _: Any, __: Any) -> AsyncIterator[Any]:
        if self.progress is None:
            info = worker_pb2.WorkerInfo(worker_id=self.worker_id, model="played")
            yield worker_pb2.WatchWorkerInfoResponse(info=info)
        await self.ends.wait()
        raise WorkerDrainingError("it shuts down")

    async def WatchLoad(self, request: Any, _: Any) -> AsyncIterator[Any]:
        self.intervals.append(request.interval.ToMicroseconds() / 1e6)
        if self.progress is None:
            yield worker_pb2.WatchLoadResponse(load=self.load)
        await asyncio.Event().wait()

    async def WatchLoadProgress(self, _: Any, __: Any) -> AsyncIterator[Any]:
        ready = worker_pb2.WatchLoadProgressResponse(stage=worker_pb2.LOAD_STAGE_READY)
        yield self.progress or ready
        if self.progress is not None:
            await asyncio.Event().wait()

    def __getattr__(self, name: str) -> Any:
        if not name[0].isupper():
            raise AttributeError(name)
        return None  # the RPCs that nobody calls here


@contextlib.asynccontextmanager
async def played(
    port: int = 0, tls: ServerTls | None = None, **fields: Any
) -> AsyncIterator[PlayedWorker]:
    one = PlayedWorker(**fields)
    server = Server((SERVICE,), ServerOptions(max_receive_bytes=4 << 20, tls=tls))
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(one, server.methods)  # type: ignore[arg-type]
    one.address = f"127.0.0.1:{await server.listen(f'127.0.0.1:{port}')}"
    await tell_serving(server, serving=one.serves and one.progress is None)
    try:
        yield one
    finally:
        await server.stop(0)


async def top(*args: str) -> int:
    """Run the command; its event loop is another thread's."""
    return await asyncio.to_thread(main, ["top", "--interval", "0.2", *args])


class Named:
    """A discovery that names what a test sets."""

    def __init__(self, *addresses: str) -> None:
        self._queue: asyncio.Queue[Addresses] = asyncio.Queue()
        self.name(*addresses)

    def name(self, *addresses: str) -> None:
        self._queue.put_nowait(frozenset(addresses))

    async def watch(self) -> AsyncIterator[Addresses]:
        while True:
            yield await self._queue.get()


@contextlib.asynccontextmanager
async def followed(discovery: Named) -> AsyncIterator[Workers]:
    workers = Workers(discovery, Destination(""), 0.2, RunningSuite(()))
    try:
        yield workers
    finally:
        await workers.aclose()


def _said(workers: Workers) -> list[str]:
    def said(state: WorkerState) -> str:
        return status_of(state, state.since_s)[0]

    return [said(state) for state in workers.states()]


# ---- once


async def test_two_simulated_workers_are_one_model(capsys: pytest.CaptureFixture[str]) -> None:
    async with worker() as one, worker() as two:
        code = await top("--once", "--workers", f"{one.address},{two.address}")
    said = capsys.readouterr().out
    lines = [line.split() for line in said.splitlines()]
    of = {line[0]: line for line in lines if line}
    for address in (one.address, two.address):
        assert of[address][1:5] == ["aggregated", "serving", "0", "0"]
    assert of[MODEL][1:6] == ["2", "of", "2", "0", "0"]
    assert code == 0
    assert "\x1b" not in said


async def test_the_processors_queue_rates_and_first_tokens_are_shown(
    text_model: TextModel, capsys: pytest.CaptureFixture[str]
) -> None:
    async with suite(text_model) as (front, one):
        await chat(front.stub, "hi", opts=options(3))
        at = ("--once", "--workers", one.address, "--address", front.address)
        assert await top(*at, "--json") == 0
        assert await top(*at) == 0
    line, *table = capsys.readouterr().out.splitlines()
    told = json.loads(line)["processor"]
    assert (told["running"], told["queued"], told["failed_per_s"]) == (0, 0, 0)
    assert told["requests_per_s"] > 0
    assert 0 < told["ttft_s"] < 5
    head, row = table[0].split(), table[1].split()
    assert head == ["processor", "run", "queue", "requests/s", "failed/s", "TTFT"]
    assert (row[:3], row[-1]) == ([front.address, "0", "0"], "ms")


async def test_json_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    load = worker_pb2.LoadReport(prompt_tokens_total=10, cached_tokens_total=4)
    async with played(load=load) as one:
        await top("--once", "--json", "--workers", one.address)
        assert one.intervals == [0.1], "two reports in each interval"
    (line,) = capsys.readouterr().out.splitlines()
    (shown,) = json.loads(line)["workers"]
    assert (shown["worker_id"], shown["hits"], shown["tokens_per_s"]) == ("one", 0.4, 0.0)


async def test_a_worker_that_loads_says_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    progress = worker_pb2.WatchLoadProgressResponse(
        stage=worker_pb2.LOAD_STAGE_LOADING_WEIGHTS,
        files_done=3,
        files_total=12,
        bytes_done=4,
        bytes_total=10,
    )
    async with played(progress=progress) as one:
        assert await top("--once", "--workers", one.address) == 0
    assert "loading: 3 of 12 files, 40 %" in capsys.readouterr().out


async def test_nobody_there_is_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    assert await top("--once", "--workers", nobody) == 1
    out = capsys.readouterr().out
    assert f"{nobody}: unreachable for 0 s: " in out
    assert "Connection refused" in out


async def test_a_cluster_is_shown_by_its_services(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every Processor and worker; TLS by the names that the chart's certificates have."""
    authority, tls, addresses = Authority(), [], {}
    async with contextlib.AsyncExitStack() as stack:
        api = await stack.enter_async_context(FakeApiServer())
        for role in ("workers", "processors"):
            files = SecretMount(tmp_path / role)
            files.put(authority.issue(f"llm-{role}.{NAMESPACE}.svc"))
            tls = ["--tls-ca-file", str(files.ca)]
            own = ServerTls(TlsFiles(files.cert, files.key, None))
            made = [await stack.enter_async_context(played(tls=own)) for _ in range(2)]
            addresses[role] = sorted(one.address for one in made)
            for address in addresses[role]:
                ports = [{"name": "grpc", "port": int(address.partition(":")[2])}]
                pod = endpoint("127.0.0.1", ready=True)
                name = f"llm-{role}"
                api.put(endpoint_slice(address, pod, ports=ports, service=name))
        monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig(tmp_path / "kubeconfig")))
        of = {role: f"k8s:{NAMESPACE}/llm-{role}" for role in addresses}
        at = ("--workers", of["workers"], "--address", of["processors"], *tls)
        once = ("top", "--once", "--json", "--interval", "0.2", "--timeout-s", "15")
        shown = await millstream(*once, *at)
        other = await millstream(*once, *at, "--worker-tls-name", "other.example")
    said = json.loads(shown.out)
    workers = [(one["address"], one["health"]) for one in said["workers"]]
    assert workers == [(address, "serving") for address in addresses["workers"]]
    front = [(one["address"], one["problem"]) for one in said["processors"]]
    # Played: it has no load reports, but TLS had no objection.
    assert [address for address, _ in front] == addresses["processors"]
    assert all("has no method xds.service.orca" in problem for _, problem in front)
    assert all("other.example" in one["problem"] for one in json.loads(other.out)["workers"])


async def test_a_processor_is_no_worker(capsys: pytest.CaptureFixture[str]) -> None:
    async with FakeServer() as front:
        assert await top("--once", "--workers", front.address) == 0
    assert "has no WorkerService: give the addresses of workers" in capsys.readouterr().out


async def test_the_suite_of_up_is_found_by_its_file_with_its_admin_ports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def service(name: str, address: str, admin: str = "") -> dict[str, str]:
        role = name.partition("-")[0]
        return {"name": name, "role": role, "model": "m", "address": address, "admin": admin}

    status = {"status": {"healthConditions": ["drained", "paused"]}}
    async with (
        played() as one,
        played(serves=False) as two,
        control("k" * 32, GetServerStatus=[status]) as admin,
    ):
        workers = [
            service("decode-1", one.address),
            service("decode-2", two.address, admin.address),
        ]
        nobody = f"127.0.0.1:{free_port()}"
        content = {"pid": 1, "services": [*workers, service("processor", nobody)]}
        (tmp_path / "suite.json").write_text(json.dumps(content))
        (tmp_path / "admin-key").write_text("k" * 32)
        assert await top("--once", "--log-dir", str(tmp_path)) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"decode-1 {one.address} unknown serving 0" in out
    assert f"decode-2 {two.address} unknown not serving: drained, paused 0" in out
    assert f"{nobody} - - - - - {nobody}: no server was reached" in out


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ("--log-dir {folder}", "no suite of `millstream up` has its logs in {folder}"),
        ("--workers a", "--workers: 'a' is not HOST:PORT"),
        ("--workers file:{folder}/none", "--workers: can't read {folder}/none"),
        ("--workers [::1 --interval 0.2", "'[::1' is not HOST:PORT"),
        ("--workers a:1 --tls-ca-file {folder}/none", "--tls-ca-file: "),
    ],
)
def test_wrong_usage_is_code_2(
    args: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", "--once", *args.format(folder=tmp_path).split()]) == 2
    assert why.format(folder=tmp_path) in capsys.readouterr().err


# ---- while it runs


async def test_a_worker_that_goes_away_and_comes_back_is_shown_as_such() -> None:
    port = free_port()
    async with followed(Named(f"127.0.0.1:{port}")) as workers:
        await until(lambda: _said(workers) == ["unreachable"])
        async with played(port) as one:
            await until(lambda: _said(workers) == ["serving"])
            one.ends.set()
            await until(lambda: _said(workers) == ["shutting down"])
        await until(lambda: _said(workers) == ["unreachable"])
        async with played(port):
            await until(lambda: _said(workers) == ["serving, back"])
        await until(lambda: _said(workers) == ["unreachable"])
        async with played(port, worker_id="two"):
            await until(lambda: _said(workers) == ["serving, restarted"])


async def test_a_worker_that_is_no_longer_named_is_gone() -> None:
    async with played() as one, played() as two:
        named = Named(one.address, two.address)
        async with followed(named) as workers:
            await until(lambda: _said(workers) == ["serving", "serving"])
            named.name(two.address)
            await until(lambda: sorted(_said(workers)) == ["gone", "serving"])
            named.name(one.address, two.address)
            await until(lambda: _said(workers) == ["serving", "serving"])


@pytest.mark.parametrize("end", ["ctrl-c", "SIGTERM"])
async def test_on_a_terminal_it_ends_without_a_traceback(end: str) -> None:
    async with (
        played() as one,
        Terminal(["top", "--workers", one.address, "--interval", "0.2"]) as terminal,
    ):
        await terminal.expect(f"{one.address}")
        await terminal.expect("1 of 1")
        if end == "ctrl-c":
            terminal.type("\x03")
        else:
            terminal.process.send_signal(signal.SIGTERM)
        assert await terminal.ends() == 0
        assert "Traceback" not in terminal.text
