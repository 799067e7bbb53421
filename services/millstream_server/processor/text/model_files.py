"""Reads a model directory's JSON files, without loading the model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
_TEXT_SECTIONS = ("text_config", "llm_config")


class UnusableModelError(ValueError):
    """The model directory can't be used; the text names the file. The start then fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """The model's own sampling defaults; None where there is none.

    ``"do_sample": false`` makes the temperature 0, as in transformers, which then decodes greedily
    whatever the file's temperature is. Without ``do_sample`` decoding isn't greedy, as in other
    serving engines.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def given(self, refused: frozenset[str]) -> dict[str, float]:
        """Return those that there are, without those in ``refused``.

        These are a worker's (`GeneratorInfo.refused_fields`): its clients would be refused for what
        they didn't ask for.
        """
        return {
            name: value
            for name, value in asdict(self).items()
            if value is not None and f"sampling.{name}" not in refused
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Values from config.json and generation_config.json."""

    eos_token_ids: tuple[int, ...] = ()
    """Token ids that end a generation; empty if neither file has one."""
    bos_token_id: int | None = None
    context_length: int | None = None
    generation_defaults: GenerationDefaults = GenerationDefaults()


def read_model_facts(path: Path) -> ModelFacts:
    """Read both files; a missing file counts as empty.

    Raises:
        UnusableModelError: a file is not a JSON object, or a value has the wrong type.
    """
    config = _read_object(path / "config.json")
    generation = _read_object(path / "generation_config.json")
    # generation_config.json comes first: chat models add their end-of-turn token there.
    sections = [generation, config, *_text_sections(config)]
    return ModelFacts(
        eos_token_ids=next(filter(None, (_eos_ids(section) for section in sections)), ()),
        bos_token_id=_first_int(sections, ("bos_token_id",)),
        context_length=_first_int(sections[1:], _CONTEXT_KEYS),
        generation_defaults=GenerationDefaults(
            temperature=_temperature(generation),
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
    """Yield the sections to search: in multimodal models also one level down."""
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
            # Some files have a list of BOS ids per language, which gives no default.
            if value is not None and not isinstance(value, list):
                return _whole(key, value)
    return None


def _whole(key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UnusableModelError(f"the model's config: {key} must be a whole number, not {value!r}")
    return value


def _temperature(generation: Mapping[str, object]) -> float | None:
    do_sample = generation.get("do_sample")
    if do_sample is not None and not isinstance(do_sample, bool):
        raise UnusableModelError(
            f"generation_config.json: do_sample must be true or false, not {do_sample!r}"
        )
    temperature = _number(generation, "temperature")
    return 0.0 if do_sample is False else temperature


def _number(section: Mapping[str, object], key: str) -> float | None:
    value = section.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UnusableModelError(f"generation_config.json: {key} must be a number, not {value!r}")
    return float(value)
