"""GLM's calls, each argument in two tags; and Hunyuan's, which add a section.

<tool_call>weather
<arg_key>city</arg_key>
<arg_value>Oslo</arg_value>
</tool_call>
"""

from millstream_server.formats.families.think import THINK
from millstream_server.formats.format import Format, Span
from millstream_server.formats.key_values import KeyValues
from millstream_server.formats.tagged import Tagged
from millstream_server.formats.written import NAME, Matching, Written

_ARGUMENTS = KeyValues(
    key="<arg_key>",
    key_end=("</arg_key>",),
    value="<arg_value>",
    value_end=("</arg_value>",),
    end=("</tool_call>",),
    early_end=("</tool_calls>",),
)
_GAP = Matching(r"\n?")
"""Newer models leave it out."""

FORMAT = Format(
    name="glm-kv",
    models="GLM-4.5, 4.6, 4.7 and 5; Ling 3; Poolside; Spark 2.5",
    reasoning=THINK,
    call_open=("<tool_call>",),
    call=Tagged(header_end=("<arg_key>", "</tool_call>"), keeps_end=True, arguments=_ARGUMENTS),
    call_drop=("</tool_call>",),
    written=Written(
        call=("<tool_call>", NAME, _GAP),
        call_end="</tool_call>",
        between="\n",
        gap=_GAP,
        inner_gap=_GAP,
    ),
)

HUNYUAN = Format(
    name="hunyuan",
    models="Hy3, Hy4",
    reasoning=THINK,
    section=Span("<tool_calls>", "</tool_calls>"),
    call_open=("<tool_call>",),
    call=Tagged(header_end=("<tool_sep>",), arguments=_ARGUMENTS),
    call_drop=("</tool_call>",),
    written=Written(
        call=("<tool_call>", NAME, "<tool_sep>", _GAP),
        call_end="</tool_call>",
        between="\n",
        begin="<tool_calls>\n",
        end="\n</tool_calls>",
        gap=_GAP,
        inner_gap=_GAP,
    ),
)
