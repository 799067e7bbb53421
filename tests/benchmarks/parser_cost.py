"""What the streaming parser takes per token: in text, in reasoning, and inside of arguments.

    python -m tests.benchmarks.parser_cost

Tokens of three characters, fed one by one; arguments of 10 kB and of 100 kB. The last column is the
ratio of the two: 1 is linear. Best of five runs.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable

from millstream_server.formats.families import FORMATS
from millstream_server.formats.parser import Parser
from millstream_server.formats.schema import Tools

_TOOLS = Tools({"f": json.dumps({"properties": {"s": {"type": "string"}}})})
_PROSE = "The quick brown fox, number 17, jumps over the lazy dog; it isn't <b>there</b>.\n"
_CODE = 'def f(x):\n    if x < 3 and "a" in d[x]:\n        return {"k": [x]}\n'
_TOKEN_CHARS = 3
_RUNS = 5


def _prose(size: int) -> str:
    return (_PROSE * (size // len(_PROSE) + 1))[:size]


def _json(size: int) -> str:
    return json.dumps({"s": (_CODE * (size // len(_CODE) + 1))[:size]})


def _plain(size: int) -> str:
    return (_CODE * (size // len(_CODE) + 1))[:size]


CASES: dict[str, tuple[str, str, Callable[[int], str], str]] = {
    "text": ("hermes", "", _prose, ""),
    "reasoning": ("hermes", "<think>", _prose, "</think>"),
    "hermes": ("hermes", '<tool_call>\n{"name": "f", "arguments": ', _json, "}\n</tool_call>"),
    "kimi-k2": (
        "kimi-k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>",
        _json,
        "<|tool_call_end|>",
    ),
    "qwen-xml": (
        "qwen-xml",
        "<tool_call>\n<function=f>\n<parameter=s>\n",
        _plain,
        "\n</parameter>\n</function>",
    ),
    "glm-kv": (
        "glm-kv",
        "<tool_call>f<arg_key>s</arg_key><arg_value>",
        _plain,
        "</arg_value></tool_call>",
    ),
    "pythonic": ("pythonic", "[f(s=", lambda size: repr(_plain(size)), ")]"),
    "gemma4": ("gemma4", '<|tool_call>call:f{s:<|"|>', _plain, '<|"|>}<tool_call|>'),
}


def seconds_per_token(name: str, size: int) -> float:
    """Return the CPU time of one token of an answer of about ``size`` characters."""
    form, before, write, behind = CASES[name]
    text = before + write(size) + behind
    pieces = [text[at : at + _TOKEN_CHARS] for at in range(0, len(text), _TOKEN_CHARS)]
    best = float("inf")
    for _ in range(_RUNS):
        parser = Parser(FORMATS[form], _TOOLS)
        gc.collect()
        began = time.process_time()
        for piece in pieces:
            parser.feed(piece, (1,))
        parser.finish()
        best = min(best, time.process_time() - began)
    return best / len(pieces)


def main() -> None:
    print(f"{'':12}{'10 kB':>12}{'100 kB':>12}{'ratio':>8}")  # noqa: T201
    for name in CASES:
        small, large = seconds_per_token(name, 10_000), seconds_per_token(name, 100_000)
        row = f"{name:12}{small * 1e6:9.2f} us{large * 1e6:9.2f} us{large / small:8.2f}"
        print(row)  # noqa: T201


if __name__ == "__main__":
    main()
