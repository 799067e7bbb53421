"""An answer that goes on in the model's last message: what is new, read as what it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest

from millstream_server.formats.choosing import AnswerFormat
from millstream_server.formats.families import FORMATS
from millstream_server.formats.tags import Thinking
from millstream_server.processor.answer import Reading, going_on, reading_of, text_of_prefill
from millstream_server.processor.answer_options import CONTINUE
from millstream_server.processor.text.messages import ChatMessage, ChatRole, Tool
from millstream_server.runtime.errors import InvalidRequestError
from millstream_server.runtime.work.fair_queue import PoolLimits
from millstream_server.runtime.work.pool import WorkPool
from tests.support.answers import merged
from tests.support.steps import reach, steps

T = TypeVar("T")

CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


async def _reading(
    form: str, text: str = "", reasoning: str = "", *, tools: bool = True
) -> Reading:
    how = AnswerFormat(form=FORMATS[form], reason="", hidden={})
    said = ChatMessage(ChatRole.ASSISTANT, text, reasoning=reasoning)
    reading = reading_of(how, (Tool("f", "", ""),) if tools else (), "<think>", one_call=False)
    threads = WorkPool(PoolLimits())
    try:
        return await going_on(reading, text_of_prefill(said, how.form), CONTINUE, threads)
    finally:
        threads.close()


@pytest.mark.parametrize(
    ("form", "text", "reasoning", "new", "parts"),
    [
        ("hermes", "Let me s", "hm", "ee.", [("text", "ee.")]),
        ("hermes", "", "h", "m</think>\n\nHi", [("reasoning", "m"), ("text", "Hi")]),
        ("hermes", "<think>h", "", "m</think>Hi", [("reasoning", "m"), ("text", "Hi")]),
        ("hermes", "1 <", "", " 2", [("text", " 2")]),
        ("hermes", "So.\n\n", "", "Yes.", [("text", "Yes.")]),
        ("hermes", "So.\n", "", "<b>", [("text", "<b>")]),
        ("hermes", "1 <think", "", ">hm", [("reasoning", "hm")]),
        ("hermes", "", "", "hm</think>Hi", [("reasoning", "hm"), ("text", "Hi")]),
        ("harmony", "Let me s", "", "ee.", [("text", "ee.")]),
        (
            "harmony",
            "",
            "h",
            "m<|end|><|start|>assistant<|channel|>final<|message|>Hi",
            [("reasoning", "m"), ("text", "Hi")],
        ),
    ],
)
async def test_only_what_is_new_comes_however_it_is_divided(
    form: str, text: str, reasoning: str, new: str, parts: list[tuple[str, str]]
) -> None:
    for pieces in ([new], list(new)):
        parser = (await _reading(form, text, reasoning)).parser({})
        events = [event for piece in pieces for event in parser.feed(piece, (1,))]
        assert merged([*events, *parser.finish()]) == parts
        assert sum(parser.tokens) == len(pieces), "of what is new"


async def test_a_marker_that_the_message_has_begun_may_be_completed_by_a_call() -> None:
    parser = (await _reading("hermes", "So.\n<tool_")).parser({})
    events = [*parser.feed(CALL.removeprefix("<tool_")), *parser.finish()]
    assert [(part[0], *part[2:]) for part in merged(events)] == [("call", "f", "{}")]


@pytest.mark.parametrize("form", ["hermes", "llama-json"])
async def test_without_tools_a_call_in_the_message_is_text_and_can_be_continued(form: str) -> None:
    parser = (await _reading(form, CALL[:30], tools=False)).parser({})
    assert merged([*parser.feed(CALL[30:]), *parser.finish()]) == [("text", CALL[30:])]


@pytest.mark.parametrize(
    ("text", "reasoning", "begins"),
    [
        ("Hi", "", Thinking.PAST),
        ("Hi", "hm", Thinking.PAST),
        ("", "hm", Thinking.BEGUN),
        ("", "", Thinking.BEGUN),  # as the prompt has it
    ],
)
async def test_a_grammar_begins_where_the_message_ends(
    text: str, reasoning: str, begins: Thinking
) -> None:
    assert (await _reading("hermes", text, reasoning)).begins is begins


@pytest.mark.parametrize(
    ("form", "text", "reasoning", "says"),
    [
        ("hermes", CALL, "", "has a tool call in its text"),
        ("hermes", CALL[:20], "", "has a tool call in its text"),
        ("llama-json", "", "hm", "has no reasoning to be continued"),
    ],
)
async def test_what_can_not_be_continued_is_refused(
    form: str, text: str, reasoning: str, says: str
) -> None:
    with pytest.raises(InvalidRequestError, match=says) as caught:
        await _reading(form, text, reasoning)
    (violation,) = caught.value.violations
    assert violation.field == "start.continue_final_message"


class Threads(WorkPool):
    """Does the work at once, and counts what is before its steps; on the loop nothing is."""

    def __init__(self) -> None:
        super().__init__(PoolLimits())
        self.seconds = 0.0
        self.reach = 0

    async def run(self, work: Callable[[], T], seconds: float, *, batch: bool = False) -> T:
        found: list[T] = []
        self.seconds += seconds
        self.reach += reach(lambda: found.append(work()))
        return found[0]


@pytest.mark.parametrize("form", ["glm-kv", "harmony", "mistral-v11", "hermes"])
async def test_a_long_message_is_read_in_a_thread_in_steps_per_byte(form: str) -> None:
    opener = FORMATS[form].call_open[0]
    counts = []
    for times in (20, 80):
        threads = Threads()
        how = AnswerFormat(form=FORMATS[form], reason="", hidden={})
        reading = reading_of(how, (Tool("f", "", ""),), "", one_call=False)
        begun = opener * (1024 * times // len(opener)) + " So" * 200  # no header is as long
        reading = await going_on(reading, begun, CONTINUE, threads)
        counts.append(threads.reach)
        assert threads.seconds == pytest.approx(5e-6 * len(begun))
        steps(lambda made=reading: [made.parser({}) for _ in range(16)], 16 * 40)  # type: ignore[misc]
    assert counts[0] > 0
    assert counts[1] <= 4.5 * counts[0]
