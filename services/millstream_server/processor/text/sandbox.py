"""The environment of chat templates: Jinja's immutable sandbox, with what models' templates expect.

It does what transformers' own does, which docs call the reference (`apply_chat_template`); a test
compares them. But no operation, filter or method makes a text or a list of more than
`MAX_VALUE_CHARS`: ten characters of a template could take all memory, when they are compiled too,
since Jinja computes constants then. How long a template's loops run isn't bounded.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes, pass_eval_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import do_join
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter

MAX_SOURCE_CHARS = 256 << 10
"""Ten times the longest templates of known models. So many take 3 s to compile."""
MAX_VALUE_CHARS = 16 << 20
"""Of a text or a list that a template makes: four times the longest prompt."""
_PART_CHARS = 16
"""What a part of a list counts that is no text: so many parts take a second."""
_MAX_INT_BITS = 1 << 16
_MAX_JSON_INDENT = 64
_WIDE = "the template formats a value with a width that is too large"
_WIDTH = re.compile(r"\d{6}")
_PRINTF_WIDTH = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(?:\d*\.)?(?:\*|\d{6})")
"""A width of six digits or more, or one that is computed."""


def compile_template(source: str) -> jinja2.Template:
    """Compile a chat template of at most `MAX_SOURCE_CHARS`.

    Raises:
        TemplateError: it is longer, or not valid Jinja.
    """
    if len(source) > MAX_SOURCE_CHARS:
        raise TemplateError(f"it has {len(source)} characters; {MAX_SOURCE_CHARS} can be used")
    try:
        return _ENVIRONMENT.from_string(source)
    except (ValueError, SyntaxError, OverflowError, RecursionError, MemoryError) as error:
        # Python's own compiler refuses what is nested too deeply.
        raise TemplateError(f"it can't be compiled: {type(error).__name__}") from error


def variables_of(source: str) -> frozenset[str]:
    """Return the names that a template which compiles reads without having set them before."""
    return frozenset(meta.find_undeclared_variables(_ENVIRONMENT.parse(source)))


# ---- what makes large values ---------------------------------------------------------------------


def _check(size: int) -> None:
    if size > MAX_VALUE_CHARS:
        raise SecurityError("the template makes a text or a list that is too large")


_OF_DICTS = frozenset(dir(dict))


def _checked_text(value: Any) -> Any:
    """Return what is about to become a text; a list may hold the same text a million times."""
    if value.__class__ is not str and not isinstance(value, str | int):
        size, parts = 0, [value]
        while parts:
            part = parts.pop()
            size += _length(part) or _PART_CHARS
            if isinstance(part, Mapping):
                parts += (*part.keys(), *part.values())
            elif isinstance(part, list | tuple | set):
                parts += part
            _check(size)
    return value


def _concat(texts: Iterable[str]) -> str:
    kept, size = [], 0
    for text in texts:
        size += len(text)
        _check(size)
        kept.append(text)
    return "".join(kept)


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
    elif isinstance(left, int) and isinstance(right, Sized):
        _check(left * len(right))
    elif isinstance(right, int) and isinstance(left, Sized):
        _check(right * len(left))


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * right)


def _check_bits(bits: int) -> None:
    if bits > _MAX_INT_BITS:
        raise SecurityError("the template makes a number that is too large")


def _check_printf(text: Any, values: Any) -> None:
    if isinstance(text, str):
        if _PRINTF_WIDTH.search(text):
            raise SecurityError(_WIDE)
        each = values if isinstance(values, tuple) else (values,)
        each = (*each, *values.values()) if isinstance(values, Mapping) else each
        _check(len(text) + text.count("%") * max(map(_length, map(_checked_text, each)), default=0))


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str) else 0


_OPERATORS: Mapping[str, Callable[[Any, Any], None]] = {
    "*": _check_product,
    "**": _check_power,
    "%": _check_printf,
}


def _check_number(_text: Any, number: Any = 0, *_: Any, **named: Any) -> None:
    for value in (number, *named.values()):
        if isinstance(value, int):
            _check(value)


def _check_tabs(text: str, tabsize: int = 8) -> None:
    _check(len(text) + text.count("\t") * tabsize)


def _check_replace(text: Any, old: Any, new: Any, *_: Any, **__: Any) -> None:
    text, old, new = (str(_checked_text(value)) for value in (text, old, new))
    _check(len(text) + text.count(old) * len(new))


def _check_indent(text: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    text = str(_checked_text(text))
    each = width if isinstance(width, int) else _length(width)
    _check(len(text) + (1 + len(text.splitlines())) * each)


def _check_wrap(text: Any, *options: Any, **named: Any) -> None:
    breaks = max(map(_length, (*options, *named.values())), default=0)
    _check(len(str(_checked_text(text))) * (1 + breaks))


def _check_format(text: Any, *args: Any, **named: Any) -> None:
    _check_printf(str(_checked_text(text)), named or args)


def _check_joined(separator: str, texts: Sequence[Any]) -> None:
    _check(len(separator) * len(texts))
    _checked_text(texts)


_METHODS: Mapping[str, Callable[..., None]] = {
    "center": _check_number,
    "expandtabs": _check_tabs,
    "ljust": _check_number,
    "replace": _check_replace,
    "rjust": _check_number,
    "zfill": _check_number,
}
_FORBIDDEN = frozenset({"encode", "to_bytes", "translate"})
"""Methods that chat templates have no use for, and that make large values, too."""
_FILTERS: Mapping[str, Callable[..., None]] = {
    "batch": _check_number,
    "center": _check_number,
    "format": _check_format,
    "indent": _check_indent,
    "pprint": _checked_text,
    "replace": _check_replace,
    "slice": _check_number,
    "string": _checked_text,
    "wordwrap": _check_wrap,
}


class _CodeGenerator(CodeGenerator):
    """Lets ``a ~ b`` be checked, as the sandbox lets other operators."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - the library's
        self.write("environment.join_texts((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Formatter(SandboxedFormatter):
    """Does what `str.format` does, for one text."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self._size = 0

    def format_field(self, value: Any, format_spec: str) -> str:
        if _WIDTH.search(format_spec):
            raise SecurityError(_WIDE)
        text: str = super().format_field(_checked_text(value), format_spec)
        self._size += len(text)
        _check(self._size)
        return text


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox, with a bound on what each operation makes."""

    intercepted_binops = frozenset({"+", *_OPERATORS})
    code_generator_class = _CodeGenerator
    concat = staticmethod(_concat)  # of macros and `{% set %}` blocks

    @staticmethod
    def join_texts(values: Iterable[Any]) -> str:
        """Compute ``a ~ b``."""
        return _concat(str(_checked_text(value)) for value in values)

    def getattr(self, obj: Any, attribute: str) -> Any:
        if obj.__class__ is dict and attribute not in _OF_DICTS and attribute in obj:
            return obj[attribute]  # else the library first fails to find it as an attribute
        return super().getattr(obj, attribute)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":  # templates make their texts with it
            made = left + right
            if (made.__class__ is str or isinstance(made, Sized)) and len(made) > MAX_VALUE_CHARS:
                _check(len(made))
            return made
        _OPERATORS[operator](left, right)
        return self.binop_table[operator](left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        text = getattr(obj, "__self__", None)
        if isinstance(text, str):
            name = obj.__name__
            if name == "join" and args:
                args = (list(args[0]),)
                _check_joined(text, *args)
            elif name in _METHODS:
                _METHODS[name](text, *args, **kwargs)
        return super().call(context, obj, *args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _FORBIDDEN and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        text = value.__self__

        def format_(*args: Any, **kwargs: Any) -> str:
            return _Formatter(self).vformat(text, args, kwargs)

        def format_map(names: Mapping[str, Any]) -> str:
            return _Formatter(self).vformat(text, (), names)

        return format_map if value.__name__ == "format_map" else format_


def _checked_filter(made: Callable[..., Any], check: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that is checked first. Jinja may give it its environment before the value."""

    @functools.wraps(made)
    def filtered(*args: Any, **kwargs: Any) -> Any:
        check(*args[hasattr(made, "jinja_pass_arg") :], **kwargs)
        return made(*args, **kwargs)

    return filtered


@pass_eval_context
def _join(
    eval_ctx: nodes.EvalContext,
    value: Iterable[Any],
    d: str = "",
    attribute: str | int | None = None,
) -> str:
    found = list(value)
    _check_joined(str(d), found)
    joined: str = do_join(eval_ctx, found, d, attribute)
    return joined


class _Generation(Extension):
    """``{% generation %}`` marks an assistant's text for training; here it has no effect."""

    tags = {"generation"}  # noqa: RUF012 - as the library declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - templates may pass it by position
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """Write JSON; other than Jinja's own filter without escapes for HTML."""
    if (indent if isinstance(indent, int) else len(indent or "")) > _MAX_JSON_INDENT:
        raise SecurityError("the template indents JSON too far")
    return json.dumps(
        _checked_text(value),
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005 - the reference's: local time


_ENVIRONMENT = _Sandbox(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[_Generation, LoopControlExtension],
    finalize=_checked_text,
)
_ENVIRONMENT.filters |= {
    name: _checked_filter(_ENVIRONMENT.filters[name], check) for name, check in _FILTERS.items()
}
_ENVIRONMENT.filters["join"] = _join
_ENVIRONMENT.filters["tojson"] = _to_json
_ENVIRONMENT.globals["raise_exception"] = _raise_exception
_ENVIRONMENT.globals["strftime_now"] = _strftime_now
del _ENVIRONMENT.globals["lipsum"]
