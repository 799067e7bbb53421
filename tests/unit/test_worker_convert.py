"""A worker's description and load survive the way through messages."""

from __future__ import annotations

import dataclasses

import pytest

from millstream.v1 import kv_transfer_pb2, worker_pb2
from millstream_server import worker_info as convert
from millstream_server.control.engine import EngineLoad, RankLoad, Role, WorkerDescription
from millstream_server.control.operations import LoraAdapter
from millstream_server.generation.generator import GeneratorInfo
from millstream_server.generation.sampling import Ability
from millstream_server.generation.ticket import KvTransfer
from millstream_server.protobuf.common import CONTRACT_VERSION

_INFO = GeneratorInfo(
    engine="played",
    engine_version="7",
    max_running_requests=5,
    dp_size=4,
    weight_version="w",
    device="cuda",
    vocab_size=100,
    context_length=50,
    block_size=2,
    total_blocks=30,
    abilities=frozenset({Ability.SEED}),
    bootstrap_host="h",
    bootstrap_port=9,
    refused_fields=frozenset({"logprobs"}),
    model_hash="ab",
    max_batched_tokens=8192,
    dp_start=4,
    tool_call_parser="qwen25",
    reasoning_parser="qwen3",
    adapters=(LoraAdapter("a", 8), LoraAdapter("b")),
    takes_adapters=True,
    tells_kv=True,
    kv_transfer=KvTransfer("k", b"d", prefill_first=True),
)


def _sent(message: worker_pb2.WorkerInfo) -> worker_pb2.WorkerInfo:
    return worker_pb2.WorkerInfo.FromString(message.SerializeToString())


def test_a_generating_workers_description_survives() -> None:
    unset = [
        field.name
        for field in dataclasses.fields(_INFO)
        if field.default is not dataclasses.MISSING and getattr(_INFO, field.name) == field.default
    ]
    assert unset == ["media"], "set every field above, so that none is lost without a failure"
    description = WorkerDescription(
        role=Role.PREFILL, model="m", engine=_INFO, worker_id="id", batched_controls=True
    )
    message = _sent(convert.description_to_proto(description))
    assert message.contract_version == CONTRACT_VERSION
    assert convert.description_from_proto(message) == description


def test_a_ranks_load_survives() -> None:
    rank = RankLoad(
        running_requests=1, queued_requests=2, queued_tokens=3, used_blocks=4, total_blocks=5
    )
    load = EngineLoad(
        running_requests=2, queued_requests=4, used_blocks=8, total_blocks=10, ranks=(rank, rank)
    )
    message = worker_pb2.LoadReport(
        running_requests=2,
        queued_requests=4,
        used_blocks=8,
        total_blocks=10,
        ranks=[
            worker_pb2.RankLoad(
                dp_rank=i,
                running_requests=1,
                queued_requests=2,
                queued_tokens=3,
                used_blocks=4,
                total_blocks=5,
            )
            for i in range(2)
        ],
    )
    assert convert.load_from_proto(message) == load


@pytest.mark.parametrize(("dp_start", "dp_size"), [(0, 10**9), (2**32 - 1, 2)])
def test_a_worker_with_impossible_ranks_is_refused(dp_start: int, dp_size: int) -> None:
    role = worker_pb2.WORKER_ROLE_DECODE
    info = worker_pb2.WorkerInfo(role=role, dp_start=dp_start, dp_size=dp_size)
    with pytest.raises(ValueError, match=f"{dp_size} ranks from {dp_start} on; at most 4096"):
        convert.description_from_proto(info)


def test_what_a_worker_may_not_say_of_its_cache_and_adapters_is_left_out() -> None:
    described = WorkerDescription(role=Role.AGGREGATED, model="m", engine=_INFO)
    message = convert.description_to_proto(described)
    message.block_size = 0
    message.adapters.add(name="x" * 129)
    engine = convert.description_from_proto(message).engine
    assert engine == dataclasses.replace(_INFO, block_size=0, tells_kv=False)


@pytest.mark.parametrize("transfer", [KvTransfer("k"), KvTransfer("k", b"d")])
def test_legs_start_together_unless_a_worker_says_otherwise(transfer: KvTransfer) -> None:
    engine = dataclasses.replace(_INFO, kv_transfer=transfer)
    message = convert.description_to_proto(
        WorkerDescription(role=Role.PREFILL, model="m", engine=engine)
    )
    assert message.kv_transfer.order == kv_transfer_pb2.LEG_ORDER_CONCURRENT
    message.kv_transfer.order = kv_transfer_pb2.LEG_ORDER_UNSPECIFIED
    assert convert.description_from_proto(message).engine == engine


@pytest.mark.parametrize(
    ("transfer", "error"),
    [
        (kv_transfer_pb2.KvTransfer(data=b"d"), "a kind of KV transfer has 1 to 64 bytes"),
        (kv_transfer_pb2.KvTransfer(kind="k" * 65), "kind of KV transfer has 1 to 64 bytes"),
        (kv_transfer_pb2.KvTransfer(kind="k", data=bytes(4097)), "4097 bytes about KV transfer"),
        (kv_transfer_pb2.KvTransfer(kind="k", order=3), "the unknown order 3"),  # type: ignore[arg-type]
    ],
)
def test_a_worker_whose_way_of_handing_off_can_not_be_is_refused(
    transfer: kv_transfer_pb2.KvTransfer, error: str
) -> None:
    described = WorkerDescription(role=Role.PREFILL, model="m", engine=_INFO)
    message = convert.description_to_proto(described)
    message.kv_transfer.CopyFrom(transfer)
    with pytest.raises(ValueError, match=error):
        convert.description_from_proto(message)
