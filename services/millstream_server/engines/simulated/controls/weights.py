"""Replacing the simulated engine's weights, which are no more than a version."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from millstream_server.control.operations import (
    DiskWeights,
    Progress,
    TensorWeights,
    WeightSource,
)
from millstream_server.engines.simulated.config import SimulatedConfig
from millstream_server.engines.simulated.rank import Rank
from millstream_server.engines.simulated.state import EngineState
from millstream_server.model_files.safetensors import BadSafetensorsError, read_header
from millstream_server.runtime.errors import (
    EngineBusyError,
    InvalidWeightsError,
    UnsupportedFeatureError,
)

TENSOR = "simulated.weight"
"""The model's only tensor, of the shape [1]."""


class SimulatedWeights:
    """Satisfies `control.operations.WeightControl`.

    A directory fits if it has a config.json whose vocabulary, if it names one, has the engine's
    size, and complete safetensors files of any content. Tensors that are sent must be `TENSOR`.
    """

    def __init__(self, config: SimulatedConfig, state: EngineState, ranks: Sequence[Rank]) -> None:
        """Work on these ranks."""
        self._config = config
        self._state = state
        self._ranks = ranks

    async def check_weights(self, source: WeightSource, progress: Progress) -> None:
        """See `WeightControl.check_weights`."""
        if isinstance(source, DiskWeights):
            files = await asyncio.to_thread(_files, source.path, self._config.vocab_size)
            total = sum(size for _, size in files)
            done = 0
            for file, size in files:
                await asyncio.to_thread(check_file, file)
                done += size
                progress(done, total)
        elif isinstance(source, TensorWeights):
            _check_tensors(source)
            total = sum(len(data) for _, data in source.tensors)
            progress(total, total)
        else:
            raise UnsupportedFeatureError.of(
                "start.source", "the simulated engine takes weights from disk or in the call"
            )

    async def update_weights(self, source: WeightSource, version: str) -> None:
        """See `WeightControl.update_weights`.

        Raises:
            EngineBusyError: requests are open.
        """
        await self.check_weights(source, lambda _done, _total: None)
        if count := sum(rank.open_requests for rank in self._ranks):
            raise EngineBusyError(f"weights can't be replaced while {count} requests are open")
        self._state.weight_version = version
        for rank in self._ranks:
            rank.cache.clear()


def _files(directory: Path, vocab_size: int) -> list[tuple[Path, int]]:
    """Check a checkpoint's configuration; return its files of weights and their sizes."""
    config = read_json(directory, "config.json")
    text = config.get("text_config")
    found = (text if isinstance(text, dict) else config).get("vocab_size", vocab_size)
    if found != vocab_size:
        raise InvalidWeightsError(
            f"config.json has a vocabulary of {found} tokens, the engine's has {vocab_size}"
        )
    files = {file.name: file for file in sorted(directory.glob("*.safetensors"))}
    if (directory / "model.safetensors.index.json").exists():
        named = read_json(directory, "model.safetensors.index.json").get("weight_map")
        wanted = set(named.values()) if isinstance(named, dict) else set()
        if missing := sorted(wanted - files.keys()):
            raise InvalidWeightsError(
                f"{len(missing)} of the {len(wanted)} files that model.safetensors.index.json "
                f"names are missing: {', '.join(missing[:3])}"
            )
    if not files:
        raise InvalidWeightsError("the directory has no *.safetensors files")
    return [(file, file.stat().st_size) for file in files.values()]


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """Read an object from a file in a directory of weights.

    Raises:
        InvalidWeightsError: the directory or the file is missing, or it has no object.
    """
    if not directory.is_dir():
        raise InvalidWeightsError("there is no such directory on the worker")
    try:
        found = json.loads((directory / name).read_bytes())
    except FileNotFoundError as error:
        raise InvalidWeightsError(f"the directory has no {name}") from error
    except OSError as error:
        raise InvalidWeightsError(f"{name} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise InvalidWeightsError(f"{name} can't be read: {error}") from error
    if not isinstance(found, dict):
        raise InvalidWeightsError(f"{name} is no JSON object")
    return found


def check_file(file: Path) -> None:
    """Check that a safetensors file is complete.

    Raises:
        InvalidWeightsError: it isn't.
    """
    try:
        read_header(file)
    except BadSafetensorsError as error:
        raise InvalidWeightsError(str(error).replace(str(file), file.name)) from error


def _check_tensors(source: TensorWeights) -> None:
    if not source.tensors:
        raise InvalidWeightsError("no tensor was sent")
    for tensor, data in source.tensors:
        if tensor.name != TENSOR:
            raise InvalidWeightsError(f"the model has no tensor {tensor.name!r}, only {TENSOR!r}")
        if tensor.spec.shape != (1,):
            shape = list(tensor.spec.shape)
            raise InvalidWeightsError(f"{TENSOR!r} has the shape {shape}; the model's is [1]")
        if len(data) != tensor.spec.nbytes:
            raise InvalidWeightsError(
                f"{TENSOR!r} has {len(data)} bytes; its shape and type take {tensor.spec.nbytes}"
            )
