"""Which format a model has: what is set goes before what is told, and that before what is seen."""

from __future__ import annotations

import pytest

from millstream_server.formats.choosing import _PARSERS, _SIGNS, choose
from millstream_server.formats.families import FORMATS

THINKS = '{"start_anchor": "<a>", "fields": {"thinking": {"open": "<think>", "close": "</think>"}}}'
UNMAPPED = '{"start_anchor": "<a>", "fields": {"title": {}}}'


def chosen(
    given: str = "",
    calls: str = "",
    *,
    reasoning: str = "",
    template: str = "",
    tokens: str = "",
    response: str = "",
    encoded: str = "",
) -> str:
    found = choose(
        given=given,
        response_template=response,
        encoded=encoded,
        told_calls=calls,
        told_reasoning=reasoning,
        template=template,
        has_token=tokens.split().__contains__,
        special_tokens=(),
    )
    return found.form.name if found else ""


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"given": "seed", "calls": "qwen3_coder"}, "seed"),
        ({"calls": "qwen3_coder", "template": "<|tool_calls_section_begin|>"}, "qwen-xml"),
        ({"given": "seed", "response": THINKS}, "seed"),
        ({"calls": "qwen3_coder", "response": THINKS}, "response_template"),
        ({"calls": "qwen3_coder", "response": UNMAPPED}, "qwen-xml"),
        ({"response": UNMAPPED}, ""),
        ({"encoded": "mistral", "calls": "mistral", "template": "[TOOL_CALLS] [ARGS]"}, "mistral"),
        ({"encoded": "mistral", "response": THINKS}, "response_template"),
        ({"calls": "deepseek_v31"}, "deepseek-v3.1"),
        ({"calls": "minimax-m2"}, "minimax-m2"),
        ({"calls": "mistral"}, "mistral"),
        ({"calls": "mistral", "tokens": "[TOOL_CALLS] [ARGS]"}, "mistral-v11"),
        ({"calls": "unheard-of", "template": "<tool_call>"}, "hermes"),
        ({"reasoning": "gpt-oss"}, "harmony"),
        ({"reasoning": "deepseek-r1"}, "think"),
        ({"reasoning": "qwen3", "template": "<think> <tool_call>"}, "hermes"),
        ({"template": "<tool_call> <function="}, "qwen-xml"),
        ({"template": "<tool_call> <arg_key>"}, "glm-kv"),
        ({"template": "<｜DSML｜ calls"}, "deepseek-v4.1"),
        ({"template": "{{ '<｜DSML｜' }}function_calls"}, "deepseek-v3.2"),
        ({"tokens": "<think> </think>"}, "think"),
        ({"template": "{{ messages }}"}, ""),
    ],
)
def test_the_first_that_tells_it_counts(given: dict[str, str], expected: str) -> None:
    assert chosen(**given) == expected


def test_all_names_are_formats() -> None:
    assert {name for name, _ in _SIGNS} <= set(FORMATS)
    assert set(_PARSERS.values()) <= set(FORMATS)


def test_the_reason_says_why_a_response_template_is_not_used() -> None:
    found = choose(
        given="",
        response_template=UNMAPPED,
        told_calls="hermes",
        told_reasoning="",
        template="",
        has_token=str,  # type: ignore[arg-type]  # never called
        special_tokens=(),
    )
    assert found is not None
    assert found.reason == (
        "the worker's parser is hermes; its response_template isn't used, since it has the field "
        "'title'"
    )
