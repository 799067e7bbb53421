"""What a caller writes is read in steps that are in proportion to it."""

from __future__ import annotations

import json
import re
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from millstream_server.formats.calls import Calls as CallsSoFar
from millstream_server.formats.families import FORMATS
from millstream_server.formats.format import routes_of
from millstream_server.formats.schema import Tools
from millstream_server.formats.tags import (
    Tool,
    UnconstrainableError,
    Wanted,
    structural_tag,
)
from millstream_server.generation.grammar_shapes import shape_problem
from millstream_server.generation.sampling import Constraint, ConstraintKind
from millstream_server.processor.text.messages import Tool as ToldTool
from millstream_server.processor.text.messages import check_tools
from tests.support.answers import parser
from tests.support.steps import reach, steps

GOLDENS: list[dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("goldens.yaml").read_text("utf-8")
)
Schema = dict[str, Any]
TIMES = 40
REF: Schema = {"$ref": "#/$defs/x"}


def told(property_: Any, **defs: Any) -> Schema:
    """Return the schema of a tool's arguments, with one property, ``a``."""
    return {
        "type": "object",
        "properties": {"a": property_},
        "required": ["a"],
        "additionalProperties": False,
        "$defs": defs,
    }


def ladder(key: str) -> dict[str, Any]:
    """Return definitions, each of which has the next one several times."""
    each = {f"x{at}": {key: [{"$ref": f"#/$defs/x{at + 1}"}] * 3} for at in range(TIMES)}
    return each | {f"x{TIMES}": {"type": "string"}, "x": {"$ref": "#/$defs/x0"}}


def nested(key: str) -> Any:
    part: Any = {"type": "string"}
    for _ in range(28):
        part = {key: [part] if key.endswith("Of") else part}
    return part


SCHEMAS: dict[str, Schema] = {
    **{f"self in {key}": told(REF, x={key: [REF] * 4}) for key in ("anyOf", "oneOf", "allOf")},
    **{f"ladder of {key}": told(REF, **ladder(key)) for key in ("anyOf", "oneOf", "allOf")},
    **{f"deep {key}": told(nested(key)) for key in ("anyOf", "allOf", "items", "not")},
    "the whole in itself": {**told({"$ref": "#"}), "anyOf": [{"$ref": "#"}] * 4},
    "self in all": told(REF, x={"anyOf": [REF] * 2, "oneOf": [REF] * 2, "allOf": [REF] * 2}),
    "self in properties": told(REF, x={"type": "object", "properties": {"a": REF, "b": REF}}),
    "self in items": told(REF, x={"type": "array", "items": {"anyOf": [REF, REF]}}),
    "a circle": told(REF, x={"$ref": "#/$defs/y"}, y=REF),
    "self in one": told(REF, x={"allOf": [REF]}),
    "many of one": told({"anyOf": [REF] * 900}, x={"anyOf": [{"type": "string"}] * 900}),
    "many of one enum": told({"anyOf": [REF] * 900}, x={"enum": list(range(900))}),
    "many with all definitions": {
        **told(REF, x={"type": "object", "properties": {"a": {"enum": list(range(900))}}}),
        "properties": {f"a{at}": {"type": "array", "items": REF} for at in range(400)},
    },
    "many optional": {
        "type": "object",
        "properties": {f"a{at}": {} for at in range(1000)},
        "additionalProperties": False,
    },
    "many required": {
        "type": "object",
        "properties": {f"a{at}": {"type": "string"} for at in range(500)},
        "required": [f"a{at}" for at in range(5000)],
        "additionalProperties": False,
    },
    "long references": told({"anyOf": [REF] * 900}, x={"$ref": "#" + "/x" * 20_000}),
}


@pytest.fixture(params=list(SCHEMAS.values()), ids=list(SCHEMAS))
def schema(request: pytest.FixtureRequest) -> Schema:
    found: Schema = request.param
    return found


def test_the_types_of_arguments_are_found_in_steps_per_byte(schema: Schema) -> None:
    text = json.dumps(schema)
    found = Tools({"f": text}).schema("f")

    def ask() -> None:
        for name in (*schema["properties"], *map(str, range(100))):
            assert found.of(name).types
            assert found.of(name).items.of("a").types

    assert steps(ask, 20_000 + 20 * len(text)) > 0
    again = steps(ask, 20_000 + 20 * len(text))
    assert again <= 80 * (len(schema["properties"]) + 100), "what was found is kept"


STYLES = ["hermes", "qwen-xml", "glm-kv", "minimax-m3", "cohere-tags", "kimi-k3", "pythonic"]


@pytest.mark.parametrize("name", [*STYLES, "functiongemma", "gemma4", "deepseek-v3.2"])
@pytest.mark.parametrize("strict", [True, False])
def test_the_grammar_of_arguments_is_made_in_few_steps(
    name: str, schema: Schema, *, strict: bool
) -> None:
    wanted = Wanted(tools=(Tool("f", schema, strict=strict),), must_call=not strict)

    def make() -> None:
        try:
            assert structural_tag(FORMATS[name], wanted)
        except UnconstrainableError:
            assert strict

    steps(make, 200_000 + 40 * len(json.dumps(schema)))


def test_many_tools_are_given_up_together() -> None:
    schema = told({"type": "string"}) | {"required": []}
    schema["properties"] = {f"a{at}": {"type": "string"} for at in range(400)}
    tools = tuple(Tool(f"f{at}", schema, strict=True) for at in range(50))
    asked = 0

    def between() -> None:
        nonlocal asked
        asked += 1

    with pytest.raises(UnconstrainableError, match=r"f4: the grammar .* more than 16384 parts"):
        structural_tag(FORMATS["glm-kv"], Wanted(tools=tools), between)
    assert asked == len(("f0", "f1", "f2", "f3", "f4")), "it can be given up before each tool"


CHECKS: list[Callable[[str], object]] = [
    lambda text: list(check_tools((ToldTool("f", "", text),), "tools")),
    lambda text: shape_problem(Constraint(ConstraintKind.JSON_SCHEMA, text)),
]


@pytest.mark.parametrize("check", CHECKS, ids=["tool", "constraint"])
def test_schemas_are_checked_in_steps_per_byte(
    schema: Schema, check: Callable[[str], object]
) -> None:
    text = json.dumps(schema)
    steps(lambda: check(text), 1000 + 40 * len(text))


# ---- answers


def markers(name: str) -> list[str]:
    """Return a format's markers, and what the goldens have of its calls' insides."""
    form = FORMATS[name]
    found = list(routes_of(form).actions)
    for each in GOLDENS:
        if each["format"] == name:
            found += re.findall(r"<[^<>]*>|\[[^\[\]]*\]|\"[^\"]*\"|[{}\[(]", each["answer"])
    return [*dict.fromkeys(found), "".join(form.call_open) + "a", "\n", " ", "<"]


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_markers_again_and_again_are_read_in_steps_per_byte(name: str) -> None:
    opener = FORMATS[name].call_open[:1]
    for marker in markers(name):
        for before in ("", *[f"{each}f" for each in opener]):
            counts = []
            for chars in (8192, 32_768):
                text = before + marker * (chars // len(marker))
                counts.append(reach(partial(parser(FORMATS[name]).feed, text)))
            assert counts[1] <= 4.5 * counts[0], (before, marker)
            assert counts[1] <= 4000 * 32_768, (before, marker)


def test_what_a_call_has_is_checked_without_making_it() -> None:
    """At a call's end its JSON is read over, on the event loop: 1.5 ns a byte, not 20."""
    calls = CallsSoFar(lambda name, number: f"{name}{number}")
    calls.start_call("f", "")
    calls.arguments(json.dumps({"a": list(range(100_000)), "b": [{"c": "d"}] * 10_000}))
    size = len(calls.made[0].arguments_json)
    tracemalloc.start()
    try:
        calls.end_call()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert not calls.made[0].incomplete
    assert peak < 2 * size


@pytest.mark.parametrize(
    ("value", "incomplete"),
    [
        ('"\\ud800"', False),
        ('"\\ud800' + "x" * 65536 + '"', True),
        ("01", True),
        ("[" * 5000 + "]" * 5000, True),
    ],
)
def test_what_few_readers_take_is_looked_for_in_short_calls(
    value: str, *, incomplete: bool
) -> None:
    calls = CallsSoFar(lambda name, number: f"{name}{number}")
    calls.start_call("f", "")
    calls.arguments(f'{{"a": {value}}}')
    calls.end_call()
    assert calls.made[0].incomplete is incomplete
