"""What vLLM is told of a hand-off, and which tickets it never sees. vLLM itself isn't needed."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from millstream_server.control.engine import Role
from millstream_server.engines.vllm.config import Connector, VllmEngineConfig
from millstream_server.engines.vllm.handoff import LEASE_S, SideChannel, side_channel
from millstream_server.generation.request import GenerationRequest, Prompt
from millstream_server.generation.sampling import Sampling
from millstream_server.generation.ticket import TICKET_LIFETIME_S, EngineData, Ticket
from millstream_server.runtime.errors import InvalidRequestError, KvTransferError

_PARALLEL = {"tensor_parallel_size": 2, "pipeline_parallel_size": 1, "data_parallel_size": 1}
_PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[3, 4]],
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "10.0.0.1",
    "remote_port": 8998,
    "tp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 3,
}


def _channel(role: Role, connector: Connector = "push") -> SideChannel:
    at: dict[str, Any] = {"engine_id": "abc", "host": "10.0.0.1", "port": 8998, "lease_s": 30}
    return SideChannel(role=role, connector=connector, **at)


def _vllm(**parallel: int) -> Any:
    return SimpleNamespace(parallel_config=SimpleNamespace(**(_PARALLEL | parallel)))


def _request(data: EngineData | None, ids: tuple[int, ...] = (5, 6, 7), **ticket: Any) -> Any:
    return GenerationRequest(
        prompt=Prompt(ids),
        sampling=Sampling(max_new_tokens=4),
        ticket=Ticket("10.0.0.1", 0, 0x123, engine_data=data, **ticket),
    )


def test_a_lease_is_longer_than_a_ticket() -> None:
    assert LEASE_S > TICKET_LIFETIME_S


@pytest.mark.parametrize(("connector", "lease_s"), [("push", 13), ("pull", LEASE_S)])
def test_prefill_keeps_blocks_as_long_as_decode_waits_for_them(
    connector: Connector, lease_s: int
) -> None:
    config = VllmEngineConfig(
        model_path="m", role=Role.DECODE, connector=connector, transfer_timeout_s=12.5
    )
    extra = side_channel(config).transfer_config()["kv_connector_extra_config"]
    assert extra == {"kv_lease_duration": lease_s}


def test_both_legs_of_a_push_have_one_id_without_a_dash() -> None:
    request = _request(None)
    ids = {_channel(role).core_id(request) for role in (Role.PREFILL, Role.DECODE)}
    assert ids == {"00000000000000000000000000000123"}
    assert _channel(Role.DECODE, "pull").core_id(request) == request.engine_id


def test_a_push_tells_decode_where_prefill_is() -> None:
    told = _channel(Role.PREFILL).announced(_vllm())
    assert (told.kind, told.prefill_first) == ("vllm.nixl-push", False)
    request = _request(EngineData(told.kind, told.data))
    params = _channel(Role.DECODE).parameters(request)
    assert params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "abc",
        "remote_host": "10.0.0.1",
        "remote_port": 8998,
        "remote_block_ids": [],
        "remote_request_id": "00000000000000000000000000000123",
        "tp_size": 2,
        "pp_size": 1,
    }


def test_a_data_parallel_prefill_is_told_by_its_rank() -> None:
    told = _channel(Role.PREFILL).announced(_vllm(data_parallel_size=4))
    request = _request(EngineData(told.kind, told.data), prefill_dp_rank=2)
    params = _channel(Role.DECODE).parameters(request)
    assert (params["remote_engine_id"], params["remote_port"]) == ("abc_dp2", 9000)


def test_prefill_computes_for_decode() -> None:
    params = _channel(Role.PREFILL).parameters(_request(None))
    assert params == {"do_remote_decode": True, "do_remote_prefill": False}


def test_a_pull_carries_what_prefill_ended_with() -> None:
    prefill, decode = (_channel(role, "pull") for role in (Role.PREFILL, Role.DECODE))
    assert prefill.announced(_vllm()).prefill_first
    data = prefill.finished(_request(None), _PARAMS)
    assert decode.parameters(_request(data)) == _PARAMS
    with pytest.raises(InvalidRequestError, match="another prompt"):
        decode.parameters(_request(data, (5, 6, 8)))


def test_a_prefill_that_kept_nothing_fails() -> None:
    prefill = _channel(Role.PREFILL, "pull")
    nothing: tuple[dict[str, Any] | None, ...] = (None, {}, {"remote_block_ids": []})
    for params in nothing:
        with pytest.raises(KvTransferError):
            prefill.finished(_request(None), params)


@pytest.mark.parametrize(
    "change",
    [
        {"remote_block_ids": []},
        {"remote_block_ids": [[]]},
        {"remote_block_ids": [["3"]]},
        {"remote_block_ids": [[-1]]},
        {"remote_block_ids": None},
        {"remote_port": "8998"},
        {"remote_engine_id": 7},
        {"tp_size": None},
    ],
)
def test_a_pull_that_would_end_vllm_is_refused(change: dict[str, Any]) -> None:
    prefill, decode = (_channel(role, "pull") for role in (Role.PREFILL, Role.DECODE))
    made = prefill.finished(_request(None), _PARAMS)
    assert made is not None
    content = json.loads(made.data)
    content["params"] |= change
    wrong = EngineData(made.kind, json.dumps(content).encode())
    with pytest.raises(InvalidRequestError, match=r"ticket\.engine_data"):
        decode.parameters(_request(wrong))


@pytest.mark.parametrize("connector", ["push", "pull"])
@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"params": 1}', b"\xff"])
def test_data_that_is_none_of_ours_is_refused(connector: Connector, data: bytes) -> None:
    decode = _channel(Role.DECODE, connector)
    with pytest.raises(InvalidRequestError, match=r"ticket\.engine_data"):
        decode.parameters(_request(EngineData(decode.kind, data)))
    with pytest.raises(InvalidRequestError, match=decode.kind):
        decode.parameters(_request(EngineData("sglang.nixl", data)))
    with pytest.raises(InvalidRequestError, match=decode.kind):
        decode.parameters(_request(None))
