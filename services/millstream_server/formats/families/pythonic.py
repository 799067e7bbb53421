"""Calls as Python writes them: in a list, in a list between markers, or one a line.

Llama 4:  [weather(city="Oslo"), time(zone="CET")]
LFM2:     <|tool_call_start|>[weather(city="Oslo")]<|tool_call_end|>
Olmo 3:   <function_calls>weather(city="Oslo")</function_calls>
"""

from millstream_server.formats.families.think import THINK
from millstream_server.formats.format import Format
from millstream_server.formats.python_calls import PythonCalls
from millstream_server.formats.written import NAME, Written

FORMAT = Format(
    name="pythonic",
    models="Llama 4, and Llama 3.2 with such a template",
    call_open=("<|python_start|>",),
    call=PythonCalls(bare=True),
    call_drop=("<|python_end|>",),
    written=Written(call=(NAME, "("), between=", ", begin="[", end="]", apart=True),
)

LFM2 = Format(
    name="lfm2",
    models="LFM2",
    reasoning=THINK,
    call_open=("<|tool_call_start|>",),
    call=PythonCalls(),
    call_drop=("<|tool_call_end|>",),
    written=Written(
        call=(NAME, "("),
        between=", ",
        begin="<|tool_call_start|>[",
        end="]<|tool_call_end|>",
    ),
)

OLMO3 = Format(
    name="olmo3",
    models="Olmo 3",
    reasoning=THINK,
    call_open=("<function_calls>",),
    call=PythonCalls(),
    call_drop=("</function_calls>",),
    written=Written(
        call=(NAME, "("),
        between="\n",
        begin="<function_calls>",
        end="</function_calls>",
    ),
)
