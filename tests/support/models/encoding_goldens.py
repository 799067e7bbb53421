"""Writes what the makers' own code makes of some conversations, for `test_encodings.py`.

By hand, where that code is: `python -m tests.support.models.encoding_goldens mistral TEKKEN_JSON`
with mistral-common 1.13, `… deepseek` with SGLang 0.5.23, which has DeepSeek's file for V3.2,
`… deepseek-v4` with vLLM 0.32, which has the one for V4.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

GOLDENS = Path(__file__).parents[2] / "unit" / "processor_text" / "goldens"
_VERSIONS = (3, 7, 11, 13)
_NEW_TOKENS = {"[ARGS]": 20, "[CALL_ID]": 21, "[THINK]": 22, "[/THINK]": 23}


def _call(call_id: str, name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": call_id, "type": "function", "function": function}


def _said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


_PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "description": "où"}}}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": name, "description": about, "parameters": _PARAMETERS},
    }
    for name, about in (("weather", "Tells the weather <now>."), ("clock", ""))
]
_ASKED = [_said("system", "Be brief."), _said("user", "Weather in Zürich?")]
_CALLED = _said("assistant", "", tool_calls=[_call("abcdefghi", "weather", city="Zürich", n=2)])
_RESULT = _said("tool", "cold & wet", tool_call_id="abcdefghi")
_TWO = _said(
    "assistant",
    "",
    tool_calls=[
        _call("abcdefghi", "weather", city='a "b"', deep={"x": [1, None, True]}),
        _call("123456789", "clock", city="<é>"),
    ],
)
CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], bool]] = {
    "a question": ([_said("user", "Hi 你好\n")], False),
    "with a system message": (_ASKED, False),
    "turns": ([*_ASKED, _said("assistant", "Cold."), _said("user", "And now?")], False),
    "tools": (_ASKED, True),
    "a result": ([*_ASKED, _CALLED, _RESULT], True),
    "a turn behind a result": (
        [*_ASKED, _CALLED, _RESULT, _said("assistant", "Cold."), _said("user", "Thanks")],
        True,
    ),
    "two calls": (
        [*_ASKED, _TWO, _RESULT, _said("tool", '{"a": 1}', tool_call_id="123456789")],
        True,
    ),
    "results in another order, and more": (
        [
            *(*_ASKED, _TWO, _said("tool", "noon", tool_call_id="123456789"), _RESULT),
            *(_said("user", "And?"), _said("assistant", "Cold."), _said("user", "Thanks")),
        ],
        True,
    ),
    "two in a row": ([*_ASKED, _said("user", "Please."), _said("assistant", "No.")], False),
}
_OF_V4 = frozenset(("results in another order, and more", "two in a row"))
"""Other formats refuse them, or aren't trained on them."""


def deepseek() -> list[dict[str, Any]]:
    encode = _makers_file("sglang", "srt/entrypoints/openai/encoding_dsv32.py").encode_messages
    return [
        _golden(
            "deepseek-v3.2",
            name,
            encode(_given(name, thinking, "reasoning_content"), thinking_mode=_MODES[thinking]),
            thinking=thinking,
        )
        for name in CONVERSATIONS
        if name not in _OF_V4
        for thinking in (False, True)
    ]


def deepseek_v4() -> list[dict[str, Any]]:
    encode = _makers_file("vllm", "tokenizers/deepseek_v4_encoding.py").encode_messages
    found = []
    for name in CONVERSATIONS:
        for thinking, effort in ((False, None), (True, None), (True, "high"), (True, "max")):
            given = _given(name, thinking, "reasoning")
            mode = _MODES[thinking]
            prompt = encode(given, thinking_mode=mode, reasoning_effort=effort)
            variables = {"thinking": thinking} | ({"reasoning_effort": effort} if effort else {})
            found.append(_golden("deepseek-v4", name, prompt, **variables))
    return found


_MODES = ("chat", "thinking")


def _given(name: str, reasons: bool, key: str) -> list[dict[str, Any]]:  # noqa: FBT001
    messages, with_tools = copy.deepcopy(CONVERSATIONS[name])
    if with_tools:
        messages[0]["tools"] = TOOLS
    for message in messages:
        if reasons and message["role"] == "assistant":
            message[key] = "hm"
    return messages


def _makers_file(package: str, path: str) -> Any:
    """Import one file, by its path: what is around it needs an engine's packages."""
    found_at = importlib.util.find_spec(package)
    assert found_at is not None
    (folder,) = found_at.submodule_search_locations or [""]
    file = Path(folder) / path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def mistral(tekken: Path) -> list[dict[str, Any]]:
    package = "mistral_common.tokens.tokenizers"
    loader = importlib.import_module(f"{package}.mistral").MistralTokenizer
    request = importlib.import_module("mistral_common.protocol.instruct.request")
    base = json.loads(tekken.read_bytes())
    old = importlib.import_module(f"{package}.tekken").Tekkenizer.DEPRECATED_SPECIAL_TOKENS
    found = []
    for version in _VERSIONS:
        base["config"]["version"] = f"v{version}"
        base["special_tokens"] = [
            *({**token, "token_str": str(getattr(token["token_str"], "value", token["token_str"]))}
              for token in old),
            *({"rank": rank, "token_str": text, "is_control": True}
              for text, rank in _NEW_TOKENS.items()),
        ]  # fmt: skip
        base.pop("image", None)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "tekken.json"
            file.write_text(json.dumps(base), encoding="utf-8")
            tokenizer = loader.from_file(str(file))
        for name, (messages, with_tools) in CONVERSATIONS.items():
            if name in _OF_V4:
                continue
            asked = request.ChatCompletionRequest.from_openai(
                messages=copy.deepcopy(messages), tools=TOOLS if with_tools else None
            )
            encoded = tokenizer.encode_chat_completion(asked)
            found.append(_golden(f"mistral-v{version}", name, encoded.text))
    return found


def _golden(encoding: str, conversation: str, prompt: str, **variables: Any) -> dict[str, Any]:
    return {
        "encoding": encoding,
        "conversation": conversation,
        "variables": variables,
        "prompt": prompt,
    }


if __name__ == "__main__":
    kind, *given = sys.argv[1:]
    makers: dict[str, Callable[..., list[dict[str, Any]]]]
    makers = {"deepseek": deepseek, "deepseek-v4": deepseek_v4, "mistral": mistral}
    goldens = makers[kind](*map(Path, given))
    text = json.dumps(goldens, ensure_ascii=False, indent=1)
    (GOLDENS / f"{kind}.json").write_text(f"{text}\n", encoding="utf-8")
