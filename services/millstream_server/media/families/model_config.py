"""Reads the config files of a vision-language model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class UnusableFamilyError(ValueError):
    """The model's config files don't say how it places media; the text names the file and key."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The JSON files of a model's folder; a file that isn't there is empty."""

    directory: Path

    def file(self, name: str) -> Mapping[str, Any]:
        """Read ``name``.

        Raises:
            UnusableFamilyError: it isn't a JSON object.
        """
        path = self.directory / name
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise UnusableFamilyError(f"{path} cannot be read as JSON: {error}") from error
        if not isinstance(content, dict):
            raise UnusableFamilyError(f"{path} must hold a JSON object")
        return content

    def integer(self, key: str, *, section: str = "", default: int | None = None) -> int:
        """Read a whole number, at least 0, from config.json.

        Raises:
            UnusableFamilyError: there is none, and no default.
        """
        value = self._value(key, section, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            name = f"{section}.{key}" if section else key
            raise UnusableFamilyError(
                f"{self.directory / 'config.json'}: {name} must be a whole number, not {value!r}"
            )
        return value

    def number(self, key: str, *, section: str = "", default: float | None = None) -> float:
        """Read a number, at least 0, from config.json.

        Raises:
            UnusableFamilyError: there is none, and no default.
        """
        value = self._value(key, section, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            name = f"{section}.{key}" if section else key
            raise UnusableFamilyError(
                f"{self.directory / 'config.json'}: {name} must be a number, not {value!r}"
            )
        return float(value)

    def _value(self, key: str, section: str, default: float | None) -> object:
        content: Any = self.file("config.json")
        return (content.get(section) or {} if section else content).get(key, default)

    def token(self, key: str, default: str | None = None) -> str:
        """Read a token's text from tokenizer_config.json, as transformers does.

        Raises:
            UnusableFamilyError: there is none, and no default.
        """
        config = self.file("tokenizer_config.json")
        extra = config.get("extra_special_tokens")
        found = config.get(key) or (extra.get(key) if isinstance(extra, dict) else None) or default
        if isinstance(found, dict):
            found = found.get("content")
        if not isinstance(found, str) or not found:
            raise UnusableFamilyError(
                f"{self.directory / 'tokenizer_config.json'}: {key} must be a token, not {found!r}"
            )
        return found

    def require(self, name: str) -> None:
        """Check that a file is there.

        Raises:
            UnusableFamilyError: it isn't.
        """
        if not (self.directory / name).is_file():
            raise UnusableFamilyError(
                f"{self.directory} lacks {name}, which says how media are placed in a prompt"
            )
