"""Callers of the HTTP API: OpenAI's own client, and requests whose bytes a test reads."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import openai

from tests.support.wire.http_service import post, raw

CHAT = "/v1/chat/completions"
HI: Any = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@dataclass
class Response:
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """What the events say; the last one must be `[DONE]`."""
        *events, end = self.body.decode().split("\n\n")
        assert end == ""
        assert all(event.startswith("data: ") for event in events)
        assert events.pop() == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events]


def client(address: str, key: str = "any", **options: Any) -> openai.AsyncOpenAI:
    """Make OpenAI's client, which says what it can't read of a response."""
    options = {"max_retries": 0, "_strict_response_validation": True, **options}
    return openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key=key, **options)


async def ask(port: int, path: str, body: Any, *, headers: str = "") -> Response:
    """Send one request; ``body`` is JSON unless it is bytes."""
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with raw(port) as wire:
        wire.send(post(path, sent, headers=f"Content-Type: application/json\r\n{headers}"))
        status, found, parts = await wire.response()
    return Response(status, found, b"".join(parts))
