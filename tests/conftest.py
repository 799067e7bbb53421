"""What every test of a session may share."""

from __future__ import annotations

import pytest

from millstream_server.processor.text.tokenizer import TextModel
from tests.support.tokenizers_made import byte_level_model

ALPHABET_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}@{% endif %}"
)


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    """A real tokenizer whose chats a simulated engine answers with the alphabet.

    Its ids 3 to 96 are the ASCII characters from "!" to "~" in their order, a rendered conversation
    ends with "@", and the simulated engine counts on from there: "ABCDEFG…", one letter a token.
    """
    return TextModel.load(
        byte_level_model(
            tmp_path_factory.mktemp("alphabet"),
            tokenizer_config={"chat_template": ALPHABET_TEMPLATE},
        )
    )
