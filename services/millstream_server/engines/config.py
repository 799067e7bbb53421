"""How an engine for text or vectors is started: what is the same for several vendors."""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from millstream_server.control.engine import Role
from millstream_server.engines.adapter import (
    Device,
    EngineContext,
    TextEngineSettings,
    VectorEngineSettings,
    model_folder,
)
from millstream_server.engines.torch_on_cpu import resolved
from millstream_server.runtime.errors import EngineFailedError

MAX_LORA_RANK = 16
"""That of most LoRA adapters; memory grows with it."""
_PORTS = range(20_000, 30_000)
"""Below those that systems give to outgoing connections, one of which took an engine's."""
_TRIES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine; each vendor's class has more."""

    model_path: str
    role: Role = Role.AGGREGATED
    device: Device = "auto"
    """"auto" uses the GPU where there is one."""
    dtype: str = "auto"
    """"auto" is the checkpoint's type on a GPU and float32 on the CPU."""
    bootstrap_host: str = "127.0.0.1"
    """This engine's address as its P/D peers reach it; its sockets of the hand-off bind there."""
    bootstrap_port: int = 8998
    """Prefill only; must be free, and differ between engines on one host. vLLM takes one for each
    data-parallel rank."""
    transfer_timeout_s: float = 30.0
    """How long a KV transfer may take, from when prefill has computed and decode has room."""
    handoff_wait_s: float = 300.0
    """How long a P/D leg waits until its peer is so far."""
    max_total_tokens: int | None = None
    """Size of the KV cache, with vLLM of a rank's; None: what memory allows on a GPU, 8192 on the
    CPU."""
    max_running_requests: int | None = None
    """With vLLM of a rank; None: the vendor decides on a GPU, 16 on the CPU."""
    context_length: int | None = None
    """None: the model's own."""
    served_model_name: str = ""
    warm_up_timeout_s: float = 120.0
    max_loras_per_batch: int = 0
    """LoRA adapters that a batch can use; 0: the engine takes none."""
    max_lora_rank: int = MAX_LORA_RANK
    kv_events: bool = True
    """Tell what the prefix cache holds, if anybody follows (`KvEventSource.follow_kv`)."""
    extra: Mapping[str, object] = field(default_factory=dict)
    """Further arguments of the vendor's, passed on unchanged."""

    @property
    def on_cpu(self) -> bool:
        """Whether it runs without a GPU."""
        return resolved(self.device) == "cpu"

    @property
    def resolved_dtype(self) -> str:
        """The type that the vendor gets."""
        return "float32" if self.on_cpu and self.dtype == "auto" else self.dtype

    def check_bootstrap_port(self) -> None:
        """Refuse a port in use, which vendors only log or name without the setting.

        Raises:
            EngineFailedError: it can't be bound.
        """
        host, port = self.bootstrap_host, self.bootstrap_port
        try:
            _bind(host, port)
        except OSError as error:
            message = f"bootstrap_port: {port} cannot be bound on {host}: {error.strerror}."
            raise EngineFailedError(message) from error


def free_ports(host: str, count: int = 1) -> int:
    """Find ports in a row for an engine that binds them seconds later; return the first.

    Raises:
        EngineFailedError: there are none.
    """
    for _ in range(_TRIES):
        first = secrets.choice(_PORTS)
        with contextlib.suppress(OSError):
            for rank in range(count):
                _bind(host, first + rank)
            return first
    message = f"No port from {_PORTS.start} to {_PORTS.stop} is free on {host} for the engine."
    raise EngineFailedError(message)


def _bind(host: str, port: int) -> None:
    """Bind a socket, and close it again."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))


_OF_TEXT = (
    *("bootstrap_host", "bootstrap_port", "transfer_timeout_s", "handoff_wait_s"),
    *("max_loras_per_batch", "kv_events"),
)
"""Fields that are settings of engines for text only, under the same name."""


def of_settings(context: EngineContext, engine: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of `EngineConfig` of an engine for text or for vectors.

    ``given``: the vendor's own arguments; what isn't taken out of them is passed on.

    Raises:
        SettingsError: there are no files of a model.
    """
    common: TextEngineSettings | VectorEngineSettings = context.common
    folder = model_folder(context.model_path, engine, "a model directory", "config.json")
    text = {}
    if isinstance(common, TextEngineSettings):
        text = {name: getattr(common, name) for name in _OF_TEXT}
        text["max_lora_rank"] = given.pop("max_lora_rank", MAX_LORA_RANK)
    return {
        "model_path": str(folder),
        "role": context.role,
        "device": common.device,
        "dtype": given.pop("dtype", "auto"),
        "max_total_tokens": common.max_total_tokens or None,
        "max_running_requests": common.max_running_requests or None,
        "context_length": common.context_length or None,
        "served_model_name": context.model_name,
        "warm_up_timeout_s": common.warm_up_timeout_s,
        "extra": given,
        **text,
    }
