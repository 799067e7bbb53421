"""Starts the worker of the kind that `--kind` names: it decides which settings there are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from millstream_server.diffusion.kind import DiffusionKind, KindSettings
from millstream_server.runtime.lifecycle.main import main
from millstream_server.runtime.settings import group, read_first

_PROG = "millstream-diffusion"


def launch() -> NoReturn:
    """Read `--kind`, then run the worker; each kind imports only what it needs."""
    if read_first(KindSettings).kind is DiffusionKind.TEXT:
        _launch_text()
    from millstream_server.diffusion.app import run  # noqa: PLC0415
    from millstream_server.diffusion.settings import DiffusionSettings  # noqa: PLC0415

    main(
        DiffusionSettings,
        run,
        prog=_PROG,
        description="The diffusion worker of Millstream: prompts to images or videos.",
    )


def _launch_text() -> NoReturn:
    from millstream_server.diffusion.text import run  # noqa: PLC0415
    from millstream_server.diffusion.text_settings import TextDiffusionSettings  # noqa: PLC0415

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Settings(TextDiffusionSettings):
        what: KindSettings = group(KindSettings)

    main(
        Settings,
        run,
        prog=_PROG,
        description="The diffusion worker of Millstream, with --kind text: prompts to text.",
    )
