"""Chat encodings of checkpoints that have no chat template: the maker's code says how, and isn't run.

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
    "gpt_oss": "harmony",
}
_BY_TEKKEN = {
    "v3": "mistral-v3",
    "v7": "mistral-v7",
    "v11": "mistral-v11",
    "v13": "mistral-v13",
}
"""By the version of tekken.json."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """A template of ours, and why it is this one."""

    name: str
    reason: str

    @property
    def template(self) -> str:
        return (Path(__file__).parent / f"{self.name}.jinja").read_text(encoding="utf-8")


def find_encoding(source: VocabularyFile, config: Mapping[str, Any]) -> Encoding | None:
    """Return the encoding of a checkpoint without a template; None: none is known for it.

    ``config`` is config.json.
    """
    if source.kind is not None and source.kind.name == "tekken":
        version = version_of(source.file)
        name = _BY_TEKKEN.get(version, "")
        reason = f"{source.file.name} has the version {version}"
    else:
        model_type = config.get("model_type")
        name = _BY_MODEL_TYPE.get(str(model_type), "")
        reason = f"config.json has the model_type {model_type}"
    return Encoding(name, reason) if name else None
