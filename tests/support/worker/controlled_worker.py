"""A generating worker in the test's process, whose engine's controls are scripted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc

from millstream.v1 import decode_pb2_grpc, engine_control_pb2, engine_control_pb2_grpc
from millstream_server.control.engine import Role
from millstream_server.control.operations import EngineControls
from millstream_server.engines.simulated.engine import SimulatedConfig, SimulatedEngine
from millstream_server.worker.control.plan import AllowedDirectories
from millstream_testing.in_process import ALPHABET, plan_of
from millstream_testing.waiting import EOF, until
from tests.support.worker.hosted_worker import HostedWorker, host_settings, hosted_worker
from tests.support.worker.scripted_controls import ScriptedControls
from tests.support.worker.worker_streams import Stream, decode_stream

pb: Any = engine_control_pb2
CHECKING, DRAINING, APPLYING, DONE = (
    pb.OPERATION_STAGE_CHECKING,
    pb.OPERATION_STAGE_DRAINING,
    pb.OPERATION_STAGE_APPLYING,
    pb.OPERATION_STAGE_DONE,
)
HANGING = replace(ALPHABET, step_s=1000.0, weight_version="v1")
"""Requests last until they are cancelled."""


class Followed:
    """An operation with progress that is under way."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.progress: list[Any] = []
        self.result: Any = None
        self.failed: grpc.aio.AioRpcError | None = None
        self._task = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        try:
            while (response := await self.call.read()) is not EOF:
                self.progress.append(response.progress)
                if "result" in response.DESCRIPTOR.fields_by_name and response.HasField("result"):
                    self.result = response.result
        except grpc.aio.AioRpcError as error:
            self.failed = error

    @property
    def stages(self) -> list[int]:
        """The stages, each once."""
        return list(dict.fromkeys(progress.stage for progress in self.progress))

    async def reached(self, stage: int) -> None:
        await until(lambda: stage in self.stages or self._task.done())
        assert stage in self.stages, self.failed

    async def ended(self) -> None:
        """Wait for its good end."""
        await asyncio.wait_for(asyncio.shield(self._task), 10)
        assert self.failed is None, self.failed
        assert self.stages[-1] == DONE

    async def cancel(self) -> None:
        """Go away."""
        self.call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


@dataclass(kw_only=True)
class ControlledWorker(HostedWorker):
    """A worker that runs here."""

    engine: SimulatedEngine
    script: ScriptedControls
    admin: Any
    control: Any
    """Stub of EngineControlService."""

    async def state(self) -> Any:
        return (await self.control.GetEngineState(pb.GetEngineStateRequest())).state

    async def open_stream(self) -> Stream:
        """Open a stream for requests."""
        return decode_stream(decode_pb2_grpc.DecodeServiceStub(self.channel))

    async def request(self) -> tuple[Stream, int]:
        """Start a request that lasts until it is cancelled; wait until it is open."""
        stream = await self.open_stream()
        await stream.start(0, [5], max_new_tokens=8)
        await self.until_open(1)
        return stream, 0

    def drain(self, **fields: Any) -> Followed:
        return Followed(self.control.Drain(pb.DrainRequest(**fields)))

    def release(self, *tags: int, **fields: Any) -> Followed:
        return Followed(self.control.ReleaseMemory(pb.ReleaseMemoryRequest(tags=tags, **fields)))

    def update(self, messages: Sequence[Any]) -> Followed:
        """Send all messages of an update, then close."""
        return Followed(self.control.UpdateWeights(iter(messages)))

    async def out_for(self, *conditions: str) -> None:
        """Wait until just these health conditions hold."""

        async def holds() -> bool:
            return set(await self.conditions()) == set(conditions)

        await until(holds)


def start_of(version: str = "v2", *, timeout_s: float | None = None, **source: Any) -> Any:
    """Make the first message of an update."""
    message = pb.UpdateWeightsRequest(start=pb.UpdateWeightsStart(weight_version=version, **source))
    if timeout_s is not None:
        message.start.timeout.FromNanoseconds(int(timeout_s * 1e9))
    return message


def from_disk(path: Path, version: str = "v2", **fields: Any) -> list[Any]:
    """Make an update from a checkpoint."""
    return [start_of(version, disk=pb.WeightsOnDisk(path=str(path)), **fields)]


@contextlib.asynccontextmanager
async def controlled_worker(
    folder: Path,
    *,
    config: SimulatedConfig = HANGING,
    controls: EngineControls | None = None,
    scripted: bool = True,
    model: Path | None = None,
    **changes: Any,
) -> AsyncIterator[ControlledWorker]:
    """Run a worker that may load from ``folder``/weights and records below ``folder``/profiles.

    Its engine's controls are scripted, or ``controls``, or those of the simulated engine. It notes
    updates in ``folder``/record.json, for a start with the model in ``model``.
    """
    engine = SimulatedEngine(config)
    script = ScriptedControls(engine)
    weights = folder / "weights"
    weights.mkdir(exist_ok=True)
    plan = plan_of(engine, Role.AGGREGATED)
    if scripted:
        controls = controls or script.all_of_them
    control = replace(
        plan.control,
        controls=plan.control.controls if controls is None else lambda: controls,
        directories=AllowedDirectories([weights]),
        profile_dir=folder / "profiles",
        max_weights_bytes=1000,
        weights_record=folder / "record.json",
        model_path=model,
    )
    settings = host_settings(**changes)
    async with (
        hosted_worker(settings, replace(plan, control=control)) as running,
        grpc.aio.insecure_channel(settings.admin_listen) as admin,
    ):
        stub = engine_control_pb2_grpc.EngineControlServiceStub(admin)
        yield ControlledWorker(engine=engine, script=script, admin=admin, control=stub, **running)
