"""Kimi's two ways. The id of a K2 call is the model's own, and goes back to it with the result.

K2:  <|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0
     <|tool_call_argument_begin|>{"city": "Oslo"}<|tool_call_end|><|tool_calls_section_end|>
K3:  <|open|>tools<|sep|><|open|>call tool="weather" index="0"<|sep|>
     <|open|>argument key="city" type="string"<|sep|>Oslo<|close|>argument<|sep|>
     <|close|>call<|sep|><|close|>tools<|sep|>
"""

from millstream_server.formats.families.think import THINK
from millstream_server.formats.format import Format, Span
from millstream_server.formats.key_values import KeyValues
from millstream_server.formats.tagged import Json, Tagged
from millstream_server.formats.written import NAME, NUMBER, Written

_JSON_TYPES = ("number", "integer", "boolean", "object", "array", "null")


def _id(name: str, index: int) -> str:
    return f"functions.{name}:{index}"


K2 = Format(
    name="kimi-k2",
    models="Kimi K2, K2 Thinking, K2.5",
    reasoning=THINK,
    section=Span("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    call_open=("<|tool_call_begin|>",),
    call=Tagged(
        header_end=("<|tool_call_argument_begin|>",),
        header=r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s:<>|\"]+)(?::[0-9]+)?)\s*",
        arguments=Json(),
    ),
    call_drop=("<|tool_call_end|>", "<|tool_call_argument_begin|>"),
    new_id=_id,
    written=Written(
        call=(
            "<|tool_call_begin|>functions.",
            NAME,
            ":",
            NUMBER,
            "<|tool_call_argument_begin|>",
        ),
        call_end="<|tool_call_end|>",
        begin="<|tool_calls_section_begin|>",
        end="<|tool_calls_section_end|>",
    ),
)

K3 = Format(
    name="kimi-k3",
    models="Kimi K3",
    reasoning=(Span("<|open|>think<|sep|>", "<|close|>think<|sep|>"),),
    section=Span("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
    call_open=("<|open|>call",),
    call=Tagged(
        header_end=("<|sep|>",),
        header=r'\s*tool="(?P<name>[^"<>]+)"[^<]*',
        arguments=KeyValues(
            key='<|open|>argument key="',
            key_end=(
                '" type="string"<|sep|>',
                *[f'" type="{each}"<|sep|>' for each in _JSON_TYPES],
            ),
            types=("string", *["json"] * len(_JSON_TYPES)),
            value_end=("<|close|>argument<|sep|>",),
            end=("<|close|>call<|sep|>",),
            early_end=("<|close|>tools<|sep|>",),
        ),
    ),
    text_open=("<|open|>response<|sep|>",),
    drop=(
        "<|close|>response<|sep|>",
        "<|close|>message<|sep|>",
        "<|open|>",
        "<|close|>",
        "<|sep|>",
    ),
    written=Written(
        call=('<|open|>call tool="', NAME, '" index="', NUMBER, '"<|sep|>'),
        call_end="<|close|>call<|sep|>",
        begin="<|open|>tools<|sep|>",
        end="<|close|>tools<|sep|>",
        answer_open="<|open|>response<|sep|>",
        answer_close="<|close|>response<|sep|>",
        answer_first=True,
        after="<|close|>message<|sep|>",
        after_reasoning="",
    ),
)
