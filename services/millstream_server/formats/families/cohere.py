"""Cohere's two ways: a JSON array of calls with keys of their own, and tags.

Command A, 4:  <|START_THINKING|>I need the weather.<|END_THINKING|><|START_ACTION|>
               [{"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Oslo"}}]
               <|END_ACTION|>
tags:          <cofl:tool_calls><cofl:tool_call id="0" name="weather">
               <cofl:value name="city" type="raw">Oslo</cofl:value>
               </cofl:tool_call></cofl:tool_calls>
"""

from millstream_server.formats.elements import Elements
from millstream_server.formats.envelope import Envelope
from millstream_server.formats.format import Format, Span
from millstream_server.formats.tagged import Tagged
from millstream_server.formats.written import NAME, NUMBER, Written

_REASONING = (Span("<|START_THINKING|>", "<|END_THINKING|>"),)
_TEXT_OPEN = ("<|START_RESPONSE|>", "<|START_TEXT|>")
_TEXT_END = ("<|END_RESPONSE|>", "<|END_TEXT|>")

FORMAT = Format(
    name="cohere",
    models="Command A, Command 4",
    reasoning=_REASONING,
    call_open=("<|START_ACTION|>",),
    call=Envelope(
        name=("tool_name", "name"), arguments=("parameters", "arguments"), id=("tool_call_id",)
    ),
    text_open=_TEXT_OPEN,
    call_drop=("<|END_ACTION|>",),
    drop=_TEXT_END,
    written=Written(
        call=('\n    {"tool_call_id": "', NUMBER, '", "tool_name": "', NAME, '", "parameters": '),
        call_end="}",
        between=",",
        begin="<|START_ACTION|>[",
        end="\n]<|END_ACTION|>",
        answer_open="<|START_RESPONSE|>",
        answer_close="<|END_RESPONSE|>",
        apart=True,
        after_reasoning="",
    ),
)

TAGS = Format(
    name="cohere-tags",
    models="Command 4 and 5, where they write `<cofl:value>`",
    reasoning=_REASONING,
    section=Span("<cofl:tool_calls>", "</cofl:tool_calls>"),
    call_open=("<cofl:tool_call ",),
    call=Tagged(
        header_end=('">',),
        header=r'\s*(?:id="(?P<id>[^"<>]*)"\s*)?name="(?P<name>[^"<>]+)',
        arguments=Elements(open="<cofl:value", close="</cofl:value>", end="</cofl:tool_call>"),
    ),
    text_open=_TEXT_OPEN,
    drop=_TEXT_END,
    written=Written(
        call=('<cofl:tool_call id="', NUMBER, '" name="', NAME, '">'),
        call_end="</cofl:tool_call>",
        begin="<cofl:tool_calls>",
        end="</cofl:tool_calls>",
        answer_open="<|START_RESPONSE|>",
        answer_close="<|END_RESPONSE|>",
        apart=True,
        after_reasoning="",
    ),
)
