"""A model that reasons and calls tools in Hermes's notation, and a Processor that reads it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from millstream_server.processor.text.tokenizer import TextModel
from millstream_testing.alphabet import alphabet_model
from millstream_testing.in_process import ALPHABET, MODEL, InProcessProcessor, processor, worker

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}{% for m in messages %}"
    "{{ m.role }}:{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}"
    "[{{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "|{% endfor %}{% if enable_thinking is defined and not enable_thinking %}no {% endif %}<think>"
)
CALL = '<tool_call>\n{"name": "f", "arguments": {"s": "Oslo"}}\n</tool_call>'
SPOKEN = f'<think>hm</think>\n\nLet me see.\n{CALL}\n<tool_call>\n{{"name": "g"}}\n</tool_call>'


def reading_model(folder: Path, **names: Any) -> TextModel:
    """Make the model; ``names`` change its tokenizer_config.json, a key of None keeps it."""
    alphabet_model(folder)
    file = folder / "tokenizer_config.json"
    changes = {key: value for key, value in {"chat_template": TEMPLATE, **names}.items() if value}
    config = json.loads(file.read_text("utf-8")) | changes
    file.write_text(json.dumps(config), "utf-8")
    return TextModel.load(folder)


@contextlib.asynccontextmanager
async def serving(model: TextModel, form: str = "hermes") -> AsyncIterator[InProcessProcessor]:
    config = replace(ALPHABET, context_length=2048)
    formats = {MODEL: form} if form else {}
    async with (
        worker(config) as one,
        processor({MODEL: model}, [one.address], formats=formats) as front,
    ):
        yield front
