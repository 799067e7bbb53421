"""Messages that start generations."""

from __future__ import annotations

from millstream.v1 import generation_pb2, sampling_pb2
from millstream_server.generation.request import GenerationRequest
from millstream_server.generation.sampling import Sampling
from millstream_server.generation.wire import write_sampling, write_start


def start_to_proto(slot: int, request: GenerationRequest) -> generation_pb2.StartGeneration:
    """Write a start."""
    message = generation_pb2.StartGeneration()
    write_start(message, slot, request)
    return message


def sampling_to_proto(sampling: Sampling) -> sampling_pb2.SamplingParams:
    """Write every knob that isn't neutral."""
    message = sampling_pb2.SamplingParams()
    write_sampling(message, sampling)
    return message
