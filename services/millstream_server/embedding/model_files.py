"""How a model that embeds or ranks is meant to be used, as its own files say it.

They are those of sentence-transformers: `modules.json` names the parts and their folders,
`config_sentence_transformers.json` has prompts. The Processor reads them for its texts, an engine
for its vectors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LAST, CLS, MEAN = "lasttoken", "cls", "mean"
# In the order in which vectors of several ways are joined.
# In the order in which vectors of several ways are joined.
_POOLING_FLAGS = {
    "pooling_mode_cls_token": CLS,
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": MEAN,
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": LAST,
}
_MAX_PROMPTS = 64


class UnusableModulesError(ValueError):
    """The files can't be read, or contradict each other; the text names the file."""


@dataclass(frozen=True, slots=True)
class Module:
    """A part that comes after the transformer."""

    kind: str
    """The name of its class, such as "Dense"."""
    folder: str
    """Where its files are, in the model's folder."""


@dataclass(frozen=True, slots=True)
class Answers:
    """Tokens whose logits score a pair of query and document: that of the first, less the other."""

    yes: int
    no: int | None
    """None: the score is the logit of the first alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUse:
    """What the files say; a folder without them says nothing."""

    modules: Sequence[Module] = ()
    """Without the transformer, in order."""
    pooling: str = ""
    """How tokens' states become one vector, "cls+max" for several ways; empty: not said."""
    pools_prompt: bool = True
    """Whether a prompt's tokens are among them."""
    answers: Answers | None = None
    """Of a generative model that ranks."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """What is put in front of a text, by name, such as "query"."""
    default_prompt: str = ""
    """The name of the one that is used when none is named; empty: none."""

    @property
    def further(self) -> Sequence[Module]:
        """Parts that change a pooled vector, but for its length."""
        known = {"Pooling", "Normalize", "LogitScore"}
        return [module for module in self.modules if module.kind not in known]


NOTHING_SAID = ModelUse()


def read_use(path: Path) -> ModelUse:
    """Read a model's folder; a missing file counts as empty.

    Raises:
        UnusableModulesError: a file can't be read.
    """
    listed = _read(path / "modules.json", list, [])
    modules = [_module(path, entry) for entry in listed]
    pooling = _of(path, modules, "Pooling", "1_Pooling")
    prompts, default = _prompts(path / "config_sentence_transformers.json")
    return ModelUse(
        modules=[module for module in modules if module.kind != "Transformer"],
        pooling=_pooling(pooling),
        pools_prompt=bool(pooling.get("include_prompt", True)),
        answers=_answers(path, modules),
        prompts=prompts,
        default_prompt=default,
    )


def _read(file: Path, kind: type[Any], missing: Any) -> Any:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return missing
    except (OSError, ValueError) as error:
        raise UnusableModulesError(f"{file.name} can't be read as JSON") from error
    if not isinstance(content, kind):
        what = "a list" if kind is list else "an object"
        raise UnusableModulesError(f"{file.name} must hold {what}")
    return content


def _module(path: Path, entry: Any) -> Module:
    kind = str(entry.get("type", "")) if isinstance(entry, dict) else ""
    folder = str(entry.get("path", "")) if kind else ""
    if not kind or not (path / folder).resolve().is_relative_to(path.resolve()):
        raise UnusableModulesError("modules.json has an entry without a type or a folder inside")
    return Module(kind.rpartition(".")[2], folder)


def _of(path: Path, modules: Sequence[Module], kind: str, usual: str) -> Mapping[str, Any]:
    """Read the settings of the first part of a kind; the file counts also if it isn't listed."""
    folder = next((module.folder for module in modules if module.kind == kind), usual)
    found: Mapping[str, Any] = _read(path / folder / "config.json", dict, {})
    return found


def _pooling(config: Mapping[str, Any]) -> str:
    if isinstance(config.get("pooling_mode"), str):
        return str(config["pooling_mode"])
    return "+".join(name for flag, name in _POOLING_FLAGS.items() if config.get(flag))


def _answers(path: Path, modules: Sequence[Module]) -> Answers | None:
    if all(module.kind != "LogitScore" for module in modules):
        return None
    config = _of(path, modules, "LogitScore", "1_LogitScore")
    yes, no = config.get("true_token_id"), config.get("false_token_id")
    if not isinstance(yes, int) or not isinstance(no, int | None):
        raise UnusableModulesError("1_LogitScore/config.json must have the number true_token_id")
    return Answers(yes, no)


def _prompts(file: Path) -> tuple[Mapping[str, str], str]:
    config = _read(file, dict, {})
    prompts = config.get("prompts") or {}
    if not isinstance(prompts, dict) or len(prompts) > _MAX_PROMPTS:
        raise UnusableModulesError(
            f"{file.name}: prompts must be an object of up to {_MAX_PROMPTS}"
        )
    default = config.get("default_prompt_name") or ""
    if default and default not in prompts:
        raise UnusableModulesError(f"{file.name}: default_prompt_name {default!r} is no prompt")
    return {str(name): str(text) for name, text in prompts.items()}, str(default)


# ---- what config.json and the tokenizer say ------------------------------------------------------


def dimensions_of(config: Mapping[str, Any], width: int, chosen: Sequence[int]) -> tuple[int, ...]:
    """Return to what vectors may be cut: what was trained, nothing that nobody vouches for.

    ``chosen`` are used instead of those that config.json names; width 0: there are no vectors.

    Raises:
        UnusableModulesError: some are wider than the vectors.
    """
    if not width:
        return ()
    named = chosen or config.get("matryoshka_dimensions") or ()
    if not named and config.get("is_matryoshka"):
        return tuple(range(1, width + 1))
    found = tuple(sorted({int(number) for number in named}))
    if found and not (found[0] >= 1 and found[-1] <= width):
        raise UnusableModulesError(
            f"its vectors have {width} numbers and can't be cut to {', '.join(map(str, found))}: "
            f"name numbers from 1 to {width}"
        )
    return found


def named_answers(path: Path, words: Sequence[str]) -> Answers | None:
    """Return the tokens of a yes and a no, such as "yes", "no"; None: there are no words.

    Raises:
        UnusableModulesError: they are no tokens of the model's.
    """
    if not words:
        return None
    found = [_token_id(path, word) for word in words]
    if len(found) != 2 or None in found or found[0] == found[1]:  # noqa: PLR2004 - a yes and a no
        raise UnusableModulesError(
            f"--rank-answers {','.join(words)} must name two tokens of its tokenizer.json, the "
            "good answer first, such as yes,no"
        )
    return Answers(*found)  # type: ignore[arg-type]  # none is None


def lacks_answers(path: Path) -> bool:
    """Return whether a model that shall rank generates, and its files name no answers.

    False, too, if it has no tokens "yes" and "no", or a file can't be read: its engine says so.
    """
    try:
        named = _read(path / "config.json", dict, {}).get("architectures") or ("",)
        if not str(named[0]).endswith("ForCausalLM") or read_use(path).answers is not None:
            return False
        return None not in (_token_id(path, "yes"), _token_id(path, "no"))
    except UnusableModulesError:
        return False


def separator_of(path: Path) -> int:
    """Return the token between the two texts of a pair.

    Raises:
        UnusableModulesError: the tokenizer's files don't say it.
    """
    config = _read(path / "tokenizer_config.json", dict, {})
    token = config.get("sep_token") or "[SEP]"
    word = token.get("content") if isinstance(token, dict) else token
    if (found := _token_id(path, str(word))) is None:
        raise UnusableModulesError(
            "it tells query and document apart by segments, and its tokenizer.json has no token "
            f"{word} between them"
        )
    return found


def _token_id(path: Path, word: str) -> int | None:
    """Look a token up; None: there is none, or no tokenizer."""
    content = _read(path / "tokenizer.json", dict, {})
    for token in content.get("added_tokens") or ():
        if token.get("content") == word:
            return int(token["id"])
    vocabulary = (content.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):  # of a Unigram model, with scores
        vocabulary = {entry[0]: number for number, entry in enumerate(vocabulary)}
    found = vocabulary.get(word)
    return None if found is None else int(found)
