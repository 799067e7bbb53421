"""An engine that makes images or videos, as a worker's host uses it: with a queue and threads."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from millstream_server.control.engine import EngineLoad
from millstream_server.diffusion.diffuser import Diffuser, DiffuserInfo, Job, Step
from millstream_server.diffusion.request import MAX_INPUT_BYTES, Kind
from millstream_server.diffusion.worker.files import Storage
from millstream_server.media.decoding.pool import DecoderPool
from millstream_server.media.items import Frames, MediaLimits, Modality
from millstream_server.runtime.errors import (
    EngineFailedError,
    FieldViolation,
    InternalError,
    InvalidRequestError,
    ServingError,
    UnavailableError,
)
from millstream_server.runtime.settings import setting
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.telemetry.metrics import DIFFUSION_QUEUED
from millstream_server.runtime.threads import DaemonThreads
from millstream_server.worker.host import WrappedEngine

log = get_log(__name__)

OnPosition = Callable[[int], None]


class QueueEntry:
    """One request, or a probe, in the queue; made by `DeviceQueue.join`."""

    def __init__(self, queue: DeviceQueue, on_position: OnPosition | None) -> None:
        self.on_position = on_position
        self.position = 0
        """As last reported; 0: nobody was ahead."""
        self.acquired: asyncio.Future[None] | None = None
        """While its owner waits for the device."""
        self._queue = queue

    @property
    def is_request(self) -> bool:
        return self.on_position is not None

    async def acquire(self) -> None:
        """Wait for the device; the entry has it until it leaves the queue."""
        self.acquired = asyncio.get_running_loop().create_future()
        self._queue.advance()
        await self.acquired


class DeviceQueue:
    """Gives the device to one entry at a time. All calls come from one event loop.

    An entry that hasn't asked for the device yet, since its input is still being prepared, keeps
    its position, but holds up no other: the device goes to the first one that has asked.
    """

    def __init__(self) -> None:
        self._waiting: list[QueueEntry] = []
        self._running: QueueEntry | None = None

    @property
    def running_requests(self) -> int:
        """1 if a request has the device."""
        return int(self._running is not None and self._running.is_request)

    @property
    def queued_requests(self) -> int:
        return sum(entry.is_request for entry in self._waiting)

    @contextlib.contextmanager
    def join(self, on_position: OnPosition | None = None) -> Iterator[QueueEntry]:
        """Queue for the device during a ``with`` block; without ``on_position`` as a probe.

        ``on_position`` is called with the number of entries ahead, including the one with the
        device, at once and whenever it changes, unless it is 0: then the entry is the next one.
        """
        entry = QueueEntry(self, on_position)
        self._waiting.append(entry)
        self._report()
        try:
            yield entry
        finally:
            if entry is self._running:
                self._running = None
            else:
                self._waiting.remove(entry)
            self.advance()
            self._report()

    def advance(self) -> None:
        """Give the device, if it is free, to the first who waits for it."""
        if self._running is not None:
            return
        for entry in self._waiting:
            acquired = entry.acquired
            if acquired is not None and not acquired.done():
                self._waiting.remove(entry)
                self._running = entry
                acquired.set_result(None)
                self._report()
                return

    def _report(self) -> None:
        DIFFUSION_QUEUED.set(self.queued_requests)
        ahead = 0 if self._running is None else 1
        for entry in self._waiting:
            if entry.position != ahead:
                entry.position = ahead
                if entry.on_position is not None and ahead:
                    entry.on_position(ahead)
            ahead += 1


T = TypeVar("T")

_EVEN = 2
"""H.264 in 4:2:0 has even widths and heights only."""
_FILE_THREADS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionLimits:
    """Limits and defaults of requests."""

    requests_at_once: int = setting(
        2,
        help="requests that each Processor sends at once: one runs, the others wait here, so that "
        "the device has no pause between two; all further ones wait at the Processors, where "
        "priorities count and another worker may take them",
    )
    max_steps: int = setting(50, help="most steps; 0: the model's")
    max_pixels: int = setting(0, help="most pixels of an output: width x height; 0: the model's")
    max_outputs: int = setting(4, help="most outputs of a request")
    max_frames: int = setting(0, help="most frames of a video; 0: the model's")
    default_steps: int = setting(0, help="steps of requests that name none; 0: the model's")
    default_width: int = setting(0, help="width of requests that name no size; 0: the model's")
    default_height: int = setting(0, help="height of requests that name no size; 0: the model's")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionOptions(DiffusionLimits):
    """What a worker makes, and its limits."""

    kind: Kind = Kind.IMAGE
    max_input_bytes: int = MAX_INPUT_BYTES
    storage: Storage | None = None


class HostedDiffuser(WrappedEngine):
    """The engine that a worker's host sees. For one event loop."""

    def __init__(self, diffuser: Diffuser, options: DiffusionOptions) -> None:
        """Use ``diffuser`` and the storage alone; `close` closes them."""
        super().__init__(diffuser)
        self.options = options
        self.queue = DeviceQueue()
        self.file_threads = DaemonThreads(_FILE_THREADS, "files")
        self.preview_threads = DaemonThreads(1, "previews")
        self._token_threads = DaemonThreads(1, "tokens")
        self._diffuser = diffuser
        limits = MediaLimits(max_item_bytes=options.max_input_bytes, max_frames=1)
        self._decoders = DecoderPool(limits, 1)
        self._info: DiffuserInfo | None = None
        self._closed = False

    @property
    def info(self) -> DiffuserInfo:
        """Its facts and limits.

        Raises:
            UnavailableError: the model is still being loaded.
        """
        if self._info is None:
            raise UnavailableError("this worker is still loading its model", retry_delay_s=1.0)
        return self._info

    async def start(self, on_failure: Callable[[ServingError], None]) -> DiffuserInfo:
        """See `Engine.start`; the info has this worker's limits."""
        self._info = narrowed(await self._diffuser.start(on_failure), self.options)
        return self._info

    async def load(self) -> EngineLoad:
        return EngineLoad(
            running_requests=self.queue.running_requests,
            queued_requests=self.queue.queued_requests,
        )

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            await self._decoders.close()
        finally:
            await self._diffuser.close()
            for threads in (self.file_threads, self.preview_threads, self._token_threads):
                threads.close()
            if self.options.storage is not None:
                self.options.storage.close()

    async def probe(self, dp_rank: int) -> None:
        """See `Probeable.probe`; it waits in the queue like a request."""
        with self.queue.join() as entry:
            await entry.acquire()
            await self._diffuser.probe(dp_rank)

    # ---- for requests ----------------------------------------------------------------------------

    async def count_tokens(self, prompt: str) -> int:
        """See `Diffuser.count_tokens`; in a thread, as a prompt may be long."""
        return await in_thread(self._token_threads, self._diffuser.count_tokens, prompt)

    async def decode(self, data: bytes, width: int, height: int) -> Frames:
        """Decode an input image to the output's size.

        Raises:
            InvalidRequestError: it isn't an image that is accepted.
            UnavailableError: it can't be decoded now.
        """
        try:
            return await self._decoders.decode(data, Modality.IMAGE, (width, height))
        except InvalidRequestError as error:
            violations = [
                FieldViolation(f"input_image.{found.field}", found.description)
                for found in error.violations
            ]
            raise InvalidRequestError.of_all(violations) from error

    async def diffuse(self, job: Job, on_step: Callable[[Step], None]) -> Frames:
        """See `Diffuser.diffuse`; call it with the device.

        Raises:
            InternalError: the engine made something else than was asked for.
        """
        frames = await self._diffuser.diffuse(job, on_step)
        made = (frames.width, frames.height, frames.count)
        if made != (job.width, job.height, job.frames):
            fault = InternalError.with_id()
            log.error("the engine's output has a wrong size", error_id=fault.error_id, made=made)
            raise fault
        return frames


async def in_thread(threads: DaemonThreads, call: Callable[..., T], *args: Any) -> T:
    """Call it in one of the threads."""
    return await asyncio.wrap_future(threads.submit(call, *args))


def narrowed(info: DiffuserInfo, options: DiffusionOptions) -> DiffuserInfo:
    """Return an engine's info with the worker's limits.

    Raises:
        EngineFailedError: the model can't be served so.
    """
    if options.kind not in info.kinds:
        kinds = " and ".join(sorted(kind.value for kind in info.kinds))
        raise EngineFailedError(
            f"the model makes {kinds}, but the worker was started with --kind {options.kind.value}"
        )
    is_video = options.kind is Kind.VIDEO
    size_step = math.lcm(info.size_step, _EVEN) if is_video else info.size_step
    found = replace(
        info,
        kinds=frozenset({options.kind}),
        max_running_requests=options.requests_at_once,
        size_step=size_step,
        min_size=-(-info.min_size // size_step) * size_step,
        max_pixels=min(options.max_pixels or info.max_pixels, info.max_pixels),
        max_steps=min(options.max_steps or info.max_steps, info.max_steps),
        max_outputs=min(options.max_outputs or info.max_outputs, info.max_outputs),
        max_frames=min(options.max_frames or info.max_frames, info.max_frames),
        default_width=options.default_width or info.default_width,
        default_height=options.default_height or info.default_height,
        urls=options.storage is not None,
    )
    steps = options.default_steps or min(info.default_steps, found.max_steps)
    found = replace(found, default_steps=steps, default_frames=_frames(found) if is_video else 0)
    _check_defaults(found)
    return found


def _frames(info: DiffuserInfo) -> int:
    """Return the default number of frames, within the limit and the model's rule."""
    frames = min(info.default_frames, info.max_frames)
    return frames - (frames - 1) % info.frame_step


def _check_defaults(info: DiffuserInfo) -> None:
    """Check that a request that sets nothing is within the limits."""
    width, height = info.default_width, info.default_height
    if info.default_steps > info.max_steps:
        raise EngineFailedError(
            f"--default-steps {info.default_steps} is above --max-steps {info.max_steps}"
        )
    if width * height > info.max_pixels:
        raise EngineFailedError(
            f"the default size, {width} x {height} = {width * height} pixels, is above "
            f"{info.max_pixels}: set --default-width and --default-height, or --max-pixels"
        )
    if min(width, height) < info.min_size or width % info.size_step or height % info.size_step:
        raise EngineFailedError(
            f"the default size, {width} x {height}, must be of multiples of {info.size_step}, at "
            f"least {info.min_size}: set --default-width and --default-height"
        )
