"""Writes what the makers' own code makes of some conversations, for `test_encodings.py`.

By hand, where that code is: `python -m tests.support.models.encoding_goldens mistral TEKKEN_JSON`
with mistral-common 1.13, `… deepseek` with SGLang 0.5.23, which has DeepSeek's file for V3.2,
`… deepseek-v4` with deepseek-recipe 0.2, DeepSeek's package for V4 and V4.1, `… kimi-k3 FILE` with
Moonshot's encoding_k3.py, or a file that has its `build_chat_segments`. `harmony_goldens.py` does
the same for gpt-oss.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

GOLDENS = Path(__file__).parents[2] / "unit" / "processor_text" / "goldens"
_VERSIONS = (3, 7, 11, 13, 15)
_NEW_TOKENS = {
    "[ARGS]": 20,
    "[CALL_ID]": 21,
    "[THINK]": 22,
    "[/THINK]": 23,
    "[MODEL_SETTINGS]": 24,
    "[/MODEL_SETTINGS]": 25,
}
TEKKEN_EFFORTS = ("none", "high")
"""Of the version 15: the first is the default."""
_SETTINGS = {
    "reasoning_effort": {
        "type": "enum",
        "accepts_none": True,
        "default": TEKKEN_EFFORTS[0],
        "values": TEKKEN_EFFORTS,
    },
}


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
        _call("bcdefghij", "clock", city="<é>"),
    ],
)
_BARE = _said("assistant", "One moment.", tool_calls=[_call("abcdefghi", "clock")])
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
        [*_ASKED, _TWO, _RESULT, _said("tool", '{"a": 1}', tool_call_id="bcdefghij")],
        True,
    ),
    "results in another order, and more": (
        [
            *(*_ASKED, _TWO, _said("tool", "noon", tool_call_id="bcdefghij"), _RESULT),
            *(_said("user", "And?"), _said("assistant", "Cold."), _said("user", "Thanks")),
        ],
        True,
    ),
    "two in a row": (
        [*_ASKED, *(_said("user", "Please."), _said("assistant", "No."), _said("user", "Why?"))],
        False,
    ),
    "tools and no system message": (_ASKED[1:], True),
    "a system message in between": (
        [*_ASKED, *(_said("assistant", "Cold."), _said("system", "Speak French."), _ASKED[1])],
        False,
    ),
    "a call without arguments": ([*_ASKED, _BARE, _RESULT], True),
}
_NEWER = frozenset(list(CONVERSATIONS)[7:])
"""Mistral's and DeepSeek V3.2's refuse them, or aren't trained on them."""
_EFFORTS = ("low", "high", "max")
_WITH_EFFORTS = frozenset(("a question", "tools"))


def deepseek() -> list[dict[str, Any]]:
    encode = _makers_file("sglang", "srt/entrypoints/openai/encoding_dsv32.py").encode_messages
    return [
        golden(
            "deepseek-v3.2",
            name,
            encode(_given(name, thinking, "reasoning_content"), thinking_mode=_MODES[thinking]),
            thinking=thinking,
        )
        for name in CONVERSATIONS
        if name not in _NEWER
        for thinking in (False, True)
    ]


def deepseek_v4() -> list[dict[str, Any]]:
    recipe: Any = importlib.import_module("deepseek_recipe")
    encodings = {
        "deepseek-v4": (recipe.DeepseekV4Encoding(), "DeepSeek-V4-Pro"),
        "deepseek-v4.1": (recipe.DeepseekV41Encoding(), "DeepSeek-V4.1-Flash"),
    }
    found = []
    for encoding, (encoder, model) in encodings.items():
        for name, thinking, effort in _asked():
            asked = {
                "model": model,
                "messages": messages_of(name, "reasoning_content", reasons=thinking),
                "thinking": {"type": "enabled" if thinking else "disabled"},
                "tools": TOOLS if CONVERSATIONS[name][1] else [],
            } | effort
            request = recipe.ChatCompletionRequest(asked).convert(recipe.ConversionOptions())
            prompt = encoder.render_conversation(request.conversation).prompt
            found.append(golden(encoding, name, prompt, thinking=thinking, **effort))
    return found


def kimi_k3(file: Path) -> list[dict[str, Any]]:
    build = _file(file).build_chat_segments
    found = []
    for name, thinking, effort in _asked():
        segments = build(
            messages_of(name, "reasoning_content", reasons=thinking),
            TOOLS if CONVERSATIONS[name][1] else None,
            thinking=thinking,
            thinking_effort=effort.get("reasoning_effort", "max"),  # as Moonshot's tokenizer has it
        )
        prompt = "".join(segment.text for segment in segments)
        found.append(golden("kimi-k3", name, prompt, thinking=thinking, **effort))
    return found


def _asked() -> Iterator[tuple[str, bool, dict[str, str]]]:
    """Yield conversations, whether the model reasons, and with which effort."""
    for name in CONVERSATIONS:
        for thinking in (False, True):
            yield name, thinking, {}
        if name in _WITH_EFFORTS:
            for effort in _EFFORTS:
                yield name, True, {"reasoning_effort": effort}


_MODES = ("chat", "thinking")


def _given(name: str, reasons: bool, key: str) -> list[dict[str, Any]]:  # noqa: FBT001
    messages = messages_of(name, key, reasons=reasons)
    if CONVERSATIONS[name][1]:
        messages[0]["tools"] = TOOLS
    return messages


def messages_of(name: str, key: str, *, reasons: bool) -> list[dict[str, Any]]:
    messages, _ = copy.deepcopy(CONVERSATIONS[name])
    for message in messages:
        if reasons and message["role"] == "assistant":
            message[key] = "hm"
    return messages


def _makers_file(package: str, path: str) -> Any:
    """Import one file, by its path: what is around it needs an engine's packages."""
    found_at = importlib.util.find_spec(package)
    assert found_at is not None
    (folder,) = found_at.submodule_search_locations or [""]
    return _file(Path(folder) / path)


def _file(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # dataclasses look there
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
        if version == _VERSIONS[-1]:
            base["model_settings_builder"] = _SETTINGS
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "tekken.json"
            file.write_text(json.dumps(base), encoding="utf-8")
            tokenizer = loader.from_file(str(file))
        for name, (messages, with_tools) in CONVERSATIONS.items():
            if name in _NEWER:
                continue
            for effort in (None, "high") if version == _VERSIONS[-1] else (None,):
                variables = {"reasoning_effort": effort} if effort else {}
                asked = request.ChatCompletionRequest.from_openai(
                    messages=copy.deepcopy(messages),
                    tools=TOOLS if with_tools else None,
                    **variables,
                )
                encoded = tokenizer.encode_chat_completion(asked)
                found.append(golden(f"mistral-v{version}", name, encoded.text, **variables))
    return found


def golden(encoding: str, conversation: str, prompt: str, **variables: Any) -> dict[str, Any]:
    return {
        "encoding": encoding,
        "conversation": conversation,
        "variables": variables,
        "prompt": prompt,
    }


def write(kind: str, goldens: list[dict[str, Any]]) -> None:
    text = json.dumps(goldens, ensure_ascii=False, indent=1)
    (GOLDENS / f"{kind}.json").write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    kind, *given = sys.argv[1:]
    makers: dict[str, Callable[..., list[dict[str, Any]]]]
    makers = {
        "deepseek": deepseek,
        "deepseek-v4": deepseek_v4,
        "kimi-k3": kimi_k3,
        "mistral": mistral,
    }
    goldens = makers[kind](*map(Path, given))
    write(kind, goldens)
