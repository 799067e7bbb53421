"""Chat encodings of checkpoints without a template: the maker's code says how, and isn't run.

Each is a template beside this file, rendered as any model's own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BY_MODEL_TYPE = {
    "deepseek_v32": "deepseek-v3.2",
    "deepseek_v4": "deepseek-v4",
    "deepseek_v41": "deepseek-v4.1",
    "gpt_oss": "harmony",
    "kimi_k3": "kimi-k3",
}
_TEKKEN_FORMATS = {
    "v3": "mistral",
    "v7": "mistral",
    **dict.fromkeys(("v11", "v13", "v15"), "mistral-v11"),
}
_OF_VERSIONS = {"deepseek-v4": ("deepseek-v4", 4), "deepseek-v4.1": ("deepseek-v4", 4.1)}
"""Encodings that share a template: its name, and the version that it is told."""
_READS_EFFORT = "{%- set effort = reasoning_effort | default(efforts[0], true) -%}"
"""Only where there are some: a variable that is read says that a client may set it."""
_FIRST_CALL_ONLY = "tool_calls[0]"
"""In gpt-oss' template, which also names each result after that call."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """A template of ours, and why it is this one."""

    name: str
    answers: str
    """The format of `millstream_server.formats` in which the model answers."""
    template: str
    reason: str


def find_encoding(
    config: Mapping[str, Any],
    own: Mapping[str, str],
    tekken: str = "",
    efforts: Sequence[str] = (),
) -> Encoding | None:
    """Return the encoding of a checkpoint; None: its own templates are used, or none is known.

    ``config`` is config.json, ``own`` are its templates, which come first if they show all that a
    conversation has; ``tekken`` is the version of a tekken file, ``efforts`` those that it names.
    """
    if own:
        return _in_place_of(own, config)
    if tekken:
        answers = _TEKKEN_FORMATS.get(tekken)
        if answers is None:
            return None
        reason = f"its tekken file has the version {tekken}"
        template = _read("mistral", int(tekken.removeprefix("v")), efforts)
        return Encoding(f"mistral-{tekken}", answers, template, reason)
    model_type = str(config.get("model_type"))
    name = _BY_MODEL_TYPE.get(model_type)
    if name is None:
        return None
    template = _read(*_OF_VERSIONS.get(name, (name,)))
    return Encoding(name, name, template, f"config.json has the model_type {model_type}")


def _in_place_of(own: Mapping[str, str], config: Mapping[str, Any]) -> Encoding | None:
    if config.get("model_type") != "gpt_oss" or _FIRST_CALL_ONLY not in own.get("default", ""):
        return None
    reason = "the checkpoint's template shows only the first of several calls"
    return Encoding("harmony", "harmony", _read("harmony"), reason)


def _read(name: str, version: float | None = None, efforts: Sequence[str] = ()) -> str:
    template = (Path(__file__).parent / f"{name}.jinja").read_text(encoding="utf-8")
    if version is None:
        return template
    known = f"{{%- set version = {version} -%}}{{%- set efforts = {json.dumps(efforts)} -%}}"
    return known + (_READS_EFFORT if efforts else "") + template
