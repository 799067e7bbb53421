"""A model's chat template, rendered in the library's immutable sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jinja2
from jinja2.exceptions import TemplateError

# Private, but the one way to the library's environment (immutable sandbox, `tojson`, `generation`
# blocks, `raise_exception`) that allows reading the output piece by piece, hence capping it.
from transformers.utils.chat_template_utils import _compile_jinja_template

from millstream_server.processor.text.messages import (
    ChatMessage,
    Tool,
    message_for_template,
    tool_for_template,
)
from millstream_server.processor.text.model_files import UnusableModelError
from millstream_server.runtime.errors import InvalidRequestError, UnsupportedFeatureError

DEFAULT_MAX_PROMPT_CHARS = 4 * 1024 * 1024
_MAX_SENTENCE_CHARS = 200
_FIELD = "messages"

# Whatever a template's own code can raise; a template that cannot digest a message shows it so.
_TEMPLATE_FAULTS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


class ChatTemplate:
    """Turns a conversation into the prompt a model was trained on.

    The template comes with the model, never from a client. `render` is safe to call from several
    threads, and takes too long for an event loop when a conversation is long.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        *,
        max_prompt_chars: int = DEFAULT_MAX_PROMPT_CHARS,
    ) -> None:
        """Compile the templates by name: "default", and "tool_use" if it differs.

        ``special_tokens`` are variables for the templates: ``bos_token`` and so on.

        Raises:
            UnusableModelError: a template is not valid Jinja.
        """
        self._special_tokens = dict(special_tokens)
        self._max_prompt_chars = max_prompt_chars
        self._compiled = {name: _compile(name, source) for name, source in sources.items()}
        self._knows_developer = {name: "developer" in source for name, source in sources.items()}

    @property
    def available(self) -> bool:
        """Whether the model has a template at all."""
        return "default" in self._compiled

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool] = (),
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Render messages and tools that have passed `check_messages`.

        The prompt holds the model's special tokens already: encode it without adding any.

        Raises:
            InvalidRequestError: the template refuses the messages or cannot digest them, the prompt
                grows too long, or (`UnsupportedFeatureError`) the model has no template.
        """
        name = "tool_use" if tools and "tool_use" in self._compiled else "default"
        template = self._compiled.get(name)
        if template is None:
            sentence = "this model has no chat template; use Complete with a prompt"
            raise UnsupportedFeatureError.of(_FIELD, sentence)
        shaped = [
            message_for_template(message, knows_developer=self._knows_developer[name])
            for message in messages
        ]
        variables = {
            **self._special_tokens,
            "messages": shaped,
            # Templates test `tools` for being there at all.
            "tools": [tool_for_template(tool) for tool in tools] or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._collect(template, variables)
        except _TEMPLATE_FAULTS as exc:
            raise InvalidRequestError.of(_FIELD, _sentence_of(exc)) from exc

    def _collect(self, template: jinja2.Template, variables: Mapping[str, object]) -> str:
        pieces: list[str] = []
        chars_left = self._max_prompt_chars
        for piece in template.generate(variables):
            chars_left -= len(piece)
            if chars_left < 0:
                sentence = f"the prompt would exceed {self._max_prompt_chars} characters"
                raise InvalidRequestError.of(_FIELD, sentence)
            pieces.append(piece)
        return "".join(pieces)


def _compile(name: str, source: str) -> jinja2.Template:
    try:
        compiled: jinja2.Template = _compile_jinja_template(source)
    except TemplateError as exc:
        raise UnusableModelError(
            f"the model's chat template {name!r} is not valid Jinja: {exc}"
        ) from exc
    return compiled


def _sentence_of(exc: Exception) -> str:
    """Pass on what the template says by `raise_exception`, and nothing of the interpreter's."""
    # `raise_exception` raises this very class; Jinja's own errors are subclasses of it.
    if type(exc) is TemplateError and exc.message:
        return f"the chat template says: {exc.message[:_MAX_SENTENCE_CHARS]}"
    return "this model's chat template cannot render these messages"
