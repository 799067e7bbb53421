"""Output items of the Responses API, as far as they have come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from millstream_server.processor.http.responses.tools import CustomInput, OwnName


class Item:
    """An item: what its events are called, and how it is shown."""

    __slots__ = ("id", "index", "status", "texts")

    type = ""
    prefix = ""
    """Of its id."""
    pieces = ""
    """What the names of its pieces' events begin with; empty: there are none."""
    field = "text"
    """What those events call the whole of the pieces."""
    more: Mapping[str, Any] = {}
    """What else is in those events."""

    def __init__(self, answer_id: str, index: int) -> None:
        """Begin item ``index`` of an answer."""
        self.index = index
        self.id = f"{self.prefix}_{answer_id}_{index}"
        self.status = "in_progress"
        self.texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def at(self) -> dict[str, Any]:
        """Where events in it belong."""
        return {"item_id": self.id, "output_index": self.index}

    def read(self, piece: str) -> str:
        """Return what a piece adds."""
        return piece

    def finish(self) -> str:
        """Return what was held back."""
        return ""

    def part(self, text: str) -> dict[str, Any] | None:
        """Show its one part with a text; None: it has no parts."""
        return None

    def done(self) -> dict[str, Any]:
        """Return what the event has that ends its pieces."""
        return {**self.more, self.field: self.text}

    def shown(self) -> dict[str, Any]:
        """Show it; while it is in progress, nothing of its pieces need be there."""
        return {"type": self.type, "id": self.id, "status": self.status}


class _InParts(Item):
    """An item whose text is in a part."""

    __slots__ = ()

    @property
    def at(self) -> dict[str, Any]:
        return {**super().at, "content_index": 0}

    def shown(self) -> dict[str, Any]:
        begun = self.status == "in_progress"
        return {**super().shown(), "content": [] if begun else [self.part(self.text)]}


class Message(_InParts):
    """Text for the reader."""

    __slots__ = ()

    type = "message"
    prefix = "msg"
    pieces = "response.output_text"
    more: Mapping[str, Any] = {"logprobs": []}

    def part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def shown(self) -> dict[str, Any]:
        return {**super().shown(), "role": "assistant"}


class Thought(_InParts):
    """Reasoning."""

    __slots__ = ()

    type = "reasoning"
    prefix = "rs"
    pieces = "response.reasoning_text"

    def part(self, text: str) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": text}

    def shown(self) -> dict[str, Any]:
        return {**super().shown(), "summary": [], "encrypted_content": None}


class FunctionCall(Item):
    """A call of a function."""

    __slots__ = ("call_id", "own")

    type = "function_call"
    prefix = "fc"
    pieces = "response.function_call_arguments"
    field = "arguments"

    def __init__(self, answer_id: str, index: int, call_id: str, own: OwnName) -> None:
        """Begin a call of the client's tool ``own``."""
        super().__init__(answer_id, index)
        self.call_id = call_id
        self.own = own

    def done(self) -> dict[str, Any]:
        return {"name": self.own.name, **super().done()}

    def shown(self) -> dict[str, Any]:
        shown = {**super().shown(), "call_id": self.call_id, "name": self.own.name}
        if self.own.namespace:
            shown["namespace"] = self.own.namespace
        return {**shown, self.field: self.text}


class CustomCall(FunctionCall):
    """A call of a custom tool."""

    __slots__ = ("_input",)

    type = "custom_tool_call"
    prefix = "ctc"
    pieces = "response.custom_tool_call_input"
    field = "input"

    def __init__(self, answer_id: str, index: int, call_id: str, own: OwnName) -> None:
        super().__init__(answer_id, index, call_id, own)
        self._input = CustomInput()

    def read(self, piece: str) -> str:
        return self._input.push(piece)

    def finish(self) -> str:
        return self._input.finish()


class SearchCall(FunctionCall):
    """A search for tools, which the client runs. Its arguments are sent whole."""

    __slots__ = ()

    type = "tool_search_call"
    prefix = "tsc"
    pieces = ""

    def shown(self) -> dict[str, Any]:
        try:
            arguments = msgspec.json.decode(self.text or "{}")
        except msgspec.DecodeError:
            arguments = {}  # it was cut
        shown = {"type": self.type, "id": self.id, "status": self.status, "call_id": self.call_id}
        return {**shown, "execution": "client", "arguments": arguments}
