"""The sources of weights: how each is checked, and given to SGLang.

The `check_` functions raise InvalidWeightsError: the weights don't fit, or nobody listens at the
address; or UnsupportedFeatureError: this engine takes none from there. The `from_` functions load
what was checked, and raise UpdateFailedError: SGLang couldn't.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

from millstream_server.control.operations import (
    BroadcastWeights,
    IpcWeights,
    NamedTensor,
    TensorWeights,
)
from millstream_server.engines.checkpoint import Checkpoint, check_tensor
from millstream_server.engines.sglang.control.controlled import ControlledEngine
from millstream_server.media.tensor import ElementType
from millstream_server.runtime.errors import InvalidWeightsError, UnsupportedFeatureError
from millstream_server.runtime.settings.declare import is_host_port

UNTOUCHED = (
    "Failed to get weights iterator",
    "weight updates are not supported",
    "Failed to receive weights",
    "Failed to initialize custom process group",
)
"""In SGLang's messages when it has failed before it wrote anything; a test compares them."""

_DTYPES = {
    ElementType.FLOAT32: "F32",
    ElementType.FLOAT16: "F16",
    ElementType.BFLOAT16: "BF16",
}
_BATCH_BYTES = 1 << 30
_CONNECT_TIMEOUT_S = 5.0


class UpdateFailedError(Exception):
    """SGLang has refused or failed an update."""

    def __init__(self, message: str, *, mixed: bool) -> None:
        """``mixed``: some of the new weights may be in place."""
        super().__init__(message)
        self.mixed = mixed


async def _done(engine: ControlledEngine, call: Coroutine[Any, Any, Any], *, wrote: bool) -> None:
    """Await a call of SGLang's that returns whether it succeeded, and a message."""
    success, message, *_ = await engine.call(call)
    if not success:
        mixed = wrote or not any(words in message for words in UNTOUCHED)
        raise UpdateFailedError(str(message), mixed=mixed)


# ---- from disk ----------------------------------------------------------------------------------


async def from_disk(engine: ControlledEngine, path: Path, version: str) -> None:
    """Load a checkpoint that was checked."""
    message = engine.messages.UpdateWeightFromDiskReqInput(
        model_path=str(path), weight_version=version, load_format="safetensors"
    )
    # Not to be trusted after a failure: SGLang rolls back to the checkpoint that failed.
    await _done(engine, engine.manager.update_weights_from_disk(message), wrote=False)


# ---- tensors in the call ------------------------------------------------------------------------


def check_tensors(engine: ControlledEngine, source: TensorWeights, loaded: Checkpoint) -> None:
    """Check names, shapes, types and sizes."""
    _one_replica(engine)
    _check_named([tensor for tensor, _ in source.tensors], loaded)
    for tensor, data in source.tensors:
        if len(data) != tensor.spec.nbytes:
            raise InvalidWeightsError(
                f"{tensor.name!r} has {len(data):,} bytes; its shape needs {tensor.spec.nbytes:,}."
            )


def _check_named(tensors: Sequence[NamedTensor], loaded: Checkpoint) -> None:
    if not tensors:
        raise InvalidWeightsError("There are no tensors.")
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen:
            raise InvalidWeightsError(f"The tensor {tensor.name!r} is given twice.")
        seen.add(tensor.name)
        check_tensor(tensor.name, _DTYPES[tensor.spec.element_type], tensor.spec.shape, loaded)


def _one_replica(engine: ControlledEngine) -> None:
    if engine.info.dp_size > 1:
        raise UnsupportedFeatureError(
            f"SGLang takes weights from disk only with {engine.info.dp_size} data-parallel ranks."
        )


@contextlib.asynccontextmanager
async def _session(engine: ControlledEngine) -> AsyncIterator[None]:
    """Open one of SGLang's weight updates, and end it whatever happens."""
    messages, manager = engine.messages, engine.manager
    begin = manager.begin_weight_update(messages.BeginWeightUpdateReqInput())
    await _done(engine, begin, wrote=True)
    try:
        yield
    finally:
        end = manager.end_weight_update(messages.EndWeightUpdateReqInput())
        await _done(engine, end, wrote=True)


async def from_tensors(engine: ControlledEngine, source: TensorWeights, version: str) -> None:
    """Load tensors that were checked."""
    ranks = int(engine.argument("tp_size") or 1)
    wrote = False
    async with _session(engine):
        for batch, is_last in _batches(source):
            message = engine.messages.UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=await asyncio.to_thread(_serialize, batch, ranks),
                flush_cache=is_last,
                weight_version=version if is_last else None,
            )
            call = engine.manager.update_weights_from_tensor(message)
            await _done(engine, call, wrote=wrote)
            wrote = True


_Batch = list[tuple[NamedTensor, bytes | bytearray]]


def _batches(source: TensorWeights) -> Iterator[tuple[_Batch, bool]]:
    """Divide the tensors so that not all are copied at once; say which is the last part."""
    batch: _Batch = []
    size = 0
    for index, (tensor, data) in enumerate(source.tensors):
        batch.append((tensor, data))
        size += len(data)
        is_last = index == len(source.tensors) - 1
        if is_last or size >= _BATCH_BYTES:
            yield batch, is_last
            batch, size = [], 0


def _serialize(batch: _Batch, ranks: int) -> list[bytes]:
    """Put tensors into shared memory; each of SGLang's ranks takes a part of it once."""
    torch: Any = importlib.import_module("torch")
    serializer = importlib.import_module("sglang.srt.utils").MultiprocessingSerializer
    named = []
    for tensor, data in batch:
        dtype = getattr(torch, tensor.spec.element_type.value)
        # Copied: torch wants memory that it may write to.
        flat = torch.frombuffer(bytearray(data), dtype=dtype)
        named.append((tensor.name, flat.reshape(tensor.spec.shape)))
    return [serializer.serialize(named) for _ in range(ranks)]


# ---- a trainer's process group ------------------------------------------------------------------


async def check_broadcast(
    engine: ControlledEngine, source: BroadcastWeights, loaded: Checkpoint
) -> None:
    """Check the tensors, the ranks, and that the trainer listens."""
    _one_replica(engine)
    on_gpu = engine.config.resolved_device() == "cuda"
    if source.backend != (needed := "nccl" if on_gpu else "gloo"):
        raise UnsupportedFeatureError(
            f"This engine's tensors are on a {'GPU' if on_gpu else 'CPU'}: the backend must be "
            f"{needed!r}, not {source.backend!r}."
        )
    ranks = int(engine.argument("tp_size") or 1)
    if not 1 <= source.rank_offset <= source.world_size - ranks:
        raise InvalidWeightsError(
            f"rank_offset is {source.rank_offset} and world_size is {source.world_size}: the "
            f"engine has {ranks} processes, so rank_offset must be from 1 to world_size - {ranks}."
        )
    if not source.group_name:
        raise InvalidWeightsError("The group needs a name.")
    _check_named(source.tensors, loaded)
    await _check_listening(source.master_address)


async def _check_listening(address: str) -> None:
    """Connect to the trainer: SGLang would hang for half an hour if nobody is there."""
    if not is_host_port(address):
        raise InvalidWeightsError(f"{address!r} isn't HOST:PORT.")
    host, port = _host_port(address)
    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError) as error:
        raise InvalidWeightsError(
            f"Nobody listens at {address}: start the trainer's process group first."
        ) from error
    writer.close()


def _host_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


async def from_broadcast(engine: ControlledEngine, source: BroadcastWeights, version: str) -> None:
    """Join the trainer's group, receive its tensors, leave the group."""
    messages, manager = engine.messages, engine.manager
    host, port = _host_port(source.master_address)
    join = messages.InitWeightsUpdateGroupReqInput(
        master_address=host,
        master_port=port,
        rank_offset=source.rank_offset,
        world_size=source.world_size,
        group_name=source.group_name,
        backend=source.backend,
    )
    await _done(engine, manager.init_weights_update_group(join), wrote=False)
    receive = messages.UpdateWeightsFromDistributedReqInput(
        names=[tensor.name for tensor in source.tensors],
        dtypes=[tensor.spec.element_type.value for tensor in source.tensors],
        shapes=[list(tensor.spec.shape) for tensor in source.tensors],
        group_name=source.group_name,
        weight_version=version,
    )
    leave = messages.DestroyWeightsUpdateGroupReqInput(group_name=source.group_name)
    try:
        async with _session(engine):
            await _done(engine, manager.update_weights_from_distributed(receive), wrote=False)
    finally:
        # What it returns doesn't matter: a group that is left over only takes a name.
        await engine.call(manager.destroy_weights_update_group(leave))


# ---- memory of this machine's GPUs --------------------------------------------------------------


def check_ipc(engine: ControlledEngine) -> None:
    """Check that there is a GPU."""
    _one_replica(engine)
    if engine.config.resolved_device() != "cuda":
        raise UnsupportedFeatureError(
            "This engine runs on a CPU; IPC is for tensors in the memory of a GPU. Send TENSORS."
        )


async def from_ipc(engine: ControlledEngine, source: IpcWeights, version: str) -> None:
    """Take the tensors of a checkpoint engine; not run here, where there is no GPU."""
    message = engine.messages.UpdateWeightsFromIPCReqInput(
        zmq_handles=dict(source.zmq_addresses), weight_version=version
    )
    await _done(engine, engine.manager.update_weights_from_ipc(message), wrote=True)
