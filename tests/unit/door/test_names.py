"""Fields that a Processor refuses have the names of the body that the door has read."""

from __future__ import annotations

import pytest

from millstream_server.door.names import Names
from millstream_server.media.items import Modality
from millstream_server.processor.answer_options import AnswerOptions
from millstream_server.processor.conversation import Conversation, Options, UserTurn
from millstream_server.processor.media.uploads import MediaBudget, Uploads
from millstream_server.processor.text.messages import ChatMessage, ChatRole, MediaPart
from millstream_server.processor.text.switches import reasoning
from millstream_server.runtime.drain import OpenWork
from millstream_server.runtime.errors import InvalidRequestError, UnsupportedFeatureError


@pytest.fixture
async def names() -> Names:
    """Of a body whose messages are called input, the second with an image."""
    conversation = Conversation(lambda: Uploads(MediaBudget(1), 1), OpenWork())
    conversation.answers = AnswerOptions(
        switches=reasoning(("thinking.type", True), ("output.effort", "low"))
    )
    image = MediaPart(Modality.IMAGE, "input[3].content[0].image_url", url="http://host/a.png")
    messages = (
        ChatMessage(ChatRole.SYSTEM, "be brief", field="instructions"),
        ChatMessage(ChatRole.USER, "what is it?", field="input[3]", parts=("what is it?", image)),
    )
    conversation.add(UserTurn(messages, Options(path="", sampling={}), "input"))
    await conversation.next_turn()
    return Names.of_chat(conversation, "input")


@pytest.mark.parametrize(
    ("field", "here"),
    [
        ("start.messages", "input"),
        ("start.messages[0]", "instructions"),
        ("start.messages[1].role", "input[3].role"),
        ("start.messages[1].content[1].image.url", "input[3].content[0].image_url"),
        ("start.messages[7]", "start.messages[7]"),
        ("start.reasoning.enabled", "thinking.type"),
        ("start.reasoning.effort", "output.effort"),
        ("start.options.stop[2]", "stop[2]"),
        ("options.sampling.top_p", "sampling.top_p"),
        ("start.tools[0].name", "start.tools[0].name"),
    ],
)
async def test_fields(names: Names, field: str, here: str) -> None:
    with pytest.raises(UnsupportedFeatureError) as raised, names.in_errors():
        raise UnsupportedFeatureError.of(field, "can't be")
    (violation,) = raised.value.violations
    assert (violation.field, violation.description) == (here, "can't be")


async def test_a_failure_without_fields_stays_as_it_is(names: Names) -> None:
    error = InvalidRequestError("no")
    assert names.renamed(error) is error
