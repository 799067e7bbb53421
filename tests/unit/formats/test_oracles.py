"""Answers are read as makers' libraries and others read them, but for what is named here.

`make_oracles.py` has written what those libraries make of the answers; docs/formats.md argues each
difference.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millstream_server.formats.families import FORMATS
from tests.support.answers import Part, parser, read
from tests.support.writing import WRITERS
from tests.unit.formats.make_oracles import TOOLS

ROWS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("oracles.json").read_text("utf-8"))


def as_message(parts: list[Part]) -> dict[str, Any]:
    """Return what the libraries return: without order, incomplete calls, spaces at the ends."""
    calls = [
        [part[2], json.loads(part[3])] for part in parts if part[0] == "call" and len(part) == 4
    ]
    found: dict[str, Any] = {"calls": calls}
    for key, kind in (("thinking", "reasoning"), ("content", "text")):
        found[key] = "".join(part[1] for part in parts if part[0] == kind).strip()
    return {key: value for key, value in found.items() if value}


DIFFERENT = {
    "text behind calls is kept": (
        ("hermes", "renderers", "</tool_call>\nDone."),
        ("qwen-xml", "renderers", "</tool_call>\nDone."),
        ("deepseek-v3", "renderers", "<｜tool▁calls▁end｜>Done."),
    ),
    "newlines beside calls belong to them": (("glm-kv", "renderers", "</tool_call>Done."),),
    "calls stand inside of reasoning, too, and reasoning comes again": (
        ("hermes", "renderers", "c<think>d</think>"),
    ),
    "a marker in JSON is text": (
        ("hermes", "renderers", '{"s": "</tool_call>'),
        ("qwen-xml", "renderers", '"</parameter>"'),
    ),
    "OpenAI's own form of a call is one": (("hermes", "renderers", '"type": "function"'),),
    "what is no call is text": (
        ("hermes", "renderers", "Write <tool_call>"),
        ("hermes", "renderers", '{"a": 1}'),
    ),
    "a call that lacks only what has no meaning is whole": (
        ("hermes", "renderers", '{"n": 1}</tool_call>.'),
    ),
    "text behind a broken call is kept": (("hermes", "renderers", '{"n": 1</tool_call>.'),),
    "what no JSON string may have is escaped": (("hermes", "renderers", '"a\n\\d"'),),
    "a call without its outer marker is one": (("qwen-xml", "renderers", "^<function=f>"),),
    "an argument without its end ends with the next": (
        ("qwen-xml", "renderers", "null\n<parameter=n>"),
    ),
    "a message ends where the next begins": (
        ("harmony", "oss-harmony", "hm<|start|>assistant<|channel|>final"),
    ),
    "a header may say more than the channel": (
        ("harmony", "oss-harmony", "<|channel|>final <|constrain|>json"),
    ),
    "calls have a marker, and there may be several": (
        ("llama-json", "renderers", "<|python_tag|>"),
    ),
    "text behind a call without a marker is text": (
        ("llama-json", "renderers", '{"name": "g"} is JSON'),
    ),
    "the end of sampling is a marker": (
        ("inkling", "renderers", "<|content_model_end_sampling|>"),
    ),
}
"""Why, and which: format, library, and what stands in the answer; `^`: at its beginning."""


def reason(row: dict[str, Any]) -> str:
    for why, places in DIFFERENT.items():
        for name, oracle, text in places:
            if (row["format"], row["oracle"]) == (name, oracle) and text in f"^{row['answer']}":
                return why
    return ""


@pytest.mark.parametrize(
    "row", ROWS, ids=[f"{row['format']}-{row['oracle']}-{at}" for at, row in enumerate(ROWS)]
)
def test_an_answer_is_read_alike_unless_a_difference_is_named(row: dict[str, Any]) -> None:
    name = row["format"]
    reading = parser(FORMATS[name], TOOLS, prompt=WRITERS[name].prompt)
    ours = as_message(read(reading, [row["answer"]]))
    stripped = {
        key: value.strip() if isinstance(value, str) else value
        for key, value in row["message"].items()
    }
    alike = ours == {key: value for key, value in stripped.items() if value}
    assert alike != bool(reason(row)), (reason(row), ours, row["message"])


def test_every_difference_is_seen() -> None:
    assert set(map(reason, ROWS)) - {""} == set(DIFFERENT)
