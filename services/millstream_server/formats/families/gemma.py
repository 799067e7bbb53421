"""Google's own literals: keys without quotes, strings between markers.

Gemma 4:        <|tool_call>call:weather{city:<|"|>Oslo<|"|>,days:3}<tool_call|>
FunctionGemma:  <start_function_call>call:weather{city:<escape>Oslo<escape>}<end_function_call>
"""

from millstream_server.formats.format import Format, Span
from millstream_server.formats.literals import Literals
from millstream_server.formats.tagged import Tagged
from millstream_server.formats.written import NAME, Written

_HEADER = r"\s*(?:call:)?\s*(?P<name>[^\s{}<>:]+)\s*"

GEMMA4 = Format(
    name="gemma4",
    models="Gemma 4",
    reasoning=(Span("<|channel>thought\n", "<channel|>"),),
    call_open=("<|tool_call>",),
    call=Tagged(header_end=("{",), header=_HEADER, arguments=Literals(quotes=('<|"|>',))),
    call_drop=("<tool_call|>", '<|"|>'),
    drop=("<|channel>", "<turn|>"),
    written=Written(call=("<|tool_call>call:", NAME, "{"), call_end="<tool_call|>"),
)

FUNCTION_GEMMA = Format(
    name="functiongemma",
    models="FunctionGemma",
    call_open=("<start_function_call>",),
    call=Tagged(header_end=("{",), header=_HEADER, arguments=Literals(quotes=("<escape>",))),
    call_drop=("<end_function_call>",),
    written=Written(call=("<start_function_call>call:", NAME, "{"), call_end="<end_function_call>"),
)
