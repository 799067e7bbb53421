"""What a model directory's JSON files say about its texts, read without loading the model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
_TEXT_SECTIONS = ("text_config", "llm_config")


class UnusableModelError(ValueError):
    """The model directory cannot be used; the sentence names the file. Stops the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """The model's own sampling defaults; None where it has none.

    ``do_sample`` is not among them: serving engines draw unless the temperature is 0, whatever it
    says, and clients expect the same here.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What config.json and generation_config.json say."""

    eos_token_ids: tuple[int, ...] = ()
    """Any of them ends a generation; empty when neither file names one."""
    bos_token_id: int | None = None
    context_length: int | None = None
    generation_defaults: GenerationDefaults = GenerationDefaults()


def read_model_facts(path: Path) -> ModelFacts:
    """Read both files; an absent file says nothing.

    Raises:
        UnusableModelError: a file is not a JSON object, or a value has the wrong type.
    """
    config = _read_object(path / "config.json")
    generation = _read_object(path / "generation_config.json")
    # generation_config.json comes first: that is where chat models add their end-of-turn token.
    sections = [generation, config, *_text_sections(config)]
    return ModelFacts(
        eos_token_ids=next(filter(None, (_eos_ids(section) for section in sections)), ()),
        bos_token_id=_first_int(sections, ("bos_token_id",)),
        context_length=_first_int(sections[1:], _CONTEXT_KEYS),
        generation_defaults=GenerationDefaults(
            temperature=_number(generation, "temperature"),
            top_p=_number(generation, "top_p"),
            top_k=_first_int([generation], ("top_k",)),
            min_p=_number(generation, "min_p"),
            repetition_penalty=_number(generation, "repetition_penalty"),
        ),
    )


def _read_object(file: Path) -> Mapping[str, object]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as exc:
        raise UnusableModelError(f"{file} cannot be read as JSON: {exc}") from exc
    if not isinstance(content, dict):
        raise UnusableModelError(f"{file} must hold a JSON object")
    return content


def _text_sections(config: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    """Multimodal models keep their language model's values one level down."""
    for name in _TEXT_SECTIONS:
        section = config.get(name)
        if isinstance(section, dict):
            yield section


def _eos_ids(section: Mapping[str, object]) -> tuple[int, ...]:
    value = section.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(_whole("eos_token_id", token_id) for token_id in ids)


def _first_int(sections: list[Mapping[str, object]], keys: tuple[str, ...]) -> int | None:
    for section in sections:
        for key in keys:
            value = section.get(key)
            # Some files hold a list of BOS ids per language; that is no default for anybody.
            if value is not None and not isinstance(value, list):
                return _whole(key, value)
    return None


def _whole(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UnusableModelError(f"the model's config: {key} must be a whole number, not {value!r}")
    return value


def _number(section: Mapping[str, object], key: str) -> float | None:
    value = section.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UnusableModelError(f"generation_config.json: {key} must be a number, not {value!r}")
    return float(value)
