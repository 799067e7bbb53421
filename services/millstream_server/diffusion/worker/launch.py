"""Starts the worker of the kind that `--kind` names: it decides which settings there are."""

from __future__ import annotations

import enum
import sys
from dataclasses import dataclass
from typing import NoReturn

from millstream_server.runtime.lifecycle.main import main
from millstream_server.runtime.lifecycle.python import lacking
from millstream_server.runtime.settings import group, read_first, setting

_PROG = "millstream-diffusion"


class DiffusionKind(enum.Enum):
    """What a worker makes."""

    IMAGE = "image"
    VIDEO = "video"
    TEXT = "text"
    """By a diffusion language model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindSettings:
    """Read before all others."""

    kind: DiffusionKind = setting(
        DiffusionKind.IMAGE,
        help="what the model makes: image, video or text; text has settings of its own, which "
        "--kind text --help lists",
    )


def launch() -> NoReturn:
    """Read `--kind`, then run the worker; each kind imports only what it needs."""
    if read_first(KindSettings).kind is DiffusionKind.TEXT:
        _launch_text()
    if why := lacking("PIL", "av"):  # the imports below would say it by a traceback
        sys.stderr.write(f"{_PROG}: {why}\n")
        raise SystemExit(2)
    from millstream_server.diffusion.worker.app import MediaDiffusionSettings, run  # noqa: PLC0415

    main(
        MediaDiffusionSettings,
        run,
        prog=_PROG,
        description="The diffusion worker of Millstream: prompts to images or videos.",
    )


def _launch_text() -> NoReturn:
    from millstream_server.diffusion.worker.text import TextDiffusionSettings, run  # noqa: PLC0415

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Settings(TextDiffusionSettings):
        what: KindSettings = group(KindSettings)

    main(
        Settings,
        run,
        prog=_PROG,
        description="The diffusion worker of Millstream, with --kind text: prompts to text.",
    )
