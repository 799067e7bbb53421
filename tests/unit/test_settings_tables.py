"""The tables of settings in the documents name every setting, with its default, and no other."""

from __future__ import annotations

import dataclasses
import enum
import re
from pathlib import Path
from typing import Any

import pytest

from millstream_server.decode.app import DecodeSettings
from millstream_server.diffusion.worker.app import MediaDiffusionSettings
from millstream_server.diffusion.worker.text import TextDiffusionSettings
from millstream_server.embedding.worker.app import EmbeddingSettings
from millstream_server.encode.worker.app import EncodeSettings
from millstream_server.generation.worker.settings import WorkerSettings
from millstream_server.processor.settings import ProcessorSettings
from millstream_server.runtime.lifecycle.service_settings import ServiceSettings
from millstream_server.runtime.settings import EngineArguments, declared
from millstream_server.worker.host_settings import HostSettings

_ROOT = Path(__file__).parents[2]
_SERVICES = "services/millstream_server"
_ROW = re.compile(r"^\| `(--[a-z-]+|MILLSTREAM_[A-Z_]+)` \| *(.*?) *\| .+ \|$", re.MULTILINE)


def _documented(page: str) -> dict[str, str]:
    """Read the table of the section "Settings", or of another one: names and defaults."""
    path, _, section_name = page.partition("#")
    text = (_ROOT / path).read_text(encoding="utf-8")
    heading = rf"^## {re.escape(section_name or 'Settings')}$"
    section = re.split(heading, text, flags=re.MULTILINE)[1]
    rows = _ROW.findall(re.split(r"^(?:## |\*\*)", section, flags=re.MULTILINE)[0])
    assert len(rows) == len(dict(rows)), f"{page} has a setting twice"
    return dict(rows)


def _declared(cls: type[Any], base: type[Any] | None) -> dict[str, str]:
    known = {f.name for f in declared(base)} if base else set()
    return {_name(f): _default(f) for f in declared(cls) if f.name not in known}


def _name(f: dataclasses.Field[Any]) -> str:
    if f.metadata["secret"] or isinstance(f.default, EngineArguments):
        return f"MILLSTREAM_{f.name.upper()}"
    return "--" + f.name.replace("_", "-")


def _default(f: dataclasses.Field[Any]) -> str:
    value = f.default.value if isinstance(f.default, enum.Enum) else f.default
    if value is dataclasses.MISSING:
        return "required"
    if value in (None, "", (), EngineArguments()):
        return ""
    if isinstance(value, tuple):
        return f"`{','.join(value)}`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:.12g}`" if isinstance(value, int | float) else f"`{value}`"


@pytest.mark.parametrize(
    ("page", "cls", "base"),
    [
        ("docs/operations.md", ServiceSettings, None),
        (f"{_SERVICES}/worker/README.md", WorkerSettings, ServiceSettings),
        (f"{_SERVICES}/decode/README.md", DecodeSettings, WorkerSettings),
        (f"{_SERVICES}/encode/README.md", EncodeSettings, HostSettings),
        (f"{_SERVICES}/diffusion/README.md", MediaDiffusionSettings, HostSettings),
        (
            f"{_SERVICES}/diffusion/README.md#Settings with `--kind text`",
            TextDiffusionSettings,
            WorkerSettings,
        ),
        (f"{_SERVICES}/embedding/README.md", EmbeddingSettings, HostSettings),
        (f"{_SERVICES}/processor/README.md", ProcessorSettings, ServiceSettings),
    ],
)
def test_every_setting_is_documented_and_no_other(
    page: str, cls: type[Any], base: type[Any] | None
) -> None:
    assert _documented(page) == _declared(cls, base)


def test_no_page_names_a_setting_that_does_not_exist() -> None:
    known = {
        _name(f)
        for cls in (
            ServiceSettings,
            DecodeSettings,
            MediaDiffusionSettings,
            EncodeSettings,
            EmbeddingSettings,
            ProcessorSettings,
            TextDiffusionSettings,
        )
        for f in declared(cls)
    }
    pages = [_ROOT / "docs/operations.md", *(_ROOT / _SERVICES).glob("*/README.md")]
    for page in pages:
        rows = re.findall(r"^\| `(--[a-z-]+|MILLSTREAM_[A-Z_]+)", page.read_text(), re.MULTILINE)
        assert set(rows) <= known, page
