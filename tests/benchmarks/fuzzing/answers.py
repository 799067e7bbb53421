"""The readers of what models write and of what answers have to be, with their inputs and bounds."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from millstream_server.formats.argument_schema import UnconstrainableError
from millstream_server.formats.choosing import AnswerFormat
from millstream_server.formats.families import FORMATS
from millstream_server.formats.format import Format, _texts
from millstream_server.formats.schema import Tools
from millstream_server.processor import answer
from millstream_server.processor.answer import Answer, Reading
from millstream_server.processor.http.responses import tools as responses_tools
from millstream_server.processor.text.messages import Tool
from millstream_server.runtime.errors import ServingError
from tests.benchmarks.fuzzing.costs import Bound, Read, Reader
from tests.benchmarks.fuzzing.trees import Grammar
from tests.support.writing import WRITERS

_TOKEN_CHARS, _STEP_CHARS = 3, 1024
_MOST_MARKER = 60
_PARAMETERS = {
    "properties": {
        "s": {"type": "string"},
        "o": {"type": "object"},
        "u": {"anyOf": [{"type": "integer"}, {"type": "array"}]},
    }
}
_TOOLS = {"f": json.dumps(_PARAMETERS)}


def refusing(read: Read) -> Callable[[], Read]:
    def reading(data: bytes) -> None:
        with contextlib.suppress(ServingError, UnconstrainableError):
            read(data)

    return lambda: reading


def named(data: bytes) -> tuple[Format, str]:
    """Return the format that the first line names, and the rest."""
    name, _, rest = data.decode("utf-8", "replace").partition("\n")
    return FORMATS[name], rest


# ---- answers -------------------------------------------------------------------------------------


class _AtOnce:
    """In place of the threads."""

    async def run(self, work: Callable[[], Any], *_: Any) -> Any:
        return work()


def _continued(data: bytes) -> None:
    form, text = named(data)
    how = AnswerFormat(form=form, reason="", hidden={})
    tools = (Tool("f", "", _TOOLS["f"]),)
    reading = answer.reading_of(how, tools, "", one_call=False)
    threads: Any = _AtOnce()
    asyncio.run(answer.going_on(reading, text, "messages", threads))


def _parse(data: bytes, step: int, *, one_call: bool = False) -> None:
    form, text = named(data)
    how = AnswerFormat(form=form, reason="", hidden={})
    reading = Reading(how=how, tools=Tools(_TOOLS), prompt_end="", one_call=one_call)
    parsing = Answer(reading, shows_special=True)
    for at in range(0, len(text), step):
        parsing.push(text[at : at + step], (1,) if step == _TOKEN_CHARS else ())
        parsing.take()
    parsing.finish()
    answer.joined(parsing.take())
    if len(parsing.whole_calls) < 1000:
        _ = parsing.message


def _pieces(form: Format) -> Sequence[str]:
    """Return what answers of a format consist of: markers, calls, pieces of calls."""
    markers = [text for text in _texts(form) if 0 < len(text) <= _MOST_MARKER]
    writer = WRITERS.get(form.name)
    if writer is None:
        return [*dict.fromkeys(markers)]
    calls = [
        writer.write("", "", [("f", {"s": "x"})]),
        writer.write("hm", "so", [("f", {"o": {"a": [1]}, "u": 1})]),
        writer.write("", "", [("g", {"s": 'é"\\'})]),
    ]
    halves = [call[: len(call) // 2] for call in calls[:1]]
    # What stands between the names of a call: openers without ends.
    between = [part for part in re.split(r"\bf\b|\bs\b|\bx\b", calls[0]) if part]
    return [*dict.fromkeys([*markers, *calls, *halves, *between])]


_COMMON = [
    "x", "\n", " ", "é", "𝄞", "{", "[", "(", "}", "]", ")", '"', "\\", "'", ",", ":", "=", "<", "|",
    "f", "a①", '{"', '{"a":', "[[", "f(", "f(a=", "1", "-", "0.", "null", "```", "</", "<s", "\\u",
]  # fmt: skip


def _answers() -> Grammar:
    rules: dict[str, list[str]] = {"answer": []}
    for name, form in sorted(FORMATS.items()):
        symbol = re.sub(r"\W", "_", name)
        rules["answer"] += [f"{name}\n⟨{symbol}*⟩", f"{name}\n⟨{symbol}⟩⟨common*⟩⟨{symbol}*⟩"]
        rules[symbol] = [*_pieces(form), "⟨common⟩", "⟨common*⟩"]
    return Grammar({**rules, "common": _COMMON})


def _custom_input(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    reading = responses_tools.CustomInput()
    for at in range(0, len(text), _TOKEN_CHARS):
        reading.push(text[at : at + _TOKEN_CHARS])
    reading.finish()


_CUSTOM = Grammar(
    {
        "call": [
            "⟨before*⟩",
            '⟨blank*⟩{"input"⟨blank*⟩:⟨blank*⟩"⟨char*⟩',
            '{⟨blank*⟩"input": "⟨char*⟩"}',
        ],
        "before": ["{", " ", "\n", '"input"', ":", "x"],
        "blank": [" ", "\n", ""],
        "char": ["a", "\\n", "\\", "\\u", "\\ud834", "\\ud834\\udd1e", '"', "é", "\n"],
    }
)


_BY_TOKEN = Bound(calls=30, us=40, memory=100)
ANSWER_READERS: tuple[Reader, ...] = (
    Reader(
        name="continued",
        of="processor/answer.py, formats",
        make=refusing(_continued),
        grammar=_answers(),
        bound=Bound(calls=60, us=25, memory=80),  # a context of 128k tokens holds 500 KB of it
    ),
    Reader(
        name="parse",
        of="formats, by token",
        make=refusing(lambda data: _parse(data, _TOKEN_CHARS)),
        grammar=_answers(),
        bound=_BY_TOKEN,
    ),
    Reader(
        name="parse-text",
        of="formats, 1,024 characters at once",
        make=refusing(lambda data: _parse(data, _STEP_CHARS)),
        grammar=_answers(),
        bound=_BY_TOKEN,
    ),
    Reader(
        name="custom-input",
        of="http/responses/tools.py",
        make=refusing(_custom_input),
        grammar=_CUSTOM,
        bound=Bound(calls=20, us=6),
    ),
)
