"""Conversion of the served models, for `ListModels`."""

from __future__ import annotations

from millstream.v1 import processor_pb2
from millstream_server.processor.models import ModelStatus
from millstream_server.protobuf.diffusion_model import diffusion_model_to_proto
from millstream_server.protobuf.media import MODALITIES_TO_PROTO
from millstream_server.protobuf.worker import (
    ROLES_TO_PROTO,
    abilities_to_proto,
    embedding_model_to_proto,
)
from millstream_server.routing.tasks import Task
from millstream_server.synthesis.diffuser import DiffuserInfo
from millstream_server.vectors.embedder import EmbedderInfo

_TASKS = {task: processor_pb2.ModelTask.Value(f"MODEL_TASK_{task.name}") for task in Task}


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
        if isinstance(info, DiffuserInfo):
            message.diffusion.CopyFrom(diffusion_model_to_proto(info))
        elif isinstance(info, EmbedderInfo):
            message.embedding.CopyFrom(embedding_model_to_proto(info))
    return message


def _context_length(model: ModelStatus) -> int:
    if model.engine is not None:
        return model.engine.context_length
    return (model.text.context_length if model.text else None) or 0
