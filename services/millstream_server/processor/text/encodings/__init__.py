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

_BY_MODEL_TYPE = {"deepseek_v32": "deepseek-v3.2", "deepseek_v4": "deepseek-v4"}
_TEKKEN_VERSIONS = frozenset((3, 7, 11, 13))


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
        template = f"{{%- set version = {number} -%}}{_read('mistral')}"
        reason = f"{source.file.name} has the version {version}"
        return Encoding(f"mistral-{version}", template, reason)
    model_type = str(config.get("model_type"))
    name = _BY_MODEL_TYPE.get(model_type)
    if name is None:
        return None
    return Encoding(name, _read(name), f"config.json has the model_type {model_type}")


def _read(name: str) -> str:
    return (Path(__file__).parent / f"{name}.jinja").read_text(encoding="utf-8")
