"""Step-3: DeepSeek's markers with bars of their own, and each argument as plain text in tags.

<｜tool_calls_begin｜>
<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="weather">
<steptml:parameter name="city">Oslo</steptml:parameter>
</steptml:invoke><｜tool_call_end｜>
<｜tool_calls_end｜>
"""

from millstream_server.formats.families.think import THINK
from millstream_server.formats.format import Format, Span
from millstream_server.formats.key_values import KeyValues
from millstream_server.formats.tagged import Tagged
from millstream_server.formats.written import NAME, Written

STEP3 = Format(
    name="step3",
    models="Step-3",
    reasoning=THINK,
    section=Span("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
    call_open=("<｜tool_call_begin｜>",),
    call=Tagged(
        header_end=('">',),
        header=r'\s*\w*<｜tool_sep｜>\s*<steptml:invoke name="(?P<name>[^"<>]+)',
        arguments=KeyValues(
            key='<steptml:parameter name="',
            key_end=('">',),
            value_end=("</steptml:parameter>",),
            end=("</steptml:invoke>",),
            early_end=("<｜tool_call_end｜>", "<｜tool_calls_end｜>"),
        ),
    ),
    call_drop=("<｜tool_call_end｜>", "<｜tool_sep｜>"),
    written=Written(
        call=('<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="', NAME, '">\n'),
        call_end="</steptml:invoke><｜tool_call_end｜>",
        between="\n",
        begin="<｜tool_calls_begin｜>\n",
        end="\n<｜tool_calls_end｜>",
        gap="\n",
    ),
)
