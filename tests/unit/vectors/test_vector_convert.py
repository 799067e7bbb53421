"""What an embedding worker says of itself, as a message and back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from millstream.v1 import worker_pb2
from millstream_server.control.engine import Role, WorkerDescription
from millstream_server.worker_info import description_from_proto, description_to_proto
from tests.unit.vectors.test_vector_checks import INFO


def test_there_and_back() -> None:
    described = WorkerDescription(role=Role.EMBEDDING, model="m", engine=INFO)
    message = description_to_proto(described)
    assert not message.batched_controls
    told = replace(INFO, max_batch_tokens=0)  # stays the worker's own business
    assert description_from_proto(message) == replace(described, engine=told)


def test_a_worker_that_says_nothing_of_its_model_is_no_generator() -> None:
    info = worker_pb2.WorkerInfo(role=worker_pb2.WORKER_ROLE_EMBEDDING, vocab_size=10)
    with pytest.raises(ValueError, match="the embedding worker doesn't say what it takes"):
        description_from_proto(info)
