"""Reads a model directory's files, without loading the model: configs, tokenizer, chat templates.

The tokenizer and the templates are read with transformers, which puts together what the files say
in several places. To import it takes 33 MB, and it is needed for this only: so a child process does
it, and returns all as JSON.

`python -m millstream_server.processor.text.model_files PARENT_PID DIR …` is that process: one for
all models, since the import takes two seconds of a CPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from millstream_server.processor.text.encodings import find_encoding
from millstream_server.processor.text.vocabularies.finding import find
from millstream_server.processor.text.vocabularies.vocabulary import (
    BrokenVocabularyError,
    Vocabulary,
)

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
_TEXT_SECTIONS = ("text_config", "llm_config")
_NAMES = "tokenizer_config.json"
_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")
_OF_CODE = frozenset(("auto_map", "tokenizer_class", "add_bos_token", "add_eos_token"))
"""What tokenizer_config.json says to the code that reads another file than tokenizer.json."""
_PR_SET_PDEATHSIG = 1
_TIMEOUT_S = 300.0
"""A large vocabulary takes seconds; a network file system that hangs must end the start."""


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
    # Multimodal models have it one level down.
    texts = [config[name] for name in _TEXT_SECTIONS if isinstance(config.get(name), dict)]
    sections = [generation, config, *texts]
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


def _read_object(file: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as exc:
        raise UnusableModelError(f"{file} cannot be read as JSON: {exc}") from exc
    if not isinstance(content, dict):
        raise UnusableModelError(f"{file} must hold a JSON object")
    return content


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


# ---- tokenizer and chat templates ----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """What a model directory says of its tokenizer."""

    tokenizer: str
    """tokenizer.json, with the special tokens that only other files name."""
    special_tokens: Mapping[str, str]
    """Variables of chat templates: ``bos_token`` and so on."""
    eos_token_id: int | None
    bos_token_id: int | None
    templates: Mapping[str, str]
    """Chat templates by name."""
    response_template: str
    """How to read what the model writes, as JSON text; empty: the directory doesn't say."""
    tokenizer_source: str
    """The vocabulary's kind and file, for people."""
    template_source: str
    """Whose the templates are, and why, for people; empty: there is none."""
    answers: str
    """The format in which a model answers whose encoding is one of ours; empty: it isn't."""


def read_tokenizers(paths: Sequence[Path]) -> list[TokenizerFiles]:
    """Read directories, in this process if it has the library already.

    Raises:
        UnusableModelError: a file is missing or wrong.
    """
    for path in paths:
        try:
            # Checked here since the library would take the path for the name of a model on a hub.
            find(path)
        except BrokenVocabularyError as error:
            raise UnusableModelError(str(error)) from error
    if not paths:
        return []
    read = [_read(p) for p in paths] if "transformers" in sys.modules else _read_apart(paths)
    for path, found in zip(paths, read, strict=True):
        if "error" in found:
            raise UnusableModelError(f"the tokenizer in {path} cannot be loaded: {found['error']}")
    return [TokenizerFiles(**found) for found in read]


def _read_apart(paths: Sequence[Path]) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", __name__, str(os.getpid()), *map(str, paths)]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=_TIMEOUT_S)  # noqa: S603 - ourselves
    except subprocess.SubprocessError as error:
        return [{"error": str(error)}] * len(paths)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def _read(path: Path) -> dict[str, Any]:
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - see above

    source = find(path)
    try:
        config, names = _read_object(path / "config.json"), _read_object(path / _NAMES)
        made = source.kind.read(source.file, config, names) if source.kind else None
        with _files_of(path, names, made) as (folder, more):
            fast = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True, **more)
        given = fast.chat_template
        templates = {"default": given} if isinstance(given, str) else dict(given or {})
        told = (made.version, made.efforts) if made else ()
        encoding = find_encoding(config, templates, *told)
    except Exception as error:  # noqa: BLE001 - the tokenizers binding raises no narrower class
        return {"error": f"{source.file.name}: {error}"}
    if encoding:
        templates = {"default": encoding.template}
    found = TokenizerFiles(
        tokenizer=fast.backend_tokenizer.to_str(),
        special_tokens={
            name: str(token)
            for name, token in fast.special_tokens_map.items()
            if not isinstance(token, list)
        },
        eos_token_id=fast.eos_token_id,
        bos_token_id=fast.bos_token_id,
        templates=templates,
        response_template=json.dumps(response) if (response := fast.response_template) else "",
        tokenizer_source=str(source),
        template_source=(
            f"ours, {encoding.name}: {encoding.reason}" if encoding else "the checkpoint's"
        )
        if templates
        else "",
        answers=encoding.answers if encoding else "",
    )
    return asdict(found)


@contextlib.contextmanager
def _files_of(
    path: Path, names: Mapping[str, Any], made: Vocabulary | None
) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Give a folder for the library, and what it needs besides, if a vocabulary was made here.

    That isn't written to a tokenizer.json: to read it again would take twice the time.
    """
    if made is None:
        yield path, {}
        return
    with tempfile.TemporaryDirectory() as made_in:
        folder = Path(made_in)
        for name in _TEMPLATES:
            if (path / name).exists():
                (folder / name).symlink_to((path / name).resolve())
        said = {**made.special_tokens, **{k: v for k, v in names.items() if k not in _OF_CODE}}
        (folder / _NAMES).write_text(json.dumps(said), encoding="utf-8")
        yield folder, {"tokenizer_object": made.tokenizer}


def _end_with(parent: int) -> None:
    """Let the kernel end this process with its parent, which may stop before the files are read."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit(1)


if __name__ == "__main__":
    _end_with(int(sys.argv[1]))
    sys.stdout.write(json.dumps([_read(Path(path)) for path in sys.argv[2:]]))
