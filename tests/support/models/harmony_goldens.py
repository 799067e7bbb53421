"""Writes what OpenAI's package makes of conversations with gpt-oss, for `test_encodings.py`.

By hand, with openai-harmony 0.0.8 and pyyaml, and the package that has the vocabulary (see
`tests/unit/formats/make_oracles.py`): `python -m tests.support.models.harmony_goldens PACKAGE`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from tests.support.models.encoding_goldens import CONVERSATIONS, TOOLS, golden, messages_of, write

_SCHEMA = {
    "type": "object",
    "description": "All that a query is made of.",
    "properties": {
        "text": {"type": "string", "title": "Text", "examples": ["a b", 'say "hi"']},
        "sort": {"type": "string", "enum": ["newest", "best"], "default": "best"},
        "page": {"type": "integer", "description": "From 1.", "default": 1},
        "share": {"type": "number", "nullable": True, "default": 0.5},
        "by": {"type": ["integer", "null", "string"]},
        "deep": {"type": "boolean", "default": False},
        "words": {"type": "array", "items": {"type": "string"}, "default": ["a", "b"]},
        "any": {"type": "array"},
        "free": {"description": "Whatever."},
        "note": {"type": "string", "default": "none <é>"},
        "where": {
            "type": "object",
            "description": "A place.",
            "properties": {
                "city": {"type": "string", "description": "Its name."},
                "at": {
                    "type": "array",
                    "items": {"type": "object", "properties": {"x": {"type": "number"}}},
                },
            },
            "required": ["city"],
        },
        "when": {
            "description": "A time.",
            "default": "now",
            "oneOf": [
                {"type": "string", "description": "In words.", "default": "now"},
                {"type": "integer", "description": "In seconds.", "nullable": True},
                {"type": "object", "properties": {"day": {"type": "string"}}, "required": ["day"]},
            ],
        },
        "who": {
            "description": "A person.",
            "oneOf": [
                {"type": "string", "description": "A person.", "enum": ["me", "you"]},
                {"type": "array", "items": {"oneOf": [{"type": "string"}, {"type": "null"}]}},
            ],
        },
    },
    "required": ["text", "when"],
}
SCHEMA_TOOLS = [
    {
        "type": "function",
        "function": {"name": "search", "description": "Finds.\nIn all.", "parameters": _SCHEMA},
    }
]
"""Whose types harmony writes in TypeScript."""
DATE = "2026-11-27"


def harmony(package: str) -> list[dict[str, Any]]:
    """Return goldens; ``package`` has the vocabulary."""
    from tests.unit.formats.make_oracles import harmony_library  # noqa: PLC0415 - needs pyyaml

    library, encoding = harmony_library(package)
    asked: list[tuple[str, list[dict[str, Any]], dict[str, str]]]
    asked = [(name, TOOLS if CONVERSATIONS[name][1] else [], {}) for name in CONVERSATIONS]
    asked += [("tools", TOOLS, {"reasoning_effort": effort}) for effort in ("low", "high")]
    asked.append(("a question", SCHEMA_TOOLS, {}))
    found = []
    for name, tools, variables in asked:
        messages = list(
            _messages(library, messages_of(name, "reasoning", reasons=True), tools, **variables)
        )
        conversation = library.Conversation.from_messages(messages)
        ids = encoding.render_conversation_for_completion(
            conversation,
            library.Role.ASSISTANT,
            library.RenderConversationConfig(auto_drop_analysis=False),
        )
        made = golden("harmony", name, encoding.decode(ids), **variables)
        found.append(made | ({"schemas": True} if tools is SCHEMA_TOOLS else {}))
    return found


def _messages(
    library: Any,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]],
    reasoning_effort: str = "medium",
) -> Iterator[Any]:
    """Yield messages as OpenAI's documentation of harmony maps a chat's."""
    message, role = library.Message.from_role_and_content, library.Role
    effort = library.ReasoningEffort[reasoning_effort.upper()]
    system = library.SystemContent.new().with_reasoning_effort(effort)
    yield message(role.SYSTEM, system.with_conversation_start_date(DATE))
    leads = messages[0]["role"] == "system"
    developer = library.DeveloperContent.new()
    if leads:
        developer = developer.with_instructions(messages[0]["content"])
    if tools:
        new, functions = library.ToolDescription.new, [tool["function"] for tool in tools]
        developer = developer.with_function_tools(
            [new(f["name"], f["description"], f["parameters"]) for f in functions]
        )
    if leads or tools:
        yield message(role.DEVELOPER, developer)
    said = messages[leads:]
    last = max((at for at, m in enumerate(said) if _is_final(m)), default=-1)
    names = {c["id"]: c["function"]["name"] for m in said for c in m.get("tool_calls", ())}
    for at, each in enumerate(said):
        if each["role"] == "assistant":
            yield from _answer(library, each, reasons=at > last)
        elif each["role"] == "tool":
            author = library.Author.new(role.TOOL, f"functions.{names[each['tool_call_id']]}")
            result = library.Message.from_author_and_content(author, each["content"])
            yield result.with_channel("commentary").with_recipient("assistant")
        elif each["role"] == "system":
            told = library.DeveloperContent.new().with_instructions(each["content"])
            yield message(role.DEVELOPER, told)
        else:
            yield message(role.USER, each["content"])


def _answer(library: Any, said: dict[str, Any], *, reasons: bool) -> Iterator[Any]:
    message, role = library.Message.from_role_and_content, library.Role.ASSISTANT
    calls = said.get("tool_calls", [])
    if reasons:
        yield message(role, said["reasoning"]).with_channel("analysis")
    if said["content"]:
        yield message(role, said["content"]).with_channel("commentary" if calls else "final")
    for call in calls:
        made = message(role, call["function"]["arguments"]).with_channel("commentary")
        made = made.with_recipient(f"functions.{call['function']['name']}")
        yield made.with_content_type("json")


def _is_final(message: dict[str, Any]) -> bool:
    return message["role"] == "assistant" and not message.get("tool_calls")


if __name__ == "__main__":
    write("harmony", harmony(sys.argv[1]))
