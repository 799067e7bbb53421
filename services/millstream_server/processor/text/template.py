"""A model's chat template, rendered in an immutable sandbox."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jinja2
from jinja2.exceptions import TemplateError

from millstream_server.processor.text.messages import (
    ChatMessage,
    ChatRole,
    MediaPart,
    Tool,
    message_for_template,
    tool_for_template,
)
from millstream_server.processor.text.model_files import UnusableModelError
from millstream_server.processor.text.sandbox import compile_template, variables_of
from millstream_server.processor.text.switches import Switch, Switches
from millstream_server.runtime.errors import InvalidRequestError, UnsupportedFeatureError
from millstream_server.runtime.work.pool import stop_if_gone

DEFAULT_MAX_PROMPT_CHARS = 4 * 1024 * 1024
_MAX_SENTENCE_CHARS = 200
_PIECES_AT_ONCE = 32
_MARK_BYTES = 12
_PAIR = ("query", "document")
"""Roles of a reranker's messages."""
NO_VARIABLES: Mapping[str, Any] = {}
_INSTRUCTING = (ChatRole.SYSTEM, ChatRole.DEVELOPER)
_BETWEEN = "\n\n"
"""Between the texts of messages that become one."""
_REASONING_KEYS = ("reasoning_content", ".thinking", ".reasoning")

# What a template's own code can raise on messages that it doesn't support.
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
    """Renders a conversation as the prompt that the model expects.

    The template is the model's, never a client's. `render` is thread-safe; for a long conversation
    it takes too long for an event loop.
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
        self._max_prompt_chars = max_prompt_chars
        self._compiled = {name: _compile(name, source) for name, source in sources.items()}
        self._variables = {
            name: {**found.globals, **special_tokens, "documents": None}
            for name, found in self._compiled.items()
        }
        self._supports_developer = {name: "developer" in source for name, source in sources.items()}
        default = sources.get("default", "")
        self.takes_pairs = all(re.search(rf"['\"]{role}['\"]", default) for role in _PAIR)
        """Whether it is a reranker's, made for a query and a document."""
        self._reasoning = {name: _reasoning_key(source) for name, source in sources.items()}
        self._shown: dict[tuple[str, tuple[ChatRole, ...]], bool] = {}
        """What `_shows` has found."""
        self.source = "\n".join(sources.values())
        """All templates' text, to look for words in."""
        self._reads = frozenset().union(*map(variables_of, sources.values()))

    @property
    def available(self) -> bool:
        return "default" in self._compiled

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool] = (),
        *,
        add_generation_prompt: bool = True,
        continues: str = "",
        field: str = "messages",
        variables: Mapping[str, Any] = NO_VARIABLES,
    ) -> str:
        """Render messages and tools that have passed `check_messages`; errors name ``field``.

        ``continues``: the path of what asks that the prompt ends inside of the last message, behind
        its text or, without a text, its reasoning. ``variables`` are further ones that the template
        knows. Behind a last message of ASSISTANT it begins another one.

        The prompt has the model's special tokens already: encode it without adding any.

        Raises:
            InvalidRequestError: the template refuses or doesn't support the messages, the prompt
            is too long, or (`UnsupportedFeatureError`) the model has no template.
        """
        name = "tool_use" if tools and "tool_use" in self._compiled else "default"
        template = self._compiled.get(name)
        if template is None:
            sentence = "this model has no chat template; use Complete with a prompt"
            raise UnsupportedFeatureError.of(field, sentence)
        if _is_unusual(messages):
            messages = _fitted(messages, lambda *roles: self._shows(name, *roles))
        if continues:
            mark = f"END{os.urandom(_MARK_BYTES).hex()}"
            *before, last = messages
            messages = [*before, _marked(last, mark)]
        values = {
            **self._variables[name],
            **variables,
            "messages": self._shaped(name, messages),
            # Templates test whether `tools` is defined.
            "tools": [tool_for_template(tool) for tool in tools] or None,
            "add_generation_prompt": add_generation_prompt and not continues,
        }
        prompt = self._rendered(template, values, field)
        if continues:
            return _before_mark(prompt, mark, last, continues)
        if add_generation_prompt and messages and messages[-1].role is ChatRole.ASSISTANT:
            end = self._variables[name].get("eos_token") or "\0"
            if prompt.rstrip().endswith(end):  # it begins answers to users only, as Mistral's does
                messages = [*messages, ChatMessage(ChatRole.USER, "")]
                return self.render(messages, tools, field=field, variables=variables)
        return prompt

    def _shows(self, name: str, *roles: ChatRole) -> bool:
        """Whether it takes messages of these roles, in this order, and shows the text of each."""
        if (name, roles) not in self._shown:
            said = [ChatMessage(role, f"text {index}") for index, role in enumerate(roles)]
            variables = {**self._variables[name], "messages": self._shaped(name, said)}
            try:
                prompt = self._rendered(self._compiled[name], variables | {"tools": None}, "")
            except InvalidRequestError:
                prompt = ""
            self._shown[name, roles] = all(message.text in prompt for message in said)
        return self._shown[name, roles]

    def _shaped(self, name: str, messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
        developer, reasoning = self._supports_developer[name], self._reasoning[name]
        return [
            message_for_template(message, supports_developer=developer, reasoning=reasoning)
            for message in messages
        ]

    def render_pair(self, query: str, document: str, instruction: str, field: str) -> str:
        """Render what `takes_pairs` is about; an empty instruction: the template's own.

        Raises:
            InvalidRequestError: as `render` does.
        """
        said = zip(("system", *_PAIR), (instruction, query, document), strict=True)
        variables = {
            **self._variables["default"],
            "messages": [
                {"role": role, "content": text} for role, text in said if text or role in _PAIR
            ],
            "tools": None,
            "add_generation_prompt": True,
        }
        return self._rendered(self._compiled["default"], variables, field)

    def _rendered(self, template: jinja2.Template, variables: dict[str, object], field: str) -> str:
        try:
            return self._collect(template, variables, field)
        except _TEMPLATE_FAULTS as exc:
            raise InvalidRequestError.of(field, _sentence_of(exc)) from exc

    def _collect(self, template: jinja2.Template, variables: dict[str, object], field: str) -> str:
        pieces: list[str] = []
        chars_left = self._max_prompt_chars
        for count, piece in enumerate(_generate(template, variables), start=1):
            if not count % _PIECES_AT_ONCE:
                stop_if_gone()
            chars_left -= len(piece)
            if chars_left < 0:
                sentence = f"the prompt would exceed {self._max_prompt_chars} characters"
                raise InvalidRequestError.of(field, sentence)
            pieces.append(piece)
        return "".join(pieces)

    def known(self, switches: Switches) -> Switches:
        """Return those of some switches that the template has."""
        found = {}
        for field, choices in switches.items():
            with contextlib.suppress(UnsupportedFeatureError):
                self.variable(choices, field)
                found[field] = choices
        return found

    def variable(self, choices: Sequence[Switch], field: str) -> tuple[str, Any]:
        """Return the first of some variables, with its value, that the template has.

        Raises:
            UnsupportedFeatureError: it has none; ``field`` asked for it.
        """
        for switch in choices:
            spelled = f"'{switch.word}'" in self.source or f'"{switch.word}"' in self.source
            if switch.name in self._reads and (spelled or not switch.word):
                return switch.name, switch.value
        names = " or ".join(dict.fromkeys(switch.name for switch in choices))
        sentence = f"this model's chat template has no variable {names}"
        raise UnsupportedFeatureError.of(field, sentence)


def _is_unusual(messages: Sequence[ChatMessage]) -> bool:
    """Whether there are instructions in the middle, or users in a row: some templates take none."""
    before: ChatRole | None = None
    for message in messages:
        role = message.role
        if before is not None and (role in _INSTRUCTING or role is before is ChatRole.USER):
            return True
        before = role
    return False


def _fitted(messages: Sequence[ChatMessage], shows: Callable[..., bool]) -> Sequence[ChatMessage]:
    """Return messages in an order that a template takes, of which ``shows`` tells by roles.

    Instructions become one with those before, or else a user's, in their place: so the next turn's
    prompt begins as this one.
    """
    user, answer = ChatRole.USER, ChatRole.ASSISTANT
    found = [[messages[0]]]
    for message in messages[1:]:
        last, role = found[-1][0], message.role
        moved = role in _INSTRUCTING and not shows(user, answer, role, user)
        if moved and last.role in _INSTRUCTING:
            found[-1].append(message)
            continue
        if moved:
            message = replace(message, role=user)  # noqa: PLW2901 - the same one, as it can be shown
        if message.role is last.role is user and not shows(user, user):
            found[-1].append(message)
        else:
            found.append([message])
    return list(map(_joined, found))


def _joined(run: Sequence[ChatMessage]) -> ChatMessage:
    first, *others = run
    if not others:
        return first
    parts: list[str | MediaPart] = []
    if any(message.parts for message in run):
        parts += first.parts or (first.text,)
        for message in others:
            parts += (_BETWEEN, *(message.parts or (message.text,)))
    text = _BETWEEN.join([message.text for message in run])
    return replace(first, text=text, parts=tuple(parts))


def _reasoning_key(source: str) -> str:
    """Return under which name a template looks for an earlier answer's reasoning."""
    found = next((name for name in _REASONING_KEYS if name in source), _REASONING_KEYS[0])
    return found.removeprefix(".")


def _marked(message: ChatMessage, mark: str) -> ChatMessage:
    """Return a message whose end is found in a prompt, though templates trim texts."""
    if message.text or not message.reasoning:
        return replace(message, text=message.text + mark)
    return replace(message, reasoning=message.reasoning + mark)


def _before_mark(prompt: str, mark: str, message: ChatMessage, field: str) -> str:
    """Return a prompt up to the end of its last message.

    Raises:
        UnsupportedFeatureError: the template shows another text than the message's.
    """
    before, _, behind = prompt.partition(mark)
    said = (message.text or message.reasoning).strip()
    if before == prompt or mark in behind or not before.rstrip().endswith(said):
        sentence = "this model's chat template doesn't show the last message as it is"
        raise UnsupportedFeatureError.of(field, sentence)
    return before


def _generate(template: jinja2.Template, variables: dict[str, object]) -> Iterator[str]:
    """Do the same as `Template.generate`, without its copies and checks per call.

    Saves a third of the time for a short chat. ``variables`` include the environment's globals.
    """
    environment = template.environment
    context = environment.context_class(environment, variables, template.name, template.blocks)
    return template.root_render_func(context)


def _compile(name: str, source: str) -> jinja2.Template:
    try:
        return compile_template(source)
    except TemplateError as exc:
        raise UnusableModelError(
            f"the model's chat template {name!r} is not valid Jinja: {exc}"
        ) from exc


def _sentence_of(exc: Exception) -> str:
    """Return the message of the template's `raise_exception`, but none of the interpreter's."""
    # `raise_exception` raises this very class; Jinja's own errors are subclasses of it.
    if type(exc) is TemplateError and exc.message:
        return f"the chat template says: {exc.message[:_MAX_SENTENCE_CHARS]}"
    return "this model's chat template cannot render these messages"
