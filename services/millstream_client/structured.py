"""Answers as objects of a type that the caller gives: its JSON Schema, and the object of a text.

A type is a pydantic model, a dataclass, a TypedDict, or a JSON Schema as a mapping, whose objects
are plain dicts and lists. pydantic isn't imported: a model is known by its methods.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from millstream.v1.generation_pb2 import FinishReason
from millstream.v1.sampling_pb2 import Constraint
from millstream_client.errors import AnswerFormatError

if TYPE_CHECKING:
    from millstream_client.answers import Answer

_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_KNOWN = (
    "str, int, float, bool, None, Literal, an Enum, list[…], dict[str, …], unions of them, "
    "dataclasses and TypedDicts; for more give a pydantic model"
)


def constraint_of(answer_type: Any) -> Constraint:
    """Return the constraint that makes an answer fit a type.

    Raises:
        TypeError: no schema can be made of it.
    """
    return Constraint(json_schema=json.dumps(_schema_of(answer_type)))


def parse(answer_type: Any, text: str) -> Any:
    """Return the object that a text means.

    Raises:
        ValueError: it is no JSON, or doesn't fit the type.
    """
    if hasattr(answer_type, "model_validate_json"):
        return answer_type.model_validate_json(text)
    value = json.loads(text)
    return value if isinstance(answer_type, Mapping) else shape_of(answer_type).make(value)


def parsed(answer: Answer) -> Any:
    """Return the object that a whole answer means.

    Raises:
        AnswerFormatError: the answer isn't whole, or doesn't fit its type.
        TypeError: it has none.
    """
    if answer.answer_type is None:
        raise TypeError(
            "the answer has no type to be parsed as; give answer_type= with the request"
        )
    try:
        return parse(answer.answer_type, answer.text)
    except ValueError as error:
        cut = answer.finish_reason != FinishReason.FINISH_REASON_STOP
        reason = "ANSWER_CUT_OFF" if cut else "ANSWER_NOT_PARSED"
        failed = AnswerFormatError(_why(answer, error), reason=reason)
        failed.request_id, failed.partial = answer.request_id, answer
        raise failed from error


def _why(answer: Answer, error: ValueError) -> str:
    if answer.finish_reason == FinishReason.FINISH_REASON_LENGTH:
        return (
            f"the answer was cut off after {answer.choices[0].token_count} tokens, before its JSON "
            "was whole; give a larger max_new_tokens"
        )
    if not answer.complete:
        return "the answer hasn't arrived in full yet; read the stream to its end first"
    if answer.finish_reason != FinishReason.FINISH_REASON_STOP:
        ending = FinishReason.Name(answer.finish_reason).removeprefix("FINISH_REASON_")
        return f"the answer ended early ({ending}), before its JSON was whole"
    return f"the answer doesn't fit {_name(answer.answer_type)}: {error}"


def _name(answer_type: Any) -> str:
    return getattr(answer_type, "__name__", "the schema")


def _schema_of(answer_type: Any) -> Any:
    if isinstance(answer_type, Mapping):
        return answer_type
    if hasattr(answer_type, "model_json_schema"):
        return answer_type.model_json_schema()
    if not (dataclasses.is_dataclass(answer_type) or typing.is_typeddict(answer_type)):
        raise TypeError(
            "answer_type is a pydantic model, a dataclass, a TypedDict or a JSON Schema, not "
            f"{_name(answer_type)!r}"
        )
    return shape_of(answer_type).schema


# ---- types without pydantic ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shape:
    """A type's schema, and what makes an object of a value of JSON or raises ValueError."""

    schema: dict[str, Any]
    make: Callable[[Any], Any]


def shape_of(kind: Any, within: tuple[Any, ...] = ()) -> Shape:
    """Read a type; ``within`` are the classes around it.

    Raises:
        TypeError: no schema can be made of it.
    """
    if kind in _PLAIN:
        return _plain(kind)
    if (of_parts := _PARTED.get(typing.get_origin(kind))) is not None:
        return of_parts(typing.get_args(kind), within)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return Shape({"enum": [member.value for member in kind]}, kind)
    if dataclasses.is_dataclass(kind) or typing.is_typeddict(kind):
        return _record(kind, within)
    raise TypeError(f"no schema can be made of {kind!r}; known are {_KNOWN}")


def _plain(kind: Any) -> Shape:
    def make(value: Any) -> Any:
        if kind is float and type(value) is int:
            return float(value)
        return _checked(value, kind, fits=type(value) is kind)

    return Shape({"type": _PLAIN[kind]}, make)


def _literal(values: tuple[Any, ...], _within: tuple[Any, ...]) -> Shape:
    return Shape(
        {"enum": list(values)}, lambda value: _checked(value, "Literal", fits=value in values)
    )


def _list(parts: tuple[Any, ...], within: tuple[Any, ...]) -> Shape:
    inner = shape_of(parts[0], within)
    return Shape(
        {"type": "array", "items": inner.schema},
        lambda value: [*map(inner.make, _checked(value, list, fits=isinstance(value, list)))],
    )


def _dict(parts: tuple[Any, ...], within: tuple[Any, ...]) -> Shape:
    if parts[0] is not str:
        raise TypeError(f"keys of JSON are texts: dict[str, …], not dict[{_name(parts[0])}, …]")
    inner = shape_of(parts[1], within)

    def make(value: Any) -> Any:
        checked = _checked(value, dict, fits=isinstance(value, dict))
        return {name: inner.make(each) for name, each in checked.items()}

    return Shape({"type": "object", "additionalProperties": inner.schema}, make)


def _union(parts: tuple[Any, ...], within: tuple[Any, ...]) -> Shape:
    shapes = [shape_of(part, within) for part in parts]

    def make(value: Any) -> Any:
        for shape in shapes:
            with contextlib.suppress(ValueError):
                return shape.make(value)
        return _checked(value, " or ".join(map(_name, parts)), fits=False)

    return Shape({"anyOf": [shape.schema for shape in shapes]}, make)


_PARTED: Mapping[Any, Callable[[tuple[Any, ...], tuple[Any, ...]], Shape]] = {
    typing.Literal: _literal,
    list: _list,
    Sequence: _list,
    dict: _dict,
    Mapping: _dict,
    typing.Union: _union,
    types.UnionType: _union,
}


def _record(kind: Any, within: tuple[Any, ...]) -> Shape:
    """Read a dataclass or a TypedDict."""
    if kind in within:
        raise TypeError(f"{_name(kind)} contains itself; give a pydantic model for that")
    marked = typing.get_type_hints(kind, include_extras=True)
    always = getattr(kind, "__required_keys__", marked)  # wrong where annotations are strings
    required = [
        name
        for name, hint in marked.items()
        if name in always and typing.get_origin(hint) is not typing.NotRequired
    ]
    hints = typing.get_type_hints(kind)
    fields = {name: shape_of(hint, (*within, kind)) for name, hint in hints.items()}

    def make(value: Any) -> Any:
        _checked(value, kind, fits=isinstance(value, dict))
        if missing := [name for name in required if name not in value]:
            raise ValueError(f"{_name(kind)} lacks {', '.join(missing)}")
        if further := sorted(value.keys() - fields.keys()):
            raise ValueError(f"{_name(kind)} has no {', '.join(further)}")
        return kind(**{name: fields[name].make(each) for name, each in value.items()})

    schema = {
        "type": "object",
        "properties": {name: field.schema for name, field in fields.items()},
        "required": required,
        "additionalProperties": False,
    }
    return Shape(schema, make)


def _checked(value: Any, kind: Any, *, fits: bool) -> Any:
    if not fits:
        name = kind if isinstance(kind, str) else _name(kind)
        raise ValueError(f"{json.dumps(value)[:80]} is no {name}")
    return value
