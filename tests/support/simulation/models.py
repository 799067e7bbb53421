"""The models of simulated suites: one per format."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from millstream_server.processor.text.tokenizer import TextModel
from millstream_testing.alphabet import alphabet_model
from tests.support.simulation.requests import FORMATS, template


def text_of(form: str) -> TextModel:
    """Return a model that writes in a format: a byte is a token."""
    return _texts()[form]


@lru_cache
def _texts() -> Mapping[str, TextModel]:
    with tempfile.TemporaryDirectory() as folder:
        models = [_model(Path(folder) / form, form) for form in FORMATS]
        return dict(zip(FORMATS, TextModel.load_all(models), strict=True))


def _model(folder: Path, form: str) -> Path:
    file = alphabet_model(folder) / "tokenizer_config.json"
    config = json.loads(file.read_text("utf-8")) | {"chat_template": template(form)}
    file.write_text(json.dumps(config), "utf-8")
    return folder
