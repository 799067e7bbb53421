"""Settings of a Processor process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from millstream_server.routing.policy import PolicyName
from millstream_server.runtime.settings import SettingsError, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorSettings:
    """Read by `python -m millstream_server.processor`."""

    listen: str = setting("0.0.0.0:50051", help="address to serve on, HOST:PORT")
    models: tuple[str, ...] = setting(
        help="models to serve, NAME=DIR,…; DIR holds tokenizer and configs, no weights are read"
    )
    workers: tuple[str, ...] = setting(
        help="static discovery: addresses of the workers of all roles, HOST:PORT,…"
    )
    policy: PolicyName = setting(
        PolicyName.LEAST_LOADED, help="how a worker is picked: round_robin or least_loaded"
    )
    ticket_key: str = setting(
        "",
        help="hex key, 32 bytes or more, that signs hand-off tickets; needed with prefill workers",
        secret=True,
    )
    max_receive_bytes: int = setting(
        4 << 20, help="largest message taken from a client, in bytes (4 MiB)"
    )
    max_pace_s: float = setting(
        0.05, help="longest time tokens are gathered into one message when the process is full"
    )
    text_threads: int = setting(2, help="threads for templates and tokenization")
    drain_s: float = setting(60.0, help="on SIGTERM: longest wait for running requests")
    log_level: str = setting("info", help="debug, info, warning or error")

    def model_directories(self) -> dict[str, Path]:
        """Parse `models`.

        Raises:
            SettingsError: an entry isn't NAME=DIR.
        """
        directories = {}
        for entry in self.models:
            name, equals, directory = entry.partition("=")
            if not (name and equals and directory):
                raise SettingsError(f"--models: {entry!r} is not NAME=DIR")
            directories[name] = Path(directory)
        return directories
