"""The readers of what answers have to be: schemas, grammars; with their inputs and bounds."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from millstream_server.formats.argument_schema import UnconstrainableError
from millstream_server.formats.families import FORMATS
from millstream_server.formats.format import Format
from millstream_server.formats.parser import Parser
from millstream_server.formats.schema import Tools
from millstream_server.formats.tag_parts import ANSWER_SPACE, json_value
from millstream_server.formats.tags import Thinking
from millstream_server.generation.grammar_shapes import shape_problem
from millstream_server.generation.sampling import Constraint, ConstraintKind
from millstream_server.generation.validation import check_constraint
from millstream_server.processor.answer_grammar import Binding, _tag
from millstream_server.processor.http.responses import schema as responses_schema
from millstream_server.processor.http.responses import tools as responses_tools
from millstream_server.processor.text.messages import Tool, check_tools
from millstream_server.runtime.errors import ServingError
from tests.benchmarks.fuzzing.answers import named, refusing
from tests.benchmarks.fuzzing.costs import Bound, Reader
from tests.benchmarks.fuzzing.trees import Grammar
from tests.support.writing import WRITERS

# ---- schemas -------------------------------------------------------------------------------------

_NODES = {
    "node": [
        "⟨reference⟩",
        "⟨reference⟩",
        "⟨reference⟩",
        '{"type":"string"}',
        "{}",
        "true",
        '{"anyOf":[⟨node*,⟩]}',
        '{"oneOf":[⟨node*,⟩]}',
        '{"allOf":[⟨node*,⟩]}',
        '{"allOf":[⟨node⟩]}',
        '{"anyOf":[⟨node⟩]}',
        '{"items":⟨node⟩}',
        '{"type":"array","items":⟨node⟩}',
        '{"prefixItems":[⟨node*,⟩]}',
        '{"type":"object","properties":{"a":⟨node⟩}}',
        '{"type":"object","properties":{⟨property*,⟩}}',
        '{"properties":{⟨property*,⟩},"required":[⟨name*,⟩]}',
        '{"additionalProperties":⟨node⟩}',
        '{"enum":[⟨value*,⟩]}',
        '{"const":⟨value⟩}',
        '{"type":[⟨type*,⟩]}',
        '{"type":"string","pattern":"⟨pattern*⟩"}',
        '{"type":"string","minLength":①,"maxLength":99999}',
        '{"type":"integer","minimum":0,"maximum":⟨digits⟩}',
        '{"type":"array","items":⟨node⟩,"minItems":9,"maxItems":⟨digits⟩}',
        '{"description":"⟨letter*⟩","nullable":true}',
    ],
    "reference": [
        '{"$ref":"#/$defs/x0"}',
        '{"$ref":"#/$defs/x②"}',
        '{"$ref":"#/$defs/x①"}',
        '{"$ref":"#"}',
        '{"$ref":"#⟨step*⟩"}',
    ],
    "property": ['"a①":⟨node⟩', '"⟨letter*⟩":⟨node⟩', '"a":⟨node⟩'],
    "definition": ['"x①":⟨node⟩', '"x①":{"anyOf":[⟨node*,⟩]}', '"x①":{"anyOf":[⟨reference*,⟩]}'],
    "name": ['"a①"', '"⟨letter*⟩"'],
    "type": ['"string"', '"object"', '"number"', '"①"', "1"],
    "value": ['"a"', "①", "1", "null", '"⟨letter*⟩"', "[⟨value*,⟩]", '{"a":⟨value⟩}', '"a①"'],
    "step": ["/$defs", "/x0", "/a", "/~1", "/"],
    "letter": ["a", "é", "①", "𝄞", "\\u0000", " "],
    "digits": ["1", "99999", "1000000000000"],
    "pattern": ["a", "[a-z]", "(a|b)*", "\\\\d{3}", "(?:x+)+", "(", '[^\\"]', "{1,999}", ".", "|"],
}
_WHOLE_SCHEMAS = (
    '{"type":"object","properties":{"a":⟨node⟩},"$defs":{⟨definition*,⟩,"x◎":{}}}',
    '{"type":"object","properties":{⟨property*,⟩},"$defs":{⟨definition*,⟩}}',
    '{"type":"object","properties":{⟨property*,⟩},"required":[⟨name*,⟩]}',
    "⟨node⟩",
)
_TYPED = ("qwen-xml", "glm-kv", "minimax-m3", "kimi-k3", "cohere-tags", "gemma4")
"""Formats whose calls are read by their tools' types."""
_CONSTRAINED = (
    "qwen-xml",
    "glm-kv",
    "pythonic",
    "hermes",
    "minimax-m3",
    "gemma4",
    "harmony",
    "deepseek-v4",
)
_ARGUMENTS = {"a": "1", "a0": {"a": [1, "b"]}, "b": [1, 2]}


def _checked(source: str) -> Tool:
    tool = Tool("f", "", source, strict=True)
    if any(check_tools((tool,), "tools")):
        raise UnconstrainableError("refused")
    return tool


def _tool_schema(data: bytes) -> None:
    """Read a call of a tool with a schema, in a format that looks at it."""
    form, source = named(data)
    _checked(source)
    parser = Parser(form, Tools({"f": source}))
    parser.feed(WRITERS[form.name].write("", "", [("f", _ARGUMENTS)]))
    parser.finish()


def _strict_tool(data: bytes) -> None:
    """Make the grammars of calls of a tool with a schema: strict, and of a required call."""
    form, source = named(data)
    tool = _checked(source)
    for must_call in (False, True):
        with contextlib.suppress(ServingError):
            shape_problem(_tag(_binding(form, (tool,), None, must_call=must_call)))


def _schemas(formats: Sequence[str]) -> Grammar:
    return Grammar(
        {"whole": [f"{name}\n⟨schema⟩" for name in formats], "schema": _WHOLE_SCHEMAS, **_NODES}
    )


def _binding(
    form: Format, tools: tuple[Tool, ...], text: Constraint | None, *, must_call: bool = False
) -> Binding:
    return Binding(
        form=form,
        begins=Thinking.NONE,
        tools=tools,
        must_call=must_call,
        only="",
        one_call=False,
        reasoning_tokens=None if text is None else 16,
        text=text,
        text_field="sampling.constraint",
    )


def _constraint(data: bytes) -> None:
    """Check a grammar of an answer, and make its structural tag; the first line is its kind."""
    kind, _, source = data.decode("utf-8", "replace").partition("\n")
    constraint = Constraint(ConstraintKind(kind), source)
    if check_constraint(constraint, "") or constraint.kind is ConstraintKind.STRUCTURAL_TAG:
        return
    _tag(_binding(FORMATS["hermes"], (), constraint))


_CONSTRAINTS = Grammar(
    {
        "whole": [
            *(f"json_schema\n{each}" for each in _WHOLE_SCHEMAS),
            "regex\n⟨regex*⟩",
            "ebnf\nroot ::= ⟨rule*⟩\n⟨line*⟩",
            'structural_tag\n{"type":"structural_tag","format":⟨tag⟩}',
        ],
        "regex": [
            "a",
            "(",
            ")",
            "(⟨regex⟩)",
            "[",
            "]",
            "\\",
            "|",
            "*",
            "{1,9}",
            "\\(",
            "[(]",
            "é",
            "(?:",
        ],
        "rule": ['"a"', "r① ", "(⟨rule⟩)", "[^\\]", "# x\n", "| ", '"', "(", "* "],
        "line": ["r① ::= r② r②\n", 'r① ::= "a" | r0\n', "r① ::= ⟨rule*⟩\n"],
        "tag": [
            '{"type":"any_text"}',
            '{"type":"const_string","value":"⟨letter*⟩"}',
            '{"type":"sequence","elements":[⟨tag*,⟩]}',
            '{"type":"optional","content":⟨tag⟩}',
            '{"type":"or","elements":[⟨tag*,⟩]}',
            '{"type":"json_schema","json_schema":⟨node⟩}',
            '{"type":"regex","pattern":"⟨pattern*⟩"}',
            '{"type":"triggered_tags","tags":[⟨tag*,⟩]}',
            '{"type":"dispatch","rules":[["a",⟨tag⟩]]}',
        ],
        **_NODES,
    }
)


# ---- grammars of custom tools --------------------------------------------------------------------


def _custom_tool(syntax: Any, definition: str) -> None:
    form = responses_schema.InputFormat("grammar", syntax, definition)
    responses_tools.Tools([responses_schema.Tool("custom", "t", format=form)])


def _regex(data: bytes) -> None:
    source = data.decode("utf-8", "replace")
    json_value({"pattern": source}, ANSWER_SPACE)
    _custom_tool("regex", source)


_LARK_INPUTS = Grammar(
    {
        "grammar": ["start: a0\n⟨rule*⟩a◎: ⟨end⟩\n", "start: ⟨part*⟩\n⟨rule*⟩a◎: ⟨end⟩\n⟨line*⟩"],
        "rule": ["a①: ⟨part*⟩\n", "a①: a② a②\n", "a①: a②\n", "a①: a② | ⟨part*|⟩\n"],
        "line": [
            "A①: /⟨regex*⟩/\n",
            "%import common.WORD\n",
            "%ignore WS\n",
            "// ⟨letter*⟩\n",
            '| "a"\n',
            'B①.2: "x"\n',
        ],
        "end": ['""', '"x"', "/a*/", '"a".."z"', ""],
        "part": [
            " a②",
            ' "a"',
            ' ""',
            " (⟨part*⟩)",
            " (⟨part⟩)",
            " [⟨part*⟩]",
            " ⟨part⟩*",
            " ⟨part⟩~9",
            " /⟨regex*⟩/",
            " |",
            ' "⟨letter*⟩"i',
            " A0",
            " a0",
        ],
        "regex": ["a", "[a-z]", "(a|b)", "(⟨regex⟩)", "{1,9}", "*", "\\w", "é", "."],
        "letter": ["a", "é", "\\n", "①"],
    }
)
_REGEX = Grammar(
    {
        "whole": ["⟨regex*⟩"],
        "regex": [
            "a",
            "é",
            "𝄞",
            ".",
            "[a-z]",
            "[^⟨char*⟩]",
            "[⟨char*⟩]",
            "(⟨regex⟩)",
            "(?:⟨regex*⟩)",
            "(⟨regex*|⟩)",
            "⟨regex⟩{9}",
            "⟨regex⟩*",
            "{0,99}",
            "\\w",
            "\\b",
            "\\x41",
            "\\",
            "|",
            "(?=a)",
            "^",
        ],
        "char": ["a", "①", "\\w", "\\d", "é", "a-z", "\\", "-", "]", "[", "^"],
    }
)

_MADE = 16 << 20
"""A grammar has 16,384 parts at most, whatever it is made of: that is the bound, not the input."""
_SHAPES = Bound(calls=150, us=40, memory=400, base_s=0.1, base_calls=400_000, base_memory=_MADE)
"""Their inputs have 64 KiB at most."""
_LARK = Bound(calls=130, us=20, memory=400, base_s=0.5, base_calls=1_000_000, base_memory=_MADE)
"""A grammar of a hundred bytes may stand for a pattern of 32,768 characters, 4 us each."""
CONSTRAINT_READERS: tuple[Reader, ...] = (
    Reader(
        name="tool-schema",
        of="formats/schema.py",
        make=refusing(_tool_schema),
        grammar=_schemas(_TYPED),
        bound=_SHAPES,
        sizes=(256, 4 << 10, 32 << 10),
    ),
    Reader(
        name="strict-tool",
        of="answer_grammar.py, formats/argument_schema.py",
        make=refusing(_strict_tool),
        grammar=_schemas(_CONSTRAINED),
        bound=_SHAPES,
        sizes=(256, 4 << 10, 32 << 10),
    ),
    Reader(
        name="constraint",
        of="generation/grammar_shapes.py, answer_grammar.py",
        make=refusing(_constraint),
        grammar=_CONSTRAINTS,
        bound=_SHAPES,
    ),
    Reader(
        name="lark",
        of="formats/regular",
        make=refusing(lambda data: _custom_tool("lark", data.decode("utf-8", "replace"))),
        grammar=_LARK_INPUTS,
        bound=_LARK,
        sizes=(256, 4 << 10, 16 << 10),
    ),
    Reader(
        name="regex",
        of="formats/regular",
        make=refusing(_regex),
        grammar=_REGEX,
        bound=_SHAPES,
        sizes=(256, 4 << 10, 16 << 10),
    ),
)
