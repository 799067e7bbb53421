"""What a client asks of the answers of a conversation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millstream_server.formats.choosing import AnswerFormat
from millstream_server.processor.text.switches import Switches
from millstream_server.processor.text.template import NO_VARIABLES, ChatTemplate
from millstream_server.runtime.errors import UnsupportedFeatureError
from millstream_server.runtime.frozen import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """What a client asked for the answers of a conversation; checked as far as it can be alone."""

    events: bool | None = False
    """Reasoning, text and calls are told apart; None: where an answer can have more than text."""
    with_tools: bool = True
    """The model is told of the tools."""
    one_call: bool = False
    """An answer ends behind its first call."""
    must_call: bool = False
    """An answer to the user consists of calls."""
    only: str = ""
    """The one tool that may be called; empty: any."""
    reasoning_tokens: int | None = None
    """Most tokens of an answer's reasoning; None: any number."""
    continues: bool = False
    """The first answer goes on in the last message, which is the model's."""
    switches: Switches
    """What is set in the chat template."""
    if_known: bool = False
    """Switches that the template doesn't have are left out, not refused."""

    def format_of(
        self, served: AnswerFormat | None, *, told_tools: bool, text_alone: bool
    ) -> AnswerFormat | None:
        """Return how answers of a served model are read; None: they are text, without markers.

        ``told_tools``: the model knows of tools. ``text_alone``: an answer that is read could not
        be made to match its grammar.

        Raises:
            UnsupportedFeatureError: it isn't known how the model writes.
        """
        needed = told_tools if self.events is None else self.events
        if needed and served is None:
            raise UnsupportedFeatureError.of(
                "start.output",
                "it isn't known how this model writes reasoning and tool calls; the server's "
                "--formats can name it",
            )
        return served if needed or (self.events is None and not text_alone) else None

    def variables_for(self, template: ChatTemplate) -> Mapping[str, Any]:
        """Return what the model's template is given.

        Raises:
            UnsupportedFeatureError: it has no such variable.
        """
        if not self.switches:
            return NO_VARIABLES
        switches = template.known(self.switches) if self.if_known else self.switches
        return dict(template.variable(named, field) for field, named in switches.items())


CONTINUE = "start.continue_final_message"
"""The field of `AnswerOptions.continues`."""
DEFAULT_ANSWERS = AnswerOptions(switches={})
