"""An answer that goes on in the model's last message: what is new, read as what it is."""

from __future__ import annotations

import pytest

from millstream_server.formats.choosing import AnswerFormat
from millstream_server.formats.families import FORMATS
from millstream_server.formats.tags import Thinking
from millstream_server.processor.answer import Reading, reading_of
from millstream_server.processor.text.messages import ChatMessage, ChatRole
from millstream_server.runtime.errors import InvalidRequestError
from tests.support.answers import merged

CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


def _reading(form: str, text: str = "", reasoning: str = "") -> Reading:
    how = AnswerFormat(form=FORMATS[form], reason="", hidden={})
    said = ChatMessage(ChatRole.ASSISTANT, text, reasoning=reasoning)
    return reading_of(how, (), "<think>", one_call=False, continued=said)


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
def test_only_what_is_new_comes_however_it_is_divided(
    form: str, text: str, reasoning: str, new: str, parts: list[tuple[str, str]]
) -> None:
    for pieces in ([new], list(new)):
        parser = _reading(form, text, reasoning).parser({})
        events = [event for piece in pieces for event in parser.feed(piece, (1,))]
        assert merged([*events, *parser.finish()]) == parts
        assert sum(parser.tokens) == len(pieces), "of what is new"


def test_a_marker_that_the_message_has_begun_may_be_completed_by_a_call() -> None:
    parser = _reading("hermes", "So.\n<tool_").parser({})
    events = [*parser.feed(CALL.removeprefix("<tool_")), *parser.finish()]
    assert [(part[0], *part[2:]) for part in merged(events)] == [("call", "f", "{}")]


@pytest.mark.parametrize(
    ("text", "reasoning", "begins"),
    [
        ("Hi", "", Thinking.PAST),
        ("Hi", "hm", Thinking.PAST),
        ("", "hm", Thinking.BEGUN),
        ("", "", Thinking.BEGUN),  # as the prompt has it
    ],
)
def test_a_grammar_begins_where_the_message_ends(
    text: str, reasoning: str, begins: Thinking
) -> None:
    assert _reading("hermes", text, reasoning).begins is begins


@pytest.mark.parametrize(
    ("form", "text", "reasoning", "says"),
    [
        ("hermes", CALL, "", "has a tool call in its text"),
        ("hermes", CALL[:20], "", "has a tool call in its text"),
        ("llama-json", "", "hm", "has no reasoning to be continued"),
    ],
)
def test_what_can_not_be_continued_is_refused(
    form: str, text: str, reasoning: str, says: str
) -> None:
    with pytest.raises(InvalidRequestError, match=says) as caught:
        _reading(form, text, reasoning)
    (violation,) = caught.value.violations
    assert violation.field == "start.continue_final_message"
