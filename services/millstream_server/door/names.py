"""Fields in a Processor's refusals, as the names of what the endpoint has read.

A Processor names fields of the message that the door has made: `start.messages[2].content`. The
plain messages and parts know where they were in the body; in process they are named so at once.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from millstream_server.processor.answer_options import AnswerOptions
from millstream_server.processor.conversation import Conversation
from millstream_server.processor.text.messages import ChatMessage, MediaPart
from millstream_server.processor.text.switches import asked_of
from millstream_server.processor.texts import UntokenizedChat
from millstream_server.runtime.errors import InvalidRequestError, ServingError

_PLACE = re.compile(
    r"\b(?:start|conversation)\.messages(?:\[(?P<message>\d+)\]"
    r"(?P<media>\.content\[(?P<part>\d+)\]\.(?:image|video)(?:\.(?:data|url))?)?)?"
)
_OPTIONS = re.compile(r"^(?:start\.)?options\.")


@dataclass(frozen=True, slots=True)
class Names:
    """Of one request."""

    messages: Sequence[ChatMessage] = ()
    path: str = ""
    """What the body calls the messages."""
    others: Mapping[str, str] = field(default_factory=dict)
    """Further fields, as they are."""

    @classmethod
    def of_chat(cls, conversation: Conversation, messages: str) -> Names:
        """Return those of a conversation, whose ``messages`` the body calls so."""
        others = _switches(conversation.answers, "start.reasoning")
        return cls(tuple(conversation.messages), messages, others)

    @classmethod
    def of_untokenized(cls, chat: UntokenizedChat) -> Names:
        """Return those of a conversation that is only tokenized."""
        path = chat.paths.messages
        others = {**_switches(chat.answers, "conversation.reasoning"), "conversation": path}
        if chat.paths.continues:
            others["conversation.continue_final_message"] = chat.paths.continues
        return cls(chat.messages, path, others)

    @contextlib.contextmanager
    def in_errors(self) -> Iterator[None]:
        """Rename the fields of a refusal that a block raises."""
        try:
            yield
        except InvalidRequestError as error:
            raise self.renamed(error) from error

    def renamed(self, error: ServingError) -> ServingError:
        """Return a failure with its fields renamed."""
        if not error.violations:
            return error
        return type(error)(
            error.message,
            violations=tuple(
                replace(each, field=self._renamed(each.field)) for each in error.violations
            ),
            retry_delay_s=error.retry_delay_s,
            error_id=error.error_id,
        )

    def _renamed(self, name: str) -> str:
        if (other := self.others.get(name)) is not None:
            return other
        return _PLACE.sub(self._place, _OPTIONS.sub("", name))

    def _place(self, found: re.Match[str]) -> str:
        if found["message"] is None:
            return self.path or found[0]
        index = int(found["message"])
        if index >= len(self.messages):
            return found[0]
        message = self.messages[index]
        if found["media"] is None:
            return message.field
        part = message.parts[int(found["part"])]
        return part.field if isinstance(part, MediaPart) else found[0]


def _switches(answers: AnswerOptions, path: str) -> dict[str, str]:
    """Return what asked for the template's switches, by their fields at ``path``."""
    (enabled, _), (effort, _) = asked_of(answers.switches)
    return {f"{path}.enabled": enabled, f"{path}.effort": effort}
