"""The hand-off of a KV cache between two vLLM engines, over NIXL; two ways of it.

**Push**: both legs run at the same time. Decode registers its blocks with prefill, which writes
into them when it has the prompt. The legs find each other by the request's id, so both have the
ticket's room as id. What decode needs to know of prefill doesn't change, and is in every ticket.

**Pull**: decode starts when prefill has ended, and reads the blocks that prefill's end names.
Decode reads whatever is in them, without an error, if they were freed or the prompt is another. So
the data has a digest of the prompt, and prefill keeps the blocks for longer than a ticket lives.

NIXL's side channel is ZeroMQ without authentication: it belongs into a network of workers only.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millstream_server.control.engine import Role
from millstream_server.engines.config import free_port
from millstream_server.engines.vllm.config import Connector, VllmEngineConfig
from millstream_server.generation.request import GenerationRequest
from millstream_server.generation.ticket import (
    TICKET_LIFETIME_S,
    EngineData,
    KvTransfer,
    Ticket,
)
from millstream_server.runtime.errors import InvalidRequestError, KvTransferError

_CONNECTORS: Mapping[Connector, str] = {"push": "NixlPushConnector", "pull": "NixlConnector"}
LEASE_S = math.ceil(TICKET_LIFETIME_S) + 30
"""Pull: how long prefill keeps blocks that decode doesn't read: vLLM lets it read freed ones."""
TO_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
_FIELD = "ticket.engine_data"
_NUMBERS = ("remote_port", "tp_size", "pp_size", "remote_num_tokens")
_TEXTS = ("remote_engine_id", "remote_request_id", "remote_host")


@dataclass(frozen=True, slots=True, kw_only=True)
class SideChannel:
    """One engine's end of hand-offs."""

    role: Role
    connector: Connector
    engine_id: str
    """Random; another after each start."""
    host: str
    port: int
    """Of the first data-parallel rank."""
    lease_s: int
    """How long prefill keeps blocks for a decode engine that tells nothing of itself. It tells that
    it lives six times in this time, from when its core has the request."""

    @property
    def kind(self) -> str:
        """The kind of its engine data; see kv_transfer.proto."""
        return f"vllm.nixl-{self.connector}"

    @property
    def is_written_to(self) -> bool:
        """Whether it waits for prefill to write into its blocks."""
        return self.role is Role.DECODE and self.connector == "push"

    @property
    def writes(self) -> bool:
        """Whether it writes into decode's blocks."""
        return self.role is Role.PREFILL and self.connector == "push"

    def environment(self) -> dict[str, str]:
        """Return the environment variables that vLLM's processes read."""
        return {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": self.host,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.port),
        }

    def transfer_config(self) -> dict[str, Any]:
        """Return the arguments of vLLM's `KVTransferConfig`."""
        return {
            "kv_connector": _CONNECTORS[self.connector],
            "kv_role": "kv_producer" if self.role is Role.PREFILL else "kv_consumer",
            "engine_id": self.engine_id,
            # A request whose KV cache can't be had fails; by default decode would compute it.
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {"kv_lease_duration": self.lease_s},
        }

    def announced(self, vllm_config: Any) -> KvTransfer:
        """Return how this engine hands off."""
        if self.connector == "pull":
            return KvTransfer(self.kind, prefill_first=True)
        if self.role is not Role.PREFILL:
            return KvTransfer(self.kind)
        parallel = vllm_config.parallel_config
        data = {
            "engine_id": self.engine_id,
            "host": self.host,
            "port": self.port,
            "tp_size": parallel.tensor_parallel_size,
            "pp_size": parallel.pipeline_parallel_size,
            "ranks": parallel.data_parallel_size,
        }
        return KvTransfer(self.kind, json.dumps(data).encode())

    def core_id(self, request: GenerationRequest) -> str:
        """Return vLLM's id of a request: with push that of both legs. It has no dash."""
        if request.ticket is not None and self.connector == "push":
            return f"{request.ticket.room:032x}"
        return request.engine_id

    def parameters(self, request: GenerationRequest) -> dict[str, Any]:
        """Make vLLM's `kv_transfer_params` for a leg.

        Raises:
            InvalidRequestError: the ticket's engine data is none of this kind.
        """
        ticket = request.ticket
        if ticket is None:
            return {}
        if self.role is Role.PREFILL:
            return dict(TO_DECODE)
        given = _read(ticket.engine_data, self.kind)
        if self.connector == "pull":
            return _to_read(given, request)
        return _to_await(given, ticket, self.core_id(request))

    def finished(
        self, request: GenerationRequest, parameters: Mapping[str, Any] | None
    ) -> EngineData | None:
        """Make what a prefill leg's end tells decode.

        Raises:
            KvTransferError: vLLM has kept no blocks.
        """
        if self.role is not Role.PREFILL or self.connector == "push":
            return None
        if not parameters or not parameters.get("remote_block_ids"):
            raise KvTransferError("The prefill engine has kept no KV cache for decode.")
        data = {"prompt": _digest(request.token_ids), "params": dict(parameters)}
        return EngineData(self.kind, json.dumps(data).encode())


def side_channel(config: VllmEngineConfig) -> SideChannel:
    """Choose the addresses of an engine that hands off.

    Raises:
        EngineFailedError: the port of a prefill engine is in use.
    """
    if config.role is Role.PREFILL:
        config.check_bootstrap_port()
        port = config.bootstrap_port
    else:
        # Told to prefill with each registration. Ranks take the ports that follow.
        port = free_port(config.bootstrap_host)
    # With push nothing wrong is read later: decode's wait ends as well.
    lease_s = LEASE_S if config.connector == "pull" else math.ceil(config.transfer_timeout_s)
    return SideChannel(
        role=config.role,
        connector=config.connector,
        engine_id=secrets.token_hex(16),
        host=config.bootstrap_host,
        port=port,
        lease_s=lease_s,
    )


def _digest(token_ids: Sequence[int]) -> str:
    return hashlib.sha256(struct.pack(f"<{len(token_ids)}I", *token_ids)).hexdigest()


def _read(data: EngineData | None, kind: str) -> Mapping[str, Any]:
    if data is None or data.kind != kind:
        raise InvalidRequestError.of(_FIELD, f"must be of the kind {kind}")
    try:
        read = json.loads(data.data)
    except ValueError as error:
        raise InvalidRequestError.of(_FIELD, f"is no data of {kind}") from error
    if not isinstance(read, dict):
        raise InvalidRequestError.of(_FIELD, f"is no data of {kind}")
    return read


def _checked(given: Any, texts: Sequence[str], numbers: Sequence[str]) -> Mapping[str, Any]:
    """Check the types of what vLLM would trust."""
    if not isinstance(given, dict) or not (
        all(isinstance(given.get(name), str) for name in texts)
        and all(type(given.get(name)) is int and given[name] >= 0 for name in numbers)
    ):
        raise InvalidRequestError.of(_FIELD, "isn't what a prefill worker of this engine sends")
    return given


def _to_await(given: Mapping[str, Any], ticket: Ticket, core_id: str) -> dict[str, Any]:
    """Make the parameters of a decode leg that is written to."""
    peer = _checked(given, ("engine_id", "host"), ("port", "tp_size", "pp_size", "ranks"))
    rank = ticket.prefill_dp_rank or 0
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": f"{peer['engine_id']}_dp{rank}"
        if peer["ranks"] > 1
        else peer["engine_id"],
        "remote_host": peer["host"],
        "remote_port": peer["port"] + rank,
        "remote_block_ids": [],
        "remote_request_id": core_id,
        "tp_size": peer["tp_size"],
        "pp_size": peer["pp_size"],
    }


def _to_read(given: Mapping[str, Any], request: GenerationRequest) -> dict[str, Any]:
    """Make the parameters of a decode leg that reads; without blocks they would end vLLM."""
    if given.get("prompt") != _digest(request.token_ids):
        raise InvalidRequestError.of(_FIELD, "is of another prompt")
    params = _checked(given.get("params"), _TEXTS, _NUMBERS)
    blocks = params.get("remote_block_ids")
    groups = blocks if isinstance(blocks, list) else []
    whole = all(
        isinstance(group, list) and all(type(block) is int and block >= 0 for block in group)
        for group in groups
    )
    if not whole or not any(groups):
        raise InvalidRequestError.of(_FIELD, "names no blocks")
    return dict(params) | {"do_remote_prefill": True, "do_remote_decode": False}
