"""The Protocols of an engine that generates text; adapters satisfy them structurally.

Why output is pushed into a sink and not pulled from an iterator per request:
docs/adr/0001-engines-push.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from millstream_server.control.engine import Engine, EngineInfo, Probeable, Role, Task
from millstream_server.generation.output import OutputSink
from millstream_server.generation.request import GenerationRequest
from millstream_server.generation.sampling import Ability
from millstream_server.generation.ticket import KvTransfer
from millstream_server.media import families
from millstream_server.media.families.family import Family
from millstream_server.media.items import Modality
from millstream_server.runtime.errors import ServingError

_COMPLETES = frozenset({Task.COMPLETE})
_OPEN_CACHES = 4
_BY_DIFFUSION = frozenset({Task.COMPLETE, Task.GENERATE_TEXT})


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorInfo(EngineInfo):
    """Facts about a started engine that generates text."""

    vocab_size: int
    context_length: int
    """Prompt plus completion, in tokens."""
    block_size: int
    """Tokens per KV block."""
    total_blocks: int
    abilities: frozenset[Ability] = frozenset()
    bootstrap_host: str = ""
    """Prefill engines only: host where decode engines get the KV cache."""
    bootstrap_port: int = 0
    kv_transfer: KvTransfer | None = None
    """Prefill and decode engines: how they hand off; None: a worker before contract 1.2."""
    media: MediaModel | None = None
    """What the model takes besides text; None: nothing."""
    refused_fields: frozenset[str] = frozenset()
    """Paths in StartGeneration that the engine would ignore, or that would end it
    (`generation.validation`)."""
    model_hash: str = ""
    """SHA-256, in hex, of what the model's files are; empty: not known."""
    max_batched_tokens: int = 0
    """Most prompt tokens that one step computes; 0: not known."""
    dp_start: int = 0
    """First of its data-parallel ranks."""
    tool_call_parser: str = ""
    """Name of the parser that the model's tool calls need; empty: not known."""
    reasoning_parser: str = ""
    takes_adapters: bool = False
    """Whether adapters can be loaded and used."""
    tells_kv: bool = False
    """Whether it tells what its prefix cache holds (`kv_cache.events.KvEventSource`)."""

    @property
    def most_open_tokens(self) -> int:
        """Most prompt tokens of open requests, unless the worker's settings say otherwise."""
        return _OPEN_CACHES * self.total_blocks * self.block_size

    def tasks(self, role: Role) -> frozenset[Task]:
        return _BY_DIFFUSION if role is Role.DIFFUSION else _COMPLETES

    @property
    def dp_ranks(self) -> range:
        return range(self.dp_start, self.dp_start + self.dp_size) if self.dp_size > 1 else range(0)

    def adapter_names(self) -> frozenset[str]:
        return frozenset(adapter.name for adapter in self.adapters)


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaModel:
    """The media that a generating engine takes."""

    modalities: frozenset[Modality]
    family: str
    """Name of a module of `media.families`."""
    embedding_width: int
    """Width of an embedding's row."""
    soft_tokens: Mapping[Modality, int] = field(default_factory=dict)
    """Ids of the placeholder tokens; empty in a Processor, which has them from the family."""
    takes_pixels: bool = False
    """Whether the engine runs the vision tower itself."""
    pixel_shape: tuple[int, ...] = ()
    """Shape of a patch in a tensor of pixels, or of an image in families without a grid."""
    positions_per_second: float = 0.0
    """How far M-RoPE positions go on in a second of video; 0: they don't depend on time."""
    rules: Family | None = None
    """How the family places items; None in a Processor, which has it from the model's files."""


class Generator(Protocol):
    """Runs requests between `Engine.warm_up` and `Engine.close`, all from one event loop."""

    def submit(self, request: GenerationRequest, sink: OutputSink) -> None:
        """Start a request; returns at once. Failures are reported to the sink.

        The caller must have checked the request (`generation.validation.check_request`).
        """
        ...

    def abort(self, engine_id: str) -> None:
        """Stop a request at any stage; unknown ids are ignored."""
        ...


class GeneratorEngine(Engine, Probeable, Generator, Protocol):
    """An engine that a generating worker can run: start and stop, health, generation."""

    async def start(self, on_failure: Callable[[ServingError], None]) -> GeneratorInfo:
        """See `Engine.start`."""
        ...


def read_media_model(directory: Path, *, takes_pixels: bool) -> MediaModel | None:
    """Return what the model in ``directory`` takes besides text; None: nothing.

    ``takes_pixels`` says whether the engine runs the vision tower itself.

    Raises:
        UnusableFamilyError: the model has a vision tower, but isn't supported or not complete.
    """
    family = families.load(directory)
    if family is None:
        return None
    return MediaModel(
        modalities=family.modalities,
        family=family.name,
        embedding_width=family.embedding_width,
        soft_tokens={modality: family.soft_token(modality) for modality in family.modalities},
        takes_pixels=takes_pixels,
        pixel_shape=family.pixel_shape,
        positions_per_second=family.positions_per_second,
        rules=family,
    )
