"""The rows: each an attack, how the Processor is set up against it, and what it may cost.

Numbers are those of the issue's table; rows without one are relatives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from tests.benchmarks.hostile.attacks import methods

_SMALL_MB = 150
"""Memory that an attack may take which holds no messages."""
_HELD_MB = 700
"""The same of one that does: --max-open-bytes is 512 MiB, and buffers and objects come on top."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One attack beside a normal client."""

    name: str
    attack: str
    number: str = ""
    """In the issue's table."""
    knobs: Mapping[str, object] = field(default_factory=dict)
    keys: bool = False
    """The Processor wants API keys; the normal client has one."""
    attacker: Literal["nobody", "known", "wrong"] = "nobody"
    """Whether the attacker has a key too, or a wrong one."""
    tls: Literal["", "tls", "mtls"] = ""
    slow_model: bool = False
    """Another model, `slow`, has a worker with steps of a second."""
    to_health: bool = False
    """Against the plaintext port for probes."""
    sources: int = 1
    """Addresses that the attacker comes from."""
    times_idle: float = 5.0
    """The most that p99 of normal chats may be, in times of idle."""
    seconds: float = 0.0
    """At least; 0: as all others."""
    after_s: float = 0.0
    """So long after the attacker has closed its connections probes and sound chats are judged."""
    memory_mb: float = _SMALL_MB
    """What the Processor may take beyond idle."""
    control: bool = False
    """Not an attack: it has to be served, and latency beside it isn't judged."""


def _known(number: str, name: str, attack: str, **rest: object) -> Row:
    """Make a row whose attacker has a key of its own."""
    return Row(number=number, name=name, attack=attack, keys=True, attacker="known", **rest)  # type: ignore[arg-type]


_CHAT = {"path": methods.CHAT}
_OF_THE_ISSUE = [
    _known("1", "tool-patterns", "calls.tool_patterns"),
    _known("2", "unread-completes", "readers.completes", seconds=15.0, memory_mb=_HELD_MB),
    Row(number="3", name="metadata-not-utf8", attack="calls.not_utf8", keys=True,
        knobs={"times": 110, "per_s": 500.0}),
    _known("4", "upload-but-a-byte", "uploads.but_a_byte", knobs={**_CHAT, "streams": 400},
           memory_mb=_HELD_MB),
    Row(number="4", name="upload-to-health", attack="uploads.but_a_byte", keys=True,
        knobs={"path": methods.CHECK, "streams": 400}, memory_mb=_HELD_MB),
    _known("4", "silent-chat-ends", "uploads.silent_ends", knobs={**_CHAT, "within_s": 35.0},
           seconds=36.0),
    Row(number="5", name="path-not-utf8", attack="calls.path_not_utf8"),
    Row(number="5", name="path-to-health", attack="calls.path_not_utf8", tls="mtls",
        to_health=True),
    _known("6", "silent-streams", "uploads.silent",
           knobs={**_CHAT, "streams": 10_000, "connections": 5}),
    _known("7", "tokenize-texts", "calls.tokenize_texts", seconds=8.0, memory_mb=_HELD_MB),
    _known("8", "reflection-echoes", "readers.reflection_echoes", knobs={"size": 1 << 20},
           memory_mb=_HELD_MB),
    _known("8", "reflection-streams", "uploads.silent",
           knobs={"path": methods.REFLECTION, "streams": 20_000, "connections": 5}),
    _known("9", "start-and-reset", "floods.start_and_reset", knobs={"per_s": 9_000.0}),
    _known("10", "forged-fields", "calls.request_ids"),
    Row(number="11", name="certificate-name", attack="connections.certificate", tls="mtls"),
    _known("12", "leave-midway", "calls.leave_midway", knobs={"per_s": 300.0}),
]  # fmt: skip

_RELATIVES = [
    _known("", "byte-by-byte", "uploads.byte_by_byte", knobs={"streams": 400, "every_s": 0.2}),
    _known("", "gzip-bombs", "uploads.gzip_bombs", knobs={"expanded_mb": 512}, memory_mb=_HELD_MB),
    _known("", "silent-embeds", "uploads.silent",
           knobs={"path": "/millstream.v1.EmbeddingService/Embed", "streams": 5_000,
                  "connections": 5}),
    _known("", "silent-images", "uploads.silent",
           knobs={"path": "/millstream.v1.DiffusionService/GenerateImage", "streams": 5_000,
                  "connections": 5}),
    Row(name="silent-watches", attack="uploads.silent", keys=True,
        knobs={"path": "/grpc.health.v1.Health/Watch", "streams": 10_000, "connections": 5}),
    Row(name="silent-from-many", attack="uploads.silent", sources=250,
        knobs={**_CHAT, "streams": 10_000, "connections": 250}),
    Row(name="uploads-from-many", attack="uploads.but_a_byte", sources=100,
        knobs={**_CHAT, "streams": 400, "connections": 100}, memory_mb=_HELD_MB),
    Row(name="connections-from-many", attack="connections.idle", sources=250,
        knobs={"count": 8_000}),
    Row(name="connections", attack="connections.idle", knobs={"count": 8_000}),
    Row(name="connection-churn", attack="connections.churn", knobs={"per_s": 1_000.0}),
    Row(name="garbage", attack="connections.garbage", knobs={"per_s": 500.0}),
    Row(name="tls-begun", attack="connections.handshakes", knobs={"count": 4_000}, tls="tls"),
    Row(name="tls-half-done", attack="connections.whole_hellos", knobs={"count": 4_000},
        tls="tls"),
    Row(name="ping", attack="floods.ping"),
    Row(name="ping-unread", attack="floods.ping", knobs={"reads": False}),
    Row(name="settings", attack="floods.settings"),
    Row(name="settings-unread", attack="floods.settings", knobs={"reads": False}),
    Row(name="continuation", attack="floods.continuation"),
    Row(name="empty-data", attack="floods.empty_data"),
    Row(name="window-update", attack="floods.window_update"),
    Row(name="priority", attack="floods.priority"),
    Row(name="unknown-frames", attack="floods.unknown_frames"),
    _known("", "made-to-reset", "floods.made_to_reset", knobs={"per_s": 2_000.0}),
    _known("", "unread-chats", "readers.chats", seconds=8.0),
    _known("", "unread-answers", "readers.big_answers", seconds=8.0, memory_mb=_HELD_MB),
    _known("", "byte-a-second", "readers.byte_a_second"),
    Row(name="header-bomb", attack="calls.header_bomb", keys=True,
        knobs={"size": 3_900, "times": 4_000, "per_s": 500.0}),
    Row(name="huge-metadata", attack="calls.huge_metadata", keys=True, knobs={"size": 1_000_000}),
    Row(name="unknown-methods", attack="calls.unknown_methods", keys=True),
    Row(name="bad-keys", attack="calls.list_models", keys=True, attacker="wrong"),
    Row(name="health-checks", attack="calls.health_checks", keys=True),
    _known("", "list-models", "calls.list_models"),
]  # fmt: skip

_OF_STRANGERS = [
    Row(name="watches-and-settings", attack="floods.watches_and_settings", keys=True, seconds=8.0,
        knobs={"connections": 3, "watches": 2_000}),
    Row(name="header-names", attack="calls.header_names", keys=True,
        knobs={"size": 4_000, "times": 15, "per_s": 0.0}),
    Row(name="trailer-names", attack="calls.trailer_names", keys=True,
        knobs={"size": 4_000, "times": 15}),
    Row(name="settings-unknown-ids", attack="floods.unknown_settings", memory_mb=20,
        knobs={"connections": 10, "frames": 24, "ids": 2_730}),
    Row(name="settings-unknown-few", attack="floods.unknown_settings", memory_mb=20,
        knobs={"connections": 10, "frames": 1_000, "ids": 32, "bytes_per_s": 500_000}),
    Row(name="metadata-200k", attack="calls.huge_metadata", keys=True, knobs={"size": 200_000}),
    Row(name="bad-trailers", attack="floods.bad_trailers", keys=True, knobs={"per_s": 5_000.0}),
    _known("", "data-after-end", "floods.data_after_end", knobs={"per_s": 2_000.0}),
    _known("", "start-and-reset-unpaced", "floods.start_and_reset", knobs={"per_s": 0.0}),
    _known("", "turns-and-resets", "floods.turns_and_resets",
           knobs={"connections": 20, "per_s": 2_000.0}),
    Row(name="headers-begun", attack="connections.headers_begun", seconds=15.0,
        knobs={"count": 1_000, "within_s": 12.0}),
    Row(name="tls-begun-at-once", attack="connections.handshakes", tls="tls",
        knobs={"count": 1_500, "per_s": 0.0}),
    Row(name="tls-half-done-at-once", attack="connections.whole_hellos", tls="tls",
        knobs={"count": 1_500, "per_s": 0.0}),
    _known("", "zero-window-chat", "floods.zero_window_chats", seconds=5.0, after_s=10.0,
           knobs={"connections": 10, "per_s": 1_000.0}),
    _known("", "made-you-reset-chat", "floods.many_chats",
           knobs={"connections": 10, "per_s": 3_000.0, "overflow": True}),
    _known("", "chat-flood", "floods.many_chats", after_s=5.0,
           knobs={"connections": 10, "per_s": 1_000.0}),
]  # fmt: skip
_OF_STRANGERS = [replace(row, times_idle=3.0) for row in _OF_STRANGERS]

_FOREIGN = "Origin: https://evil.example\r\nSec-Fetch-Site: cross-site\r\n"
_OF_HTTP = [
    Row(name="http-slow-heads", attack="http.slow_heads", seconds=14.0,
        knobs={"count": 4_000, "within_s": 12.5}),
    _known("", "http-slow-bodies", "http.slow_bodies", seconds=35.0,
           knobs={"count": 1_500, "within_s": 33.0}),
    _known("", "http-but-a-byte", "http.but_a_byte", knobs={"count": 400}, memory_mb=_HELD_MB),
    _known("", "json-many", "bodies.whole", knobs={"kind": "many"}, seconds=8.0,
           memory_mb=_HELD_MB),
    _known("", "json-blocks", "bodies.whole", knobs={"kind": "blocks"}, seconds=8.0,
           memory_mb=_HELD_MB),
    _known("", "json-long", "bodies.whole", knobs={"kind": "long"}, memory_mb=_HELD_MB),
    _known("", "json-deep", "bodies.whole", knobs={"kind": "deep"}),
    _known("", "grammars-doubled", "bodies.whole", knobs={"kind": "grammars"}),
    _known("", "schemas-in-themselves", "calls.schemas_in_themselves"),
    _known("", "continued-markers", "calls.continued_markers", seconds=8.0),
    _known("", "connect-messages", "bodies.beside_a_small_one", seconds=8.0, memory_mb=_HELD_MB),
    _known("", "prompts-of-4-mib", "bodies.whole", knobs={"kind": "prompts", "wanted": "400"},
           memory_mb=_HELD_MB),
    _known("", "json-not-utf8", "bodies.whole", knobs={"kind": "not-utf8", "wanted": "400"}),
    _known("", "blocks-not-utf8", "bodies.whole",
           knobs={"kind": "not-utf8", "wanted": "400", "path": "/v1/messages"}),
    Row(name="foreign-pages", attack="bodies.whole",
        knobs={"kind": "small", "wanted": "403", "more": _FOREIGN}),
    Row(name="foreign-pages-by-connect", attack="bodies.whole",
        knobs={"kind": "small", "wanted": "403", "path": methods.LIST_MODELS, "more": _FOREIGN}),
    Row(name="foreign-hosts", attack="bodies.whole",
        knobs={"kind": "small", "wanted": "403", "host": "evil.example"}),
    Row(name="connect-types", attack="bodies.whole", keys=True,
        knobs={"kind": "small", "path": methods.LIST_MODELS, "wanted": "200",  # an error in it
               "more": "Content-Type: application/connect+json\r\n"}),
    Row(name="http-many-fields", attack="http.many_fields", keys=True),
    _known("", "http-pipelined", "http.pipelined", knobs={"connections": 20}),
    _known("", "http-pipelined-unread", "http.pipelined",
           knobs={"connections": 20, "reads": False}),
    _known("", "http-half-closed", "http.half_closed", knobs={"per_s": 300.0}),
    _known("", "http-smuggled", "http.smuggled", knobs={"per_s": 500.0}),
    _known("", "http-tiny-chunks", "http.tiny_chunks", knobs={"connections": 8}),
    _known("", "http-chunk-extensions", "http.tiny_chunks",
           knobs={"connections": 8, "extension": ";a=b" * 10}),
    _known("", "http-trailers", "http.trailers", knobs={"connections": 4}, memory_mb=20),
    _known("", "http-kept", "http.kept", knobs={"count": 8_000}, sources=4),
    _known("", "sse-unread", "http.readers", seconds=8.0, sources=4,
           knobs={"count": 200, "model": "tiny", "tokens": 3_000, "per_s": 200.0}),
    _known("", "sse-byte-a-second", "http.readers", seconds=8.0,
           knobs={"count": 100, "model": "tiny", "tokens": 3_000, "per_s": 100.0, "every_s": 1.0}),
    _known("", "sse-10000-idle", "http.readers", seconds=40.0, sources=250, slow_model=True,
           knobs={"count": 10_000, "model": "slow", "tokens": 3_000, "per_s": 300.0},
           memory_mb=_HELD_MB),
]  # fmt: skip

_CONTROLS = [
    _known("", "slow-reader", "readers.slow_but_sound", knobs={"tokens": 300}, seconds=12.0,
           control=True),
    _known("", "2000-chats", "controls.many_chats", knobs={"count": 2_000, "tokens": 40},
           seconds=45.0, control=True, memory_mb=_HELD_MB),
]  # fmt: skip

ROWS = {
    row.name: row for row in (*_OF_THE_ISSUE, *_RELATIVES, *_OF_STRANGERS, *_OF_HTTP, *_CONTROLS)
}
