"""A deterministic encoder of images and videos: results to work out by hand, a timing model.

The rule: an item is cut into cells as its family cuts it (Qwen2.5-VL: 28 x 28 pixels, two frames;
Qwen3-VL: 32 x 32; Gemma 3: 16 x 16 cells of any image), the last ones smaller. Each cell is a
token. Its row is [red, green, blue, index, 0, 0, ...] in float32: the colour of the cell's pixel in
the middle, from 0 to 255, and the token's index in the item. No torch, no numpy.

It is part of the package: for contract tests, demonstrations and scale tests.
"""

from __future__ import annotations

import array
import asyncio
import hashlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from millstream_server.control.engine import EngineLoad
from millstream_server.encode.encoder import EncoderInfo, Prepared
from millstream_server.media.decoding.sampling import FrameSampling
from millstream_server.media.items import Frames, Geometry, Modality
from millstream_server.media.tensor import ElementType, Tensor, TensorSpec
from millstream_server.runtime.errors import InternalError, InvalidRequestError, ServingError

MIN_WIDTH = 4
_CELLS = {"qwen2_5_vl": 28, "qwen3_vl": 32}
_SAMPLING = {"qwen2_5_vl": FrameSampling.ARANGE}
_MERGE = 2
_FRAMES_PER_STEP = 2
_POLL_S = 0.002
_KEPT_BATCHES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedEncoderConfig:
    """The simulated tower."""

    family: str = "qwen2_5_vl"
    """"qwen2_5_vl", "qwen3_vl" or "gemma3"."""
    width: int = 8
    """Width of a row, at least 4."""
    image_tokens: int = 256
    """Gemma 3: tokens of an image, a square number."""
    max_item_tokens: int = 16384
    max_running_requests: int = 64
    load_s: float = 0.0
    prepare_s: float = 0.0
    """Seconds to prepare an item."""
    item_s: float = 0.0
    """Seconds of the tower per item."""
    patch_s: float = 0.0
    """Seconds of the tower per patch."""


class SimulatedEncoder:
    """Satisfies `encode.encoder.MediaEncoder`. A test sets `fault`, and calls `wedge`."""

    def __init__(self, config: SimulatedEncoderConfig | None = None) -> None:
        """Simulate ``config``.

        Raises:
            ValueError: its family is unknown, or its width too small.
        """
        self.config = config = config or SimulatedEncoderConfig()
        if config.family not in (*_CELLS, "gemma3") or config.width < MIN_WIDTH:
            message = f"no simulated encoder of family {config.family}, width {config.width}"
            raise ValueError(message)
        self.fault: Callable[[Sequence[Prepared]], ServingError | None] = lambda _: None
        """Returns the error with which a batch fails, None: it doesn't."""
        self.batches: deque[tuple[int, ...]] = deque(maxlen=_KEPT_BATCHES)
        """The tokens of each item, of the last batches."""
        self._steps = 0
        self._tower = threading.Lock()
        self._going = threading.Event()
        self._going.set()

    async def start(self, on_failure: Callable[[ServingError], None]) -> EncoderInfo:
        config = self.config
        await asyncio.sleep(config.load_s)
        images_only = config.family == "gemma3"
        return EncoderInfo(
            engine="simulated",
            engine_version="1",
            max_running_requests=config.max_running_requests,
            modalities=frozenset({Modality.IMAGE} if images_only else Modality),
            settings_digest=hashlib.sha256(f"{config.family} {config.width}".encode()).digest(),
            sampling=_SAMPLING.get(config.family, FrameSampling.LINSPACE),
            max_item_tokens=config.max_item_tokens,
        )

    async def warm_up(self) -> None:
        await self.probe(0)

    async def load(self) -> EngineLoad:
        running = int(self._tower.locked())
        return EngineLoad(running_requests=running)

    async def close(self) -> None:
        """End a hang."""
        self._going.set()

    def progress(self, dp_rank: int) -> int:
        return self._steps

    async def probe(self, dp_rank: int) -> None:
        """Wait until no batch runs and nothing hangs."""
        while self._tower.locked() or not self._going.is_set():  # noqa: ASYNC110 - set by threads
            await asyncio.sleep(_POLL_S)
        self._steps += 1

    def wedge(self) -> None:
        self._going.clear()

    def unwedge(self) -> None:
        self._going.set()

    def prepare(self, frames: Frames) -> Prepared:
        config = self.config
        if config.family == "gemma3" and frames.modality is not Modality.IMAGE:
            raise InvalidRequestError.of("modality", "this model takes images only")
        time.sleep(config.prepare_s)
        rows, columns, steps, geometry = _cut(frames, config)
        tokens = steps * rows * columns
        if tokens > config.max_item_tokens:
            sentence = f"takes {tokens} tokens; {config.max_item_tokens} are allowed"
            raise InvalidRequestError.of("data", sentence)
        return Prepared(
            modality=frames.modality,
            tokens=tokens,
            geometry=geometry,
            inputs=_values(frames, (steps, rows, columns), config.width),
            cost=tokens * _MERGE**2,
        )

    def encode(self, batch: Sequence[Prepared]) -> list[Tensor]:
        """Return the rows that `prepare` has computed, after the tower's time."""
        if not self._tower.acquire(blocking=False):
            raise InternalError("two batches at once")
        try:
            self._going.wait()
            config = self.config
            time.sleep(config.item_s * len(batch) + config.patch_s * sum(p.cost for p in batch))
            self.batches.append(tuple(item.tokens for item in batch))
            if (fault := self.fault(batch)) is not None:
                raise fault
            self._steps += 1
            return [_tensor(item, config.width) for item in batch]
        finally:
            self._tower.release()


def _cut(frames: Frames, config: SimulatedEncoderConfig) -> tuple[int, int, int, Geometry]:
    """Return rows and columns of cells, steps in time, and the geometry."""
    family = config.family
    if family == "gemma3":
        cells = math.isqrt(config.image_tokens)
        return cells, cells, 1, Geometry()
    side = _CELLS[family]
    rows, columns = -(-frames.height // side), -(-frames.width // side)
    steps = -(-frames.count // _FRAMES_PER_STEP)
    grid = (steps, rows * _MERGE, columns * _MERGE)
    if frames.modality is Modality.IMAGE:
        return rows, columns, steps, Geometry(grid=grid)
    fps = frames.fps or 1.0
    times = tuple(frames.indices[i] / fps for i in range(0, frames.count, _FRAMES_PER_STEP))
    if family == "qwen3_vl":
        return rows, columns, steps, Geometry(grid=grid, timestamps_s=times)
    spacing = (times[-1] - times[0]) / (steps - 1) if steps > 1 else 1.0
    return rows, columns, steps, Geometry(grid=grid, seconds_per_step=spacing)


def _values(frames: Frames, cells: tuple[int, int, int], width: int) -> array.array[float]:
    steps, rows, columns = cells
    pixels, size = frames.data.cast("B"), frames.width * frames.height * 3
    rest = [0.0] * (width - MIN_WIDTH)
    values = array.array("f")
    for step in range(steps):
        for row in range(rows):
            y = (2 * row + 1) * frames.height // (2 * rows)
            for column in range(columns):
                x = (2 * column + 1) * frames.width // (2 * columns)
                at = _FRAMES_PER_STEP * step * size + (y * frames.width + x) * 3
                index = len(values) // width
                values.extend([*map(float, pixels[at : at + 3]), float(index), *rest])
    return values


def _tensor(item: Prepared, width: int) -> Tensor:
    spec = TensorSpec(ElementType.FLOAT32, (item.tokens, width))
    return Tensor(spec, memoryview(item.inputs.tobytes()))
