"""Python functions as tools: schemas from signatures and docstrings, and arguments of calls."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest

from millstream_client.functions import Function, functions_of, read_docstring


class Unit(enum.Enum):
    """A unit of temperature."""

    C = "c"
    F = "f"


@dataclass
class Place:
    """A place."""

    city: str
    country: str


def forecast(
    place: Place,
    days: Annotated[int, "How many"] = 1,
    *,
    unit: Unit = Unit.C,
    tags: list[str] | None = None,
    kind: Literal["short", "long"] = "short",
) -> str:
    """Tell the weather.

    It is often wrong.

    Args:
        place (Place): Where, the nearest
            town at least.
        days: not this.
        kind: How long it is.

    Returns:
        The weather.
    """
    return f"{place} {days} {unit} {tags} {kind}"


def test_a_schema_of_a_signature_and_its_docstring() -> None:
    tool = Function(forecast).tool
    assert (tool.name, tool.description) == ("forecast", "Tell the weather.\n\nIt is often wrong.")
    place = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "country": {"type": "string"}},
        "required": ["city", "country"],
        "additionalProperties": False,
        "description": "Where, the nearest town at least.",
    }
    tags = {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]}
    assert json.loads(tool.parameters_json_schema) == {
        "type": "object",
        "properties": {
            "place": place,
            "days": {"type": "integer", "description": "How many"},
            "unit": {"enum": ["c", "f"]},
            "tags": tags,
            "kind": {"enum": ["short", "long"], "description": "How long it is."},
        },
        "required": ["place"],
    }


def test_arguments_become_what_the_function_takes() -> None:
    place = {"city": "Oslo", "country": "Norway"}
    bound = Function(forecast).bind({"place": place, "unit": "f", "tags": ["a"]})
    assert bound == {"place": Place("Oslo", "Norway"), "unit": Unit.F, "tags": ["a"]}


@pytest.mark.parametrize(
    ("text", "description", "said"),
    [
        ("", "", {}),
        ("Do it.", "Do it.", {}),
        ("Do it.\n\n:param str x: a\n    number\n:returns: it", "Do it.", {"x": "a number"}),
        (
            "Do it.\n\nArgs:\n    x: one\n\n    y: two\n\nRaises:\n    E: no",
            "Do it.",
            {"x": "one", "y": "two"},
        ),
        ("Args:\n    x: one", "", {"x": "one"}),
    ],
)
def test_what_a_docstring_says(text: str, description: str, said: dict[str, str]) -> None:
    assert read_docstring(text) == (description, said)


def _untyped(x) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    """Do nothing."""


def _many(*x: int) -> None:
    """Do nothing."""


def _bytes(x: bytes) -> None:
    """Do nothing."""


def _unknown(x: Missing) -> None:  # type: ignore[name-defined]  # noqa: F821
    """Do nothing."""


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda: 1, "can't be a tool: a tool is a function with a name"),
        (_untyped, "parameter 'x' of _untyped has no type: write x: str"),
        (_many, r"parameter 'x' of _many: .* no \*args"),
        (_bytes, "parameter 'x' of _bytes: no schema can be made of <class 'bytes'>"),
        (_unknown, "a type of _unknown isn't known when it runs: name 'Missing'"),
    ],
)
def test_what_is_no_tool_is_said(function: Callable[..., Any], why: str) -> None:
    with pytest.raises(TypeError, match=why):
        functions_of([function])


def test_a_method_is_a_tool_without_its_object() -> None:
    class Shop:
        """A shop."""

        def price(self, item: str) -> int:
            """Tell a price."""
            return len(item)

    (function,) = functions_of([Shop().price, {"name": "other"}]).values()
    assert json.loads(function.tool.parameters_json_schema)["required"] == ["item"]
    assert function.call(**function.bind({"item": "soap"})) == 4
