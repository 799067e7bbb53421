"""A diffusion worker in the test's process, on a simulated engine, and its raw streams."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from millstream.v1 import diffusion_pb2, diffusion_pb2_grpc, errors_pb2
from millstream_server.diffusion.diffuser import Job, Step
from millstream_server.diffusion.request import Kind
from millstream_server.diffusion.worker.engine import DiffusionOptions, HostedDiffuser
from millstream_server.diffusion.worker.servicer import make_plan
from millstream_server.engines.simulated.diffuser import (
    SimulatedDiffuser,
    SimulatedDiffuserConfig,
)
from millstream_server.media.items import Frames
from millstream_testing.waiting import EOF, until
from tests.support.worker.hosted_worker import HostedWorker, host_settings, hosted_worker

MODEL = "tiny-pictures"
SIZE = 64
"""Width and height of the simulated engine's outputs."""


class SteppedDiffuser(SimulatedDiffuser):
    """After `by_hand`, runs a step only when the test allows it, and so for the end of each job."""

    allowed: asyncio.Semaphore | None = None

    def by_hand(self) -> None:
        """Run no step from now on that isn't allowed."""
        self.allowed = asyncio.Semaphore(0)

    def allow(self, steps: int) -> None:
        """Let so many further steps run; a job's end counts as one more."""
        assert self.allowed is not None
        for _ in range(steps):
            self.allowed.release()

    async def diffuse(self, job: Job, on_step: Callable[[Step], None]) -> Frames:
        frames = await super().diffuse(job, on_step)
        await self._permit()
        return frames

    async def _step(self) -> None:
        await self._permit()
        await super()._step()

    async def _permit(self) -> None:
        if self.allowed is not None:
            await self.allowed.acquire()


@dataclass
class Setup:
    """What a test may change."""

    engine: SimulatedDiffuserConfig = field(default_factory=SimulatedDiffuserConfig)
    options: DiffusionOptions = field(default_factory=DiffusionOptions)
    max_open_pixel_steps: int = 0


VIDEOS = Setup(
    SimulatedDiffuserConfig(kinds=frozenset({Kind.VIDEO})), DiffusionOptions(kind=Kind.VIDEO)
)


@dataclass(kw_only=True)
class Worker(HostedWorker):
    """A worker that runs here."""

    engine: SteppedDiffuser
    hosted: HostedDiffuser

    @property
    def stub(self) -> Any:
        return diffusion_pb2_grpc.DiffusionServiceStub(self.channel)

    async def until_load(self, running: int, queued: int) -> None:
        """Wait until so many requests have the device, and wait for it."""

        async def reached() -> bool:
            load = await self.hosted.load()
            return (load.running_requests, load.queued_requests) == (running, queued)

        await until(reached)


class SlotView:
    """What one slot has received, in order."""

    def __init__(self) -> None:
        self.progress: list[diffusion_pb2.DiffusionProgress] = []
        self.files: defaultdict[int, bytes] = defaultdict(bytes)
        self.complete: set[int] = set()
        self.chunks: list[int] = []
        """Sizes of the chunks."""
        self.finished: diffusion_pb2.DiffusionFinished | None = None
        self.error: errors_pb2.RequestError | None = None

    @property
    def ended(self) -> bool:
        return self.finished is not None or self.error is not None

    @property
    def positions(self) -> list[int]:
        """Queue positions, until it ran."""
        return [p.queue_position for p in self.progress if p.queue_position]

    @property
    def steps(self) -> list[tuple[int, int, int]]:
        """(output, step, steps) of what ran."""
        return [(p.output, p.step, p.steps) for p in self.progress if not p.queue_position]

    @property
    def reason(self) -> str:
        assert self.error is not None, self.finished
        return errors_pb2.ErrorReason.Name(self.error.reason).removeprefix("ERROR_REASON_")

    @property
    def fields(self) -> list[str]:
        assert self.error is not None, self.finished
        return [violation.field for violation in self.error.violations]

    @property
    def message(self) -> str:
        assert self.error is not None, self.finished
        return self.error.message


class Stream:
    """One GenerateImage or GenerateVideo stream. Checks what every message must satisfy."""

    def __init__(self, stub: Any, kind: Kind = Kind.IMAGE) -> None:
        is_image = kind is Kind.IMAGE
        method = stub.GenerateImage if is_image else stub.GenerateVideo
        pb2 = diffusion_pb2
        self._request: Any = pb2.GenerateImageRequest if is_image else pb2.GenerateVideoRequest
        self._start: Any = pb2.StartImage if is_image else pb2.StartVideo
        self.call = method()
        self.slots: defaultdict[int, SlotView] = defaultdict(SlotView)
        self.order: list[int] = []
        """Slots in the order of their ends."""
        self.draining = False
        self.failed: grpc.aio.AioRpcError | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self, slot: int, prompt: str = "a cat", **fields: Any) -> None:
        """Start a request; ``fields`` are of the start or of its options."""
        names = diffusion_pb2.DiffusionOptions.DESCRIPTOR.fields_by_name
        options = {name: fields.pop(name) for name in list(fields) if name in names}
        self.slots[slot] = SlotView()
        start = self._start(
            slot=slot,
            options=diffusion_pb2.DiffusionOptions(prompt=prompt, **options),
            **fields,
        )
        await self.call.write(self._request(start=start))

    async def cancel(self, slot: int) -> None:
        cancel = diffusion_pb2.CancelDiffusion(slot=slot)
        await self.call.write(self._request(cancel=cancel))

    def read_on(self) -> None:
        """Read until the stream's end, in the background."""
        self._task = asyncio.ensure_future(self._read())

    async def ended(self, slot: int) -> SlotView:
        """Wait for a slot's end."""
        await until(lambda: self.slots[slot].ended or self.failed is not None)
        assert self.slots[slot].ended, self.failed
        return self.slots[slot]

    async def finished(self, slot: int) -> SlotView:
        view = await self.ended(slot)
        assert view.error is None, view.error
        return view

    async def close(self) -> None:
        self.call.cancel()
        if self._task is not None:
            await asyncio.wait({self._task})

    async def _read(self) -> None:
        try:
            while (response := await self.call.read()) is not EOF:
                self._sort(response)
        except grpc.aio.AioRpcError as error:
            self.failed = error

    def _sort(self, response: Any) -> None:
        self.draining |= response.draining
        assert response.ByteSize() < 4 << 20
        for progress in response.progress:
            view = self.slots[progress.slot]
            assert not view.ended, "progress after the end"
            view.progress.append(progress)
        for chunk in response.chunks:
            view = self.slots[chunk.slot]
            assert not view.ended, "a chunk after the end"
            assert chunk.output not in view.complete, "a chunk after the last"
            assert 0 < len(chunk.data) <= 1 << 20
            view.files[chunk.output] += chunk.data
            view.chunks.append(len(chunk.data))
            if chunk.last:
                view.complete.add(chunk.output)
        for finished in response.finished:
            self._end(finished.slot).finished = finished
        for failed in response.errors:
            self._end(failed.slot).error = failed.error

    def _end(self, slot: int) -> SlotView:
        view = self.slots[slot]
        assert not view.ended, "two ends"
        self.order.append(slot)
        return view


@contextlib.asynccontextmanager
async def diffusion_worker(setup: Setup | None = None, **changes: Any) -> AsyncIterator[Worker]:
    """Run a worker; ``changes`` are of its host's settings."""
    setup = setup or Setup()
    engine = SteppedDiffuser(setup.engine)
    hosted = HostedDiffuser(engine, setup.options)
    settings = host_settings(**({"max_open_requests": 64} | changes))
    plan = make_plan(hosted, MODEL, max_open_pixel_steps=setup.max_open_pixel_steps)
    async with hosted_worker(settings, plan, engine.unwedge) as running:
        yield Worker(engine=engine, hosted=hosted, **running)


@contextlib.asynccontextmanager
async def opened(one: Worker, kind: Kind = Kind.IMAGE) -> AsyncIterator[Stream]:
    """Open a stream to a worker, and read it."""
    stream = Stream(one.stub, kind)
    stream.read_on()
    try:
        yield stream
    finally:
        await stream.close()


@contextlib.asynccontextmanager
async def streaming(
    setup: Setup | None = None, **changes: Any
) -> AsyncIterator[tuple[Worker, Stream]]:
    """Run a worker and open a stream of its kind to it."""
    setup = setup or Setup()
    async with (
        diffusion_worker(setup, **changes) as one,
        opened(one, setup.options.kind) as stream,
    ):
        yield one, stream
