"""Settings of a Processor process."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from millstream_server.control.engine import Task
from millstream_server.formats.families import FORMATS
from millstream_server.routing.plan import DEFAULT_MIN_TOKENS, HandoffMode
from millstream_server.routing.policy import PolicyName
from millstream_server.runtime.lifecycle.service_settings import ServiceSettings
from millstream_server.runtime.rpc.channel import is_loopback
from millstream_server.runtime.settings import SettingsError, setting
from millstream_server.runtime.transport.options import TransportOptions

_is_origin = re.compile(
    r"[a-z][a-z0-9+.-]*://[a-z0-9._-]+(?::[0-9]+)?|https?://\[[0-9a-f:]+\](?::[0-9]+)?"
).fullmatch
"""Lower case, without a path."""
_is_host = re.compile(r"[a-z0-9._-]+|\[[0-9a-f:]+\]").fullmatch
_LEAST = 100
"""Of a share of the streams: a connection should take as many RPCs (RFC 9113, 6.5.2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorSettings(ServiceSettings):
    """Read by `python -m millstream_server.processor`."""

    # ---- what clients may send, open and hold
    max_receive_bytes: int = setting(
        4 << 20, help="largest message or HTTP body taken from a client, in bytes (4 MiB)"
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        help="origins whose pages may call this port by a browser, https://app.example,…, or * "
        "for all pages (docs/browsers.md)",
    )
    hosts: tuple[str, ...] = setting(
        (),
        help="names besides localhost that HTTP requests may be for where --listen is a loopback "
        "address, without ports, or * for all (docs/browsers.md)",
    )
    max_open_streams: int = setting(
        10_240,
        help="most RPCs open at once; connections, RPCs of one connection and resets have shares "
        "of it (docs/operations.md)",
    )
    max_open_bytes: int = setting(
        512 << 20,
        help="most bytes of messages that open RPCs hold, of files in conversations, of requests "
        "on streams of images, videos and vectors, and of all output that clients have not read, "
        "each (512 MiB); other limits are shares of it (docs/operations.md)",
    )
    max_connection_age_s: float = setting(
        1800.0,
        help="a client's connection is asked to end after this, so that clients that resolve names "
        "spread over new replicas; its RPCs end after three times this; 0: never",
    )
    # ---- models
    models: tuple[str, ...] = setting(
        pairs=True,
        help="models to serve, NAME=DIR,…; DIR holds tokenizer and configs, no weights are read; "
        "NAME alone for a model that makes images or videos",
    )
    model_alias: tuple[str, ...] = setting(
        (), pairs=True, help="other names for models, ALIAS=NAME,…, such as gpt-4o=llama"
    )
    default_models: tuple[str, ...] = setting(
        (),
        pairs=True,
        help="models of requests that name none, TASK=NAME,…; TASK is chat, complete, embed, "
        "rerank, generate_image, generate_video or generate_text; else it is the only model for "
        "the task, or the first one that chats and is no diffusion language model",
    )
    formats: tuple[str, ...] = setting(
        (),
        pairs=True,
        help="how models write reasoning and calls, NAME=FORMAT,… (docs/formats.md); else their "
        "workers or files tell it",
    )
    workers: tuple[str, ...] = setting(
        help="where the workers of all roles are, one or more of HOST:PORT, dns:NAME:PORT, "
        "k8s:SERVICE, k8s:NAMESPACE/SERVICE and file:PATH, separated by commas"
    )
    policy: PolicyName = setting(
        PolicyName.LEAST_LOADED,
        help="how a worker is picked: round_robin, least_loaded, power_of_two or kv_aware "
        "(docs/routing.md)",
    )
    handoff: HandoffMode = setting(
        HandoffMode.ALWAYS,
        help="when requests are handed off from prefill to decode, for models that also have "
        "aggregated workers: always, never, or auto, which is by the prompt's uncached tokens",
    )
    handoff_min_tokens: int = setting(
        DEFAULT_MIN_TOKENS,
        help="with --handoff auto: fewest uncached tokens of a prompt that is handed off",
    )
    ticket_key: str = setting(
        "",
        help="hex key, 32 bytes or more, that signs hand-off tickets; needed with prefill workers",
        secret=True,
    )
    http: bool = setting(
        default=True,
        help="also serve OpenAI's and Anthropic's APIs over HTTP, on this port (docs/openai.md)",
    )
    redispatch: bool = setting(
        default=True,
        help="requests whose worker is lost go on at another one, without a gap or a repeat "
        "(docs/guarantees.md)",
    )
    max_pace_s: float = setting(
        0.05, help="longest time tokens are gathered into one message when the process is full"
    )
    text_threads: int = setting(
        2, help="threads that read bodies, texts and grammars, 2 or more: long work leaves one free"
    )
    page: bool = setting(
        default=True,
        help="with --http: a page for browsers at `/`, a chat and an image maker (docs/http.md)",
    )
    # ---- who may call, and the workers' TLS
    api_keys_file: Path | None = setting(
        None,
        help="file of API keys; with keys, requests without one are refused (docs/security.md)",
    )
    api_keys: str = setting("", help="API keys, the same as lines of that file", secret=True)
    worker_tls_dir: Path | None = setting(
        None,
        help="folder with ca.crt, PEM CAs of the workers' certificates, and, for mTLS, tls.crt and "
        "tls.key, which this Processor shows to them; turns TLS to workers on",
    )
    worker_tls_name: str = setting(
        "", help="name in the workers' certificates, where their addresses are bare IPs"
    )
    # ---- images and videos
    fetch_urls: bool = setting(
        default=False, help="fetch images and videos from http and https URLs of clients"
    )
    fetch_url_hosts: tuple[str, ...] = setting(
        (),
        help="fetch from these hosts only, HOST or HOST:PORT,…; they may have private addresses "
        "and other ports",
    )
    share_media_cache: bool = setting(
        default=False,
        help="callers with different API keys share cached images and videos, which saves work, "
        "but lets a caller find out by the time it takes whether another one sent a file",
    )
    # ---- limits
    max_admitted_requests: int = setting(
        0, help="most requests of a model that run at once; 0: as many as its workers run"
    )
    max_queued_requests: int = setting(1024, help="most requests of a model that wait to run")
    # ---- shares of the two numbers, and what nobody can choose better

    def transport(self) -> TransportOptions:
        """Return the bounds of the port that clients reach."""
        streams, room = self.max_open_streams, self._under_way_bytes
        resets = _share(streams, 1, 10)
        return TransportOptions(
            max_receive_bytes=self.max_receive_bytes,
            cors_origins=self.origins(),
            hosts=self.names(),
            max_open_streams=streams,
            max_streams=_share(streams, 2, 5),
            max_connections=_share(streams, 4, 5),
            max_connections_per_address=_share(streams, 2, 5),
            max_resets=resets,
            resets_per_s=resets / 10,
            max_received_bytes=room,
            max_unsent_bytes=room,
            max_connection_age_s=self.max_connection_age_s,
            max_connection_age_grace_s=2 * self.max_connection_age_s,
        )

    @property
    def _under_way_bytes(self) -> int:
        """Half of the memory: 64 of the largest messages at once; never less than one."""
        return max(self.max_open_bytes // 2, self.max_receive_bytes)

    def origins(self) -> frozenset[str]:
        """Parse `cors_origins`.

        Raises:
            SettingsError: one is no origin.
        """
        for origin in self.cors_origins:
            if origin != "*" and not _is_origin(origin):
                why = "is neither * nor an origin as browsers send it: https://app.example"
                raise SettingsError(f"--cors-origins: {origin!r} {why}")
        return frozenset(self.cors_origins)

    def names(self) -> frozenset[str] | None:
        """Parse `hosts`; None where any are taken.

        Raises:
            SettingsError: one is no name of a host.
        """
        for host in self.hosts:
            if host != "*" and not _is_host(host):
                why = "is neither * nor a host as browsers send it, without a port: app.example"
                raise SettingsError(f"--hosts: {host!r} {why}")
        return frozenset(self.hosts) if is_loopback(self.listen) else None

    @property
    def max_media_item_bytes(self) -> int:
        """Most bytes of one image or video: so eight callers can send one at once."""
        return self.max_open_bytes // 8

    @property
    def max_queued_tokens(self) -> int:
        """Most tokens, prompts and answers, of a model's waiting requests: at 16 bytes a token."""
        return self.max_open_bytes // 16

    @property
    def max_request_tokens(self) -> int:
        """Most tokens of one request: its ids, texts and logprobs take up to 128 bytes a token."""
        return self.max_open_bytes // 128

    @property
    def prefix_index_blocks(self) -> int:
        """Most KV blocks of a model that routing knows of: half the memory, 120 bytes a block."""
        return self.max_open_bytes // 256

    def model_formats(self) -> dict[str, str]:
        """Parse `formats`.

        Raises:
            SettingsError: an entry is not NAME=FORMAT, or its model or its format is unknown.
        """
        formats: dict[str, str] = {}
        for entry in self.formats:
            name, _, form = entry.partition("=")
            if name not in self.model_directories():
                raise SettingsError(f"--formats: {name!r} is no model of --models")
            if form not in FORMATS:
                known = ", ".join(sorted(FORMATS))
                raise SettingsError(f"--formats: {form!r} is none of {known}")
            formats[name] = form
        return formats

    def model_directories(self) -> dict[str, Path | None]:
        """Parse `models`; None: no directory was given.

        Raises:
            SettingsError: an entry is neither NAME=DIR nor NAME, or a name is there twice.
        """
        directories: dict[str, Path | None] = {}
        for entry in self.models:
            name, equals, directory = entry.partition("=")
            if not name or (equals and not directory):
                raise SettingsError(f"--models: {entry!r} is neither NAME=DIR nor NAME")
            if name in directories:
                raise SettingsError(f"--models: {name!r} is there twice")
            directories[name] = Path(directory) if directory else None
        return directories

    def aliases(self) -> dict[str, str]:
        """Parse `model_alias`.

        Raises:
            SettingsError: an entry isn't ALIAS=NAME of a model here, or a name is there twice.
        """
        aliases = self._names("--model-alias", self.model_alias)
        if taken := aliases.keys() & self.model_directories().keys():
            raise SettingsError(f"--model-alias: {min(taken)!r} is a model's own name")
        return aliases

    def defaults(self) -> dict[Task, str]:
        """Parse `default_models`.

        Raises:
            SettingsError: an entry isn't TASK=NAME of a model here, or a task is there twice.
        """
        tasks = {task.name.lower(): task for task in Task}
        found = self._names("--default-models", self.default_models)
        if unknown := found.keys() - tasks.keys():
            known = ", ".join(tasks)
            raise SettingsError(f"--default-models: {min(unknown)!r} is none of {known}")
        return {tasks[task]: name for task, name in found.items()}

    def _names(self, flag: str, entries: tuple[str, ...]) -> dict[str, str]:
        """Parse pairs whose values are models served here."""
        models, found = self.model_directories(), dict[str, str]()
        for entry in entries:
            key, _, name = entry.partition("=")
            if not (key and name):
                raise SettingsError(f"{flag}: {entry!r} lacks one side of its '='")
            if name not in models:
                served = ", ".join(models)
                raise SettingsError(f"{flag}: {entry!r} names no model of --models: {served}")
            if key in found:
                raise SettingsError(f"{flag}: {key!r} is there twice")
            found[key] = name
        return found


def _share(number: int, part: int, whole: int) -> int:
    """Return a share of a number, or the least: the number itself bounds all of them anyway."""
    return max(_LEAST, number * part // whole)
