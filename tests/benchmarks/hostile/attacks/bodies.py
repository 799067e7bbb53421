"""Bodies of JSON that are huge, deep, or from where none should come."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable

from tests.benchmarks.hostile import http1
from tests.benchmarks.hostile.attacker import Attack
from tests.benchmarks.hostile.attacks import methods
from tests.benchmarks.hostile.http1 import opened, request

_BODY_BYTES = int(3.9 * (1 << 20))


async def whole(
    attack: Attack,
    *,
    kind: str,
    connections: int = 8,
    wanted: str = "",
    path: str = "",
    more: str = "",
    host: str = "localhost",
) -> None:
    """Whole bodies, one after another on each connection, and each answered as is ``wanted``."""
    path, key = path or _PATHS.get(kind, http1.CHAT), attack.order.key
    made = [request(path, body, key=key, more=more, host=host) for body in _BODIES[kind]()]
    requests = itertools.cycle(made)

    async def send(_: int) -> None:
        async with opened(attack) as http:
            while True:
                http.call()
                await http.send(next(requests))
                status = await http.status()
                if wanted and status not in (wanted, "closed", "alone"):
                    attack.broken[:] = [f"{path} got {status}, not {wanted}"]
                if status == "closed":
                    return

    await attack.times(connections, send)


async def beside_a_small_one(attack: Attack, *, within_s: float = 5.0) -> None:
    """Connect calls of as many messages as a body can have, beside one of 5 KB."""
    small = json.dumps({"text": "hi " * 1600}).encode()
    call = request(methods.TOKENIZE, small, key=attack.order.key, more=_CONNECT_JSON)

    async def ask(_: int) -> None:
        async with opened(attack) as http, asyncio.timeout(within_s):
            http.call()
            await http.send(call)
            if await http.status() not in ("200", "alone"):
                attack.broken[:] = ["a small call beside large ones failed"]
        await asyncio.sleep(0.1)

    async def asked(number: int) -> None:
        try:
            await ask(number)
        except TimeoutError:
            attack.broken[:] = [f"a small call beside large ones takes above {within_s:g} s"]

    large = whole(attack, kind="messages", path=methods.TOKENIZE, more=_CONNECT_JSON)
    await asyncio.gather(large, attack.times(1, asked))


_CHAT = b'{"max_tokens":1,"messages":[{"role":"user","content":"hi"}],'


def _filled(before: bytes, item: bytes, after: bytes) -> bytes:
    count = (_BODY_BYTES - len(before) - len(after)) // (len(item) + 1)
    return before + b",".join([item] * count) + after


def _many() -> list[bytes]:
    """As many objects as a body can have, in the fields that hold some."""
    numbers = b",".join([b'"%d":0' % number for number in range(300_000)])
    return [
        _filled(b'{"messages":[', b'{"role":"user"}', b"]}"),
        _filled(b'{"messages":[{"role":"user","content":[', b'{"type":"text","text":""}', b"]}]}"),
        _filled(
            b'{"messages":[{"role":"assistant","tool_calls":[',
            b'{"id":"","function":{"name":""}}',
            b"]}]}",
        ),
        _filled(_CHAT + b'"tools":[', b'{"function":{"name":""}}', b"]}"),
        _filled(_CHAT + b'"stop":[', b'""', b"]}"),
        _filled(_CHAT + b'"stop_token_ids":[', b"1", b"]}"),
        _filled(_CHAT + b'"audio":[', b"[]", b"]}"),
        _filled(_CHAT + b'"else":[', b"{}", b"]}"),
        _CHAT + b'"logit_bias":{' + numbers + b"}}",
    ]


def _blocks() -> list[bytes]:
    """The same of Anthropic's Messages."""
    begun = b'{"max_tokens":9,"messages":[{"role":"'
    return [
        _filled(begun + b'user","content":[', b'{"type":"text","text":""}', b"]}]}"),
        _filled(begun + b'user","content":[', b'{"type":"tool_result","tool_use_id":""}', b"]}]}"),
        _filled(
            begun + b'assistant","content":[', b'{"type":"tool_use","id":"","name":""}', b"]}]}"
        ),
        _filled(begun + b'user","content":"hi"}],"mcp_servers":[', b"[]", b"]}"),
        _filled(begun + b'user","content":"hi"}],"tools":[', b'{"name":""}', b"]}"),
    ]


def _long() -> list[bytes]:
    """Few and long values: texts, numbers, blanks."""
    text = b"x" * (_BODY_BYTES - 200)
    return [
        b'{"messages":[{"role":"user","content":"' + text + b'"}]}',
        b'{"messages":[{"role":"user","content":"' + b"\\u00e9" * (len(text) // 6) + b'"}]}',
        _CHAT + b'"seed":' + b"9" * len(text) + b"}",
        _CHAT + b'"temperature":0.' + b"9" * len(text) + b"}",
        _CHAT + b'"model":"' + text + b'"}',
        _CHAT + b" " * len(text) + b'"n":1}',
        b'{"messages":' + text,
    ]


def _deep() -> list[bytes]:
    """Nested in each field that takes any value, and in an unknown one; also to the limit."""
    places = (
        (_CHAT + b'"else":', b"}"),
        (_CHAT + b'"audio":', b"}"),
        (_CHAT + b'"tools":[{"function":{"name":"f","parameters":', b"}}]}"),
        (
            _CHAT + b'"response_format":{"type":"json_schema","json_schema":{"schema":',
            b"}}}",
        ),
        (b'{"messages":', b"}"),
    )
    found = []
    for before, after in places:
        for begin, end, depth in ((b"[", b"]", 100_000), (b'{"a":', b"}", 900), (b"[", b"]", 100)):
            found.append(before + begin * depth + b"1" + end * depth + after)
    return found


def _grammars() -> list[bytes]:
    """Custom tools whose Lark rules each have the next one twice, without content and with it."""
    rules = "".join(f"a{at}: a{at + 1} a{at + 1}\n" for at in range(40))
    made = [{"syntax": "lark", "definition": f"start: a0\n{rules}a40: {end}"} for end in _ENDS]
    tools = [{"type": "custom", "name": "t", "format": {"type": "grammar", **it}} for it in made]
    return [json.dumps({"input": "hi", "tools": [tool]}).encode() for tool in tools]


def _not_utf8() -> list[bytes]:
    """Bytes that are no UTF-8 in what is read as raw JSON."""
    schema = b'{"type":"object","title":"\xff"}'
    tool = b'{"type":"function","function":{"name":"f","parameters":' + schema + b"}}"
    form = b'{"type":"json_schema","json_schema":{"name":"f","schema":' + schema + b"}}"
    return [
        _CHAT + b'"tools":[' + tool + b"]}",
        _CHAT + b'"response_format":' + form + b"}",
        _CHAT + b'"logit_bias":{"\xff":1}}',
        _CHAT + b'"tools":[{"name":"f","input_schema":' + schema + b"}]}",
    ]


def _prompts() -> list[bytes]:
    """Prompts far longer than the context, in words, without a blank, and as token ids."""
    size = _BODY_BYTES - 200
    texts = (b'"' + b"so " * (size // 3) + b'"', b'"' + b"x" * size + b'"')
    ids = b"[" + b",".join([b"7"] * (size // 2)) + b"]"
    return [b'{"max_tokens":1,"prompt":' + prompt + b"}" for prompt in (*texts, ids)]


_CONNECT_JSON = "Content-Type: application/json\r\n"
_ENDS = ('""', '("")', '[""]', '"x"', "/()/")
_BODIES: dict[str, Callable[[], list[bytes]]] = {
    "many": _many,
    "blocks": _blocks,
    "long": _long,
    "deep": _deep,
    "grammars": _grammars,
    "messages": lambda: [_filled(b'{"conversation":{"messages":[', b"{}", b"]}}")],
    "not-utf8": _not_utf8,
    "prompts": _prompts,
    "small": lambda: [http1.chat(1, stream=False)],
}
_PATHS = {"blocks": "/v1/messages", "grammars": "/v1/responses", "prompts": "/v1/completions"}
