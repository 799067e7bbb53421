"""Chat encodings of checkpoints without a template: the maker's code says how, and isn't run.

Each is a template beside this file, rendered as any model's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream_server.processor.text.vocabularies.finding import VocabularyFile
from millstream_server.processor.text.vocabularies.tekken import version_of

_BY_MODEL_TYPE = {
    "deepseek_v32": "deepseek-v3.2",
    "deepseek_v4": "deepseek-v4",
    "deepseek_v41": "deepseek-v4.1",
    "kimi_k3": "kimi-k3",
}
_TEKKEN_VERSIONS = frozenset((3, 7, 11, 13))
_OF_VERSIONS = {"deepseek-v4": ("deepseek-v4", "4"), "deepseek-v4.1": ("deepseek-v4", "4.1")}
"""Encodings that share a template: its name, and the version that it is told."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """A template of ours, and why it is this one."""

    name: str
    template: str
    reason: str


def find_encoding(source: VocabularyFile, config: Mapping[str, Any]) -> Encoding | None:
    """Return the encoding of a checkpoint without a template; None: none is known for it.

    ``config`` is config.json.
    """
    if source.kind is not None and source.kind.name == "tekken":
        version = version_of(source.file)
        number = version.removeprefix("v")
        if not number.isdecimal() or int(number) not in _TEKKEN_VERSIONS:
            return None
        reason = f"{source.file.name} has the version {version}"
        return Encoding(f"mistral-{version}", _read("mistral", number), reason)
    model_type = str(config.get("model_type"))
    name = _BY_MODEL_TYPE.get(model_type)
    if name is None:
        return None
    template = _read(*_OF_VERSIONS.get(name, (name,)))
    return Encoding(name, template, f"config.json has the model_type {model_type}")


def _read(name: str, version: str = "") -> str:
    template = (Path(__file__).parent / f"{name}.jinja").read_text(encoding="utf-8")
    return f"{{%- set version = {version} -%}}{template}" if version else template
