"""Conversion of what EmbeddingService carries.

What a message has that can't be read raises `InvalidRequestError`, with its field.
"""

from __future__ import annotations

from collections.abc import Sequence

from millstream.v1 import embedding_pb2, worker_pb2
from millstream_server.embedding.embedder import EmbedderInfo
from millstream_server.embedding.request import (
    EmbedFinished,
    EmbedRequest,
    Ranked,
    Ranking,
    RerankRequest,
    Vectors,
)
from millstream_server.protobuf.common import (
    ENGINE_FIELDS,
    PRIORITIES,
    PRIORITIES_TO_PROTO,
    known,
    optional,
    read_common,
    same_fields,
    values,
    write_common,
)
from millstream_server.protobuf.errors import error_from_proto, error_to_proto
from millstream_server.runtime.errors import InvalidRequestError
from millstream_server.runtime.rpc.slot_session import SlotContent
from millstream_server.runtime.telemetry.trace_context import TraceContext

Content = SlotContent[Vectors, EmbedFinished]
_RERANK_FIELDS = same_fields(embedding_pb2.RerankRequest, RerankRequest)
_MODEL_FIELDS = same_fields(worker_pb2.EmbeddingModelInfo, EmbedderInfo)


# ---- Embed ---------------------------------------------------------------------------------------


def embed_from_proto(message: embedding_pb2.StartEmbed, stream: TraceContext) -> EmbedRequest:
    """Convert a start; ``stream`` is the stream's trace context."""
    return EmbedRequest(
        inputs=[_input_from_proto(i, part) for i, part in enumerate(message.inputs)],
        dimensions=optional(message, "dimensions"),
        normalize=message.normalize if message.HasField("normalize") else True,
        prompt_name=optional(message, "prompt_name"),
        **read_common(message, stream),
    )


def _input_from_proto(index: int, message: embedding_pb2.EmbedInput) -> str | Sequence[int]:
    match message.WhichOneof("input"):
        case "text":
            return message.text
        case "token_ids":
            return list(message.token_ids.ids)
        case _:
            raise InvalidRequestError.of(f"inputs[{index}]", "set text or token_ids")


def embed_to_proto(slot: int, request: EmbedRequest) -> embedding_pb2.EmbedRequest:
    """Convert a batch to the message that starts it."""
    message = embedding_pb2.EmbedRequest()
    start = message.start
    start.slot = slot
    for part in request.inputs:
        if isinstance(part, str):
            start.inputs.add(text=part)
        else:
            start.inputs.add().token_ids.ids.extend(part)
    if request.dimensions is not None:
        start.dimensions = request.dimensions
    start.normalize = request.normalize
    if request.prompt_name is not None:
        start.prompt_name = request.prompt_name
    write_common(start, request)
    return message


def embed_response(content: Content) -> embedding_pb2.EmbedResponse:
    """Make a message of an Embed stream."""
    return embedding_pb2.EmbedResponse(
        vectors=[
            embedding_pb2.EmbeddingVectors(
                slot=slot,
                indices=vectors.indices,
                dimensions=vectors.dimensions,
                values=vectors.values,
            )
            for slot, vectors in content.entries
        ],
        finished=[
            embedding_pb2.EmbedFinished(
                slot=slot,
                request_id=end.request_id,
                model=end.model,
                usage=embedding_pb2.EmbeddingUsage(input_tokens=end.input_tokens),
            )
            for slot, end in content.finished
        ],
        errors=[
            embedding_pb2.EmbedError(slot=slot, error=error_to_proto(error))
            for slot, error in content.errors
        ],
        draining=content.draining,
    )


def embed_content(response: embedding_pb2.EmbedResponse) -> Content:
    """Convert a message of an Embed stream."""
    return SlotContent(
        latest=(),
        entries=[
            (message.slot, Vectors(list(message.indices), message.dimensions, message.values))
            for message in response.vectors
        ],
        finished=[
            (
                message.slot,
                EmbedFinished(
                    request_id=message.request_id,
                    model=message.model,
                    input_tokens=message.usage.input_tokens,
                ),
            )
            for message in response.finished
        ],
        errors=[(message.slot, error_from_proto(message.error)) for message in response.errors],
        draining=response.draining,
    )


# ---- Rerank --------------------------------------------------------------------------------------


def rerank_from_proto(
    message: embedding_pb2.RerankRequest, trace: TraceContext, deadline_s: float | None
) -> RerankRequest:
    """Convert a request; trace and deadline are the RPC's."""
    return RerankRequest(
        documents=list(message.documents),
        pairs=[list(pair.ids) for pair in message.pairs],
        top_n=optional(message, "top_n"),
        instruction=optional(message, "instruction"),
        **values(message, _RERANK_FIELDS),
        priority=known("priority", PRIORITIES, message.priority),
        trace=trace,
        deadline_s=deadline_s,
    )


def rerank_to_proto(request: RerankRequest) -> embedding_pb2.RerankRequest:
    """Convert a request; trace and deadline belong to the RPC."""
    message = embedding_pb2.RerankRequest(
        documents=request.documents,
        priority=PRIORITIES_TO_PROTO[request.priority],
        **values(request, _RERANK_FIELDS),
    )
    for pair in request.pairs:
        message.pairs.add().ids.extend(pair)
    if request.top_n is not None:
        message.top_n = request.top_n
    if request.instruction is not None:
        message.instruction = request.instruction
    return message


def ranking_to_proto(ranking: Ranking) -> embedding_pb2.RerankResponse:
    """Convert scores."""
    return embedding_pb2.RerankResponse(
        results=[
            embedding_pb2.RankedDocument(
                index=ranked.index,
                score=ranked.score,
                logit=ranked.logit,
                document=ranked.document,
            )
            for ranked in ranking.results
        ],
        usage=embedding_pb2.EmbeddingUsage(input_tokens=ranking.input_tokens),
        request_id=ranking.request_id,
        model=ranking.model,
    )


def ranking_from_proto(message: embedding_pb2.RerankResponse) -> Ranking:
    """Convert scores."""
    return Ranking(
        results=[
            Ranked(index=result.index, logit=result.logit, document=result.document)
            for result in message.results
        ],
        input_tokens=message.usage.input_tokens,
        request_id=message.request_id,
        model=message.model,
    )


# ---- what a worker embeds or ranks ---------------------------------------------------------------


def embedding_model_to_proto(engine: EmbedderInfo) -> worker_pb2.EmbeddingModelInfo:
    """Convert what a worker embeds or ranks."""
    return worker_pb2.EmbeddingModelInfo(
        dimensions=engine.dimensions, **values(engine, _MODEL_FIELDS)
    )


def embedder_from_proto(info: worker_pb2.WorkerInfo) -> EmbedderInfo:
    """Read `WorkerInfo.embedding_model` and the fields that every worker has."""
    model = info.embedding_model
    return EmbedderInfo(
        dimensions=tuple(model.dimensions),
        vocab_size=info.vocab_size,
        max_batch_tokens=0,  # the worker's own business
        **values(model, _MODEL_FIELDS),
        **values(info, ENGINE_FIELDS),
    )
