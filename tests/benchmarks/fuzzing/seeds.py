"""Normal requests of services that we know, to be damaged; others come from descriptors alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from millstream.v1 import (
    decode_pb2,
    diffusion_pb2,
    embedding_pb2,
    encode_pb2,
    generation_pb2,
    media_pb2,
    prefill_pb2,
    processor_pb2,
    sampling_pb2,
    worker_pb2,
)
from millstream_server.generation import wire as convert
from millstream_server.generation.ticket import TicketKey
from tests.support.media.media_files import sha256, solid
from tests.support.processes.simulated_suite import MODEL
from tests.support.processes.suite import TICKET_KEY
from tests.support.processor import chats

_TOKENS = 5


def _generation(slot: int, *, ticket: bool) -> generation_pb2.StartGeneration:
    start = generation_pb2.StartGeneration(
        slot=slot,
        request_id="fuzz",
        token_ids=[5, 6, 34],
        sampling=sampling_pb2.SamplingParams(max_new_tokens=_TOKENS, logit_bias={5: 1.0}),
        logprobs=sampling_pb2.LogprobOptions(top=2),
    )
    if ticket:  # good for nowhere: nobody holds its room
        minted = TicketKey.from_hex(TICKET_KEY).mint("127.0.0.1", 9)
        start.ticket.CopyFrom(convert.ticket_to_proto(minted))
    start.timeout.FromMilliseconds(2000)
    return start


def _decode() -> list[Message]:
    return [
        decode_pb2.DecodeRequest(start=_generation(0, ticket=False)),
        decode_pb2.DecodeRequest(start=_generation(1, ticket=True)),
        decode_pb2.DecodeRequest(cancel=generation_pb2.CancelGeneration(slot=0)),
    ]


def _prefill() -> list[Message]:
    return [
        prefill_pb2.PrefillRequest(start=_generation(0, ticket=True)),
        prefill_pb2.PrefillRequest(cancel=generation_pb2.CancelGeneration(slot=0)),
    ]


def _encode() -> list[Message]:
    picture, lease = solid(), "0" * 32
    whole = encode_pb2.EncodeItem(
        slot=0, modality=media_pb2.MODALITY_IMAGE, total_bytes=len(picture), data=picture
    )
    later = encode_pb2.EncodeItem(
        slot=1,
        modality=media_pb2.MODALITY_IMAGE,
        total_bytes=len(picture),
        sha256=sha256(picture + b"another"),
    )
    return [
        encode_pb2.EncodeRequest(start=whole),
        encode_pb2.EncodeRequest(start=later),
        encode_pb2.EncodeRequest(more=encode_pb2.EncodeBytes(slot=1, data=picture)),
        encode_pb2.EncodeRequest(cancel=encode_pb2.CancelItem(slot=1)),
        encode_pb2.EncodeRequest(release=encode_pb2.ReleaseLease(lease=lease)),
    ]


def _images() -> list[Message]:
    options = diffusion_pb2.DiffusionOptions(
        prompt="a cat", n=2, width=64, height=64, steps=2, seed=7, preview_every_steps=1
    )
    start = diffusion_pb2.StartImage(slot=0, request_id="fuzz", options=options)
    start.input_image.data = solid()
    start.timeout.FromMilliseconds(2000)
    return [
        diffusion_pb2.GenerateImageRequest(start=start),
        diffusion_pb2.GenerateImageRequest(cancel=diffusion_pb2.CancelDiffusion(slot=0)),
    ]


def _videos() -> list[Message]:
    options = diffusion_pb2.DiffusionOptions(prompt="rain", steps=2, seed=7)
    start = diffusion_pb2.StartVideo(slot=0, request_id="fuzz", options=options, frames=5, fps=8)
    start.timeout.FromMilliseconds(2000)
    return [
        diffusion_pb2.GenerateVideoRequest(start=start),
        diffusion_pb2.GenerateVideoRequest(cancel=diffusion_pb2.CancelDiffusion(slot=0)),
    ]


def _embed() -> list[Message]:
    start = embedding_pb2.StartEmbed(slot=0, request_id="fuzz", dimensions=8, normalize=True)
    for ids in ([5, 6, 34], [7]):
        start.inputs.add().token_ids.ids.extend(ids)
    start.timeout.FromMilliseconds(2000)
    return [
        embedding_pb2.EmbedRequest(start=start),
        embedding_pb2.EmbedRequest(cancel=embedding_pb2.CancelEmbed(slot=0)),
    ]


def _rerank() -> list[Message]:
    request = embedding_pb2.RerankRequest(top_n=1, request_id="fuzz")
    for ids in ([5, 6, 34], [7]):
        request.pairs.add().ids.extend(ids)
    return [request]


def _chat() -> list[Message]:
    opts = chats.options(_TOKENS, stop=["zz"], n=2, return_token_ids=True, logit_bias={5: 1.0})
    return [
        chats.start("hi", opts=opts, model=MODEL),
        chats.user_turn("and now?", chats.options(_TOKENS)),
        chats.CANCEL,
        chats.user_turn("so?"),
    ]


_SEEDS: Mapping[str, Callable[[], list[Message]]] = {
    "millstream.v1.ProcessorService.Chat": _chat,
    "millstream.v1.ProcessorService.Complete": lambda: [
        chats.completion([5, 6, 34], chats.options(_TOKENS), model=MODEL)
    ],
    "millstream.v1.ProcessorService.Tokenize": lambda: [
        processor_pb2.TokenizeRequest(
            model=MODEL, conversation=processor_pb2.Conversation(messages=[chats.message("hi")])
        )
    ],
    "millstream.v1.ProcessorService.Detokenize": lambda: [
        processor_pb2.DetokenizeRequest(model=MODEL, token_ids=[34, 35, 36])
    ],
    "millstream.v1.DecodeService.Decode": _decode,
    "millstream.v1.PrefillService.Prefill": _prefill,
    "millstream.v1.EncodeService.Encode": _encode,
    "millstream.v1.DiffusionService.GenerateImage": _images,
    "millstream.v1.DiffusionService.GenerateVideo": _videos,
    "millstream.v1.EmbeddingService.Embed": _embed,
    "millstream.v1.EmbeddingService.Rerank": _rerank,
    "millstream.v1.WorkerService.WatchLoad": lambda: [worker_pb2.WatchLoadRequest()],
    "grpc.health.v1.Health.Check": lambda: [health_pb2.HealthCheckRequest(service="liveness")],
    "grpc.health.v1.Health.Watch": lambda: [health_pb2.HealthCheckRequest(service="liveness")],
    "grpc.reflection.v1alpha.ServerReflection.ServerReflectionInfo": lambda: [
        reflection_pb2.ServerReflectionRequest(list_services="*"),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="millstream.v1.ChatRequest"),
    ],
}


def seeds(method: str) -> list[bytes]:
    """Make normal messages for a method, by its full proto name, in the order of a normal call."""
    make = _SEEDS.get(method)
    return [message.SerializeToString() for message in make()] if make else []
