"""Settings of a Processor process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from millstream_server.routing.plan import DEFAULT_MIN_TOKENS, HandoffMode
from millstream_server.routing.policy import PolicyName
from millstream_server.routing.prefix.index import DEFAULT_MAX_BLOCKS
from millstream_server.runtime.lifecycle.service_settings import ServiceSettings
from millstream_server.runtime.settings import SettingsError, group, setting
from millstream_server.runtime.transport.settings import TransportSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorSettings(ServiceSettings):
    """Read by `python -m millstream_server.processor`."""

    models: tuple[str, ...] = setting(
        pairs=True,
        help="models to serve, NAME=DIR,…; DIR holds tokenizer and configs, no weights are read; "
        "NAME alone for a model that makes images or videos",
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
    prefix_index_blocks: int = setting(
        DEFAULT_MAX_BLOCKS,
        help="most cached KV blocks per model, of all its workers together, that kv_aware and "
        "--handoff auto know of; a million takes about 120 MB",
    )
    ticket_key: str = setting(
        "",
        help="hex key, 32 bytes or more, that signs hand-off tickets; needed with prefill workers",
        secret=True,
    )
    clients: TransportSettings = group(TransportSettings)
    max_receive_bytes: int = setting(
        4 << 20, help="largest message taken from a client, in bytes (4 MiB)"
    )
    max_pace_s: float = setting(
        0.05, help="longest time tokens are gathered into one message when the process is full"
    )
    text_threads: int = setting(
        2, help="threads for templates and tokenization, 2 or more: long texts leave one free"
    )
    max_text_wait_s: float = setting(
        120.0,
        help="most seconds of text work that wait, by estimate; the largest texts take 2 s each. "
        "Above, the last text of the caller with most of them is refused",
    )
    max_caller_text_wait_s: float = setting(
        30.0, help="most seconds of one caller's text work that wait, by estimate"
    )
    # ---- who may call, and the workers' TLS
    api_keys_file: Path | None = setting(
        None,
        help="file of API keys; with keys, requests without one are refused (docs/security.md)",
    )
    api_keys: str = setting("", help="API keys, the same as lines of that file", secret=True)
    worker_tls_ca_file: Path | None = setting(
        None, help="PEM CAs of the workers' certificates; turns TLS to workers on"
    )
    worker_tls_cert_file: Path | None = setting(
        None, help="PEM certificate this Processor shows to workers (mTLS)"
    )
    worker_tls_key_file: Path | None = setting(None, help="PEM private key of that certificate")
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
    max_media_bytes: int = setting(
        512 << 20, help="most bytes of images and videos that open conversations hold (512 MiB)"
    )
    max_media_item_bytes: int = setting(64 << 20, help="most bytes of one image or video (64 MiB)")
    share_media_cache: bool = setting(
        default=False,
        help="callers with different API keys share cached images and videos, which saves work, "
        "but lets a caller find out by the time it takes whether another one sent a file",
    )
    max_media_items: int = setting(64, help="most images and videos of one conversation")
    upload_idle_s: float = setting(
        10.0,
        help="longest time that a client which has begun to send a file in chunks may be behind "
        "32 KiB a second; then its stream ends",
    )
    # ---- limits
    max_admitted_requests: int = setting(
        0, help="most requests of a model that run at once; 0: as many as its workers run"
    )
    max_queued_requests: int = setting(1024, help="most requests of a model that wait to run")
    max_queued_tokens: int = setting(
        32 << 20, help="most tokens, prompts and answers, of a model's waiting requests"
    )
    max_request_tokens: int = setting(
        4 << 20, help="most tokens of one request: n x (prompt + max_new_tokens)"
    )
    max_open_streams: int = setting(10_000, help="most RPCs open at once")
    max_open_bytes: int = setting(
        512 << 20,
        help="most bytes of messages that open RPCs hold, of requests on streams of images, "
        "videos and vectors, and of all output that clients have not read, each (512 MiB)",
    )

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
