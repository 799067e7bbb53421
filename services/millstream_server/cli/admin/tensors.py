"""Tensors of safetensors files, as messages of UpdateWeights."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path

from millstream.v1 import engine_control_pb2, tensor_pb2
from millstream_server.media.tensor import ElementType, TensorSpec
from millstream_server.model_files.weights import (
    BadSafetensorsError,
    StoredTensor,
    read_header,
)

CHUNK_BYTES = 1 << 20
"""The contract allows 2 MiB; more than one chunk is under way at a time."""
_TYPES = {
    "F32": (ElementType.FLOAT32, tensor_pb2.ELEMENT_TYPE_FLOAT32),
    "BF16": (ElementType.BFLOAT16, tensor_pb2.ELEMENT_TYPE_BFLOAT16),
    "F16": (ElementType.FLOAT16, tensor_pb2.ELEMENT_TYPE_FLOAT16),
}


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor in a file, and its description for the engine."""

    path: Path
    stored: StoredTensor
    message: engine_control_pb2.WeightTensor


def read_tensors(paths: Sequence[Path]) -> list[FileTensor]:
    """Read the headers of safetensors files.

    Raises:
        ValueError: a file isn't one, a tensor can't be sent, or two have the same name.
    """
    found: dict[str, FileTensor] = {}
    for path in paths:
        try:
            stored = read_header(path)
        except BadSafetensorsError as error:
            raise ValueError(str(error)) from error
        for tensor in stored:
            if (other := found.get(tensor.name)) is not None:
                raise ValueError(f"{tensor.name} is in {other.path} and again in {path}")
            found[tensor.name] = FileTensor(path, tensor, _described(path, tensor))
    if not found:
        raise ValueError(f"no tensor in {', '.join(map(str, paths))}")
    return list(found.values())


def _described(path: Path, tensor: StoredTensor) -> engine_control_pb2.WeightTensor:
    if tensor.dtype not in _TYPES:
        raise ValueError(
            f"{path}: {tensor.name} is {tensor.dtype}; {', '.join(_TYPES)} can be sent. Give such "
            "a checkpoint by --path, for the engine to read it"
        )
    kind, element_type = _TYPES[tensor.dtype]
    if problem := TensorSpec(kind, tensor.shape).problem():
        raise ValueError(f"{path}: {tensor.name} {problem}")
    spec = tensor_pb2.TensorSpec(element_type=element_type, shape=tensor.shape)
    return engine_control_pb2.WeightTensor(name=tensor.name, spec=spec)


def total_bytes(tensors: Sequence[FileTensor]) -> int:
    """Return the bytes of all tensors together."""
    return sum(tensor.stored.nbytes for tensor in tensors)


async def tensor_messages(
    tensors: Sequence[FileTensor],
) -> AsyncGenerator[engine_control_pb2.UpdateWeightsRequest, None]:
    """Yield each tensor and its bytes; one chunk is in memory at a time.

    Raises:
        ValueError: a file has become shorter, or can't be read any more.
    """
    for tensor in tensors:
        yield engine_control_pb2.UpdateWeightsRequest(tensor=tensor.message)
        for number in range(math.ceil(tensor.stored.nbytes / CHUNK_BYTES)):
            offset = number * CHUNK_BYTES
            data = await asyncio.to_thread(_read, tensor, offset)
            chunk = tensor_pb2.TensorChunk(offset=offset, data=data)
            yield engine_control_pb2.UpdateWeightsRequest(chunk=chunk)


def _read(tensor: FileTensor, offset: int) -> bytes:
    wanted = min(CHUNK_BYTES, tensor.stored.nbytes - offset)
    try:
        with tensor.path.open("rb") as file:
            file.seek(tensor.stored.offset + offset)
            data = file.read(wanted)
    except OSError as error:
        raise ValueError(f"{tensor.path} can't be read: {error.strerror}") from error
    if len(data) < wanted:
        raise ValueError(f"{tensor.path} has become shorter while it was sent")
    return data
