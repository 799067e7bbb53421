"""Calls with each argument as plain text, in tags that have the name as their value.

<tool_call>
<function=weather>
<parameter=city>
Oslo
</parameter>
</function>
</tool_call>
"""

from millstream_server.formats.families.think import THINK
from millstream_server.formats.format import Format, Span
from millstream_server.formats.key_values import KeyValues
from millstream_server.formats.tagged import Tagged
from millstream_server.formats.written import NAME, Written

_CALL = Tagged(
    header_end=(">",),
    arguments=KeyValues(
        key="<parameter=",
        key_end=(">",),
        value_end=("</parameter>",),
        early_value_end=("\n<parameter=", "\n</function>"),
        end=("</function>",),
        early_end=("</tool_call>", "</seed:tool_call>"),
        newline=True,
    ),
)

FORMAT = Format(
    name="qwen-xml",
    models="Qwen3-Coder, Qwen3.5 and later, Nemotron 3, Granite 4.2, Step-3.5, MiMo, Nanbeige",
    reasoning=THINK,
    section=Span("<tool_call>", "</tool_call>"),
    call_open=("<function=",),
    call=_CALL,
    calls_anywhere=True,
    written=Written(
        call=("<tool_call>\n<function=", NAME, ">\n"),
        call_end="</function>\n</tool_call>",
        between="\n",
        gap="\n",
    ),
)

SEED = Format(
    name="seed",
    models="Seed-OSS",
    reasoning=(Span("<seed:think>", "</seed:think>"),),
    section=Span("<seed:tool_call>", "</seed:tool_call>"),
    call_open=("<function=",),
    call=_CALL,
    calls_anywhere=True,
    written=Written(
        call=("<seed:tool_call>\n<function=", NAME, ">\n"),
        call_end="</function>\n</seed:tool_call>",
        between="\n",
        gap="\n",
    ),
)
