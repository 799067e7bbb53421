"""Conversion of the served models, for `ListModels`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from millstream.v1 import processor_pb2
from millstream_server.engines.base import EngineInfo, Task
from millstream_server.processor.models import ModelStatus
from millstream_server.protobuf.common import ROLES_TO_PROTO
from millstream_server.protobuf.diffusion import diffusion_model_to_proto
from millstream_server.protobuf.embedding import embedding_model_to_proto
from millstream_server.protobuf.media import MODALITIES_TO_PROTO
from millstream_server.protobuf.worker import (
    abilities_to_proto,
)
from millstream_server.synthesis.diffuser import DiffuserInfo
from millstream_server.vectors.embedder import EmbedderInfo

_TASKS = {task: processor_pb2.ModelTask.Value(f"MODEL_TASK_{task.name}") for task in Task}


def _write_diffuser(message: processor_pb2.ServedModel, info: DiffuserInfo) -> None:
    message.diffusion.CopyFrom(diffusion_model_to_proto(info))


def _write_embedder(message: processor_pb2.ServedModel, info: EmbedderInfo) -> None:
    message.embedding.CopyFrom(embedding_model_to_proto(info))


_WRITE: dict[type[EngineInfo], Callable[[processor_pb2.ServedModel, Any], None]] = {
    DiffuserInfo: _write_diffuser,
    EmbedderInfo: _write_embedder,
}


def model_to_proto(model: ModelStatus) -> processor_pb2.ServedModel:
    """Convert a served model; of several workers for images or vectors, the first one's info."""
    message = processor_pb2.ServedModel(
        name=model.name,
        ready=model.ready,
        context_length=_context_length(model),
        workers=[
            processor_pb2.ModelWorkers(role=ROLES_TO_PROTO[role], connected=count)
            for role, count in sorted(model.workers.items(), key=lambda item: item[0].value)
        ],
        chat=model.text is not None and model.text.chat_template.available,
        modalities=sorted(MODALITIES_TO_PROTO[modality] for modality in model.modalities),
        tasks=sorted(_TASKS[task] for task in model.tasks),
        abilities=abilities_to_proto(model.engine.abilities) if model.engine else (),
        adapters=sorted(model.engine.adapter_names()) if model.engine else (),
    )
    for info in reversed(model.others):
        _WRITE[type(info)](message, info)
    return message


def _context_length(model: ModelStatus) -> int:
    if model.engine is not None:
        return model.engine.context_length
    return (model.text.context_length if model.text else None) or 0
