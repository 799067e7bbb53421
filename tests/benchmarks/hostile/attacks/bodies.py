"""Bodies of JSON that are huge or deep."""

from __future__ import annotations

import itertools
import json

from tests.benchmarks.hostile import http1
from tests.benchmarks.hostile.attacker import Attack
from tests.benchmarks.hostile.http1 import opened, request

_BODY_BYTES = int(3.9 * (1 << 20))


async def whole(attack: Attack, *, kind: str, connections: int = 8) -> None:
    """Whole bodies, one after another on each connection."""
    path, made = _PATHS.get(kind, http1.CHAT), _BODIES[kind]()
    requests = itertools.cycle([request(path, body, key=attack.order.key) for body in made])

    async def send(_: int) -> None:
        async with opened(attack) as http:
            while True:
                http.call()
                await http.send(next(requests))
                if await http.status() == "closed":
                    return

    await attack.times(connections, send)


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


_ENDS = ('""', '("")', '[""]', '"x"', "/()/")
_BODIES = {
    "many": _many,
    "blocks": _blocks,
    "long": _long,
    "deep": _deep,
    "grammars": _grammars,
}
_PATHS = {"blocks": "/v1/messages", "grammars": "/v1/responses"}
