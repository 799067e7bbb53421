"""Messages of the Responses API in the order that a model's template takes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from millstream_server.processor.conversation import Conversation
from millstream_server.processor.http.responses import schema
from millstream_server.processor.http.responses.input import messages_of
from millstream_server.processor.text.messages import MediaPart
from millstream_server.processor.text.template import ChatTemplate
from millstream_server.runtime.drain import OpenWork
from tests.support.models.models import CHATML

ONE_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('the system message comes first') }}{% endif %}{{ m.content }}{% endfor %}"
)
ALTERNATING = (
    "{% set rest = messages[1:] if messages[0].role == 'system' else messages %}"
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
)
INPUT: Any = [
    {"role": "developer", "content": "a"},
    {"role": "user", "content": "b"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d"},
    {"role": "developer", "content": "e"},
    {"role": "user", "content": "f"},
]


def messages(template: str, given: Any) -> list[Any]:
    asked = msgspec.convert({"input": given, "instructions": "I"}, schema.Responses)
    conversation = Conversation(lambda: pytest.fail("no files here"), OpenWork())
    return list(messages_of(asked, conversation, ChatTemplate({"default": template}, {}), {}))


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, "system:I+a user:b user:c assistant:d developer:e user:f"),
        (ONE_SYSTEM, "system:I+a user:b user:c assistant:d user:e user:f"),
        (ALTERNATING, "system:I+a user:b+c assistant:d user:e+f"),
    ],
)
def test_late_instructions_and_users_in_a_row(template: str, expected: str) -> None:
    found = [f"{m.role.value}:{m.text}".replace("\n\n", "+") for m in messages(template, INPUT)]
    assert " ".join(found) == expected


def test_joined_messages_keep_their_images() -> None:
    image = {"type": "input_image", "image_url": "https://x/y.png"}
    given = [{"role": "user", "content": "a"}, {"role": "user", "content": [image]}]
    _, user = messages(ALTERNATING, given)
    text, between, part = user.parts
    assert (text, between, user.text) == ("a", "\n\n", "a\n\n")
    assert isinstance(part, MediaPart)
    assert (part.url, part.field) == ("https://x/y.png", "input[1].content[0].image_url")
