"""MiniMax M2: each argument as plain text, in tags with the name as an attribute.

<minimax:tool_call>
<invoke name="weather">
<parameter name="city">Oslo</parameter>
</invoke>
</minimax:tool_call>
"""

from millstream_server.formats.families.think import THINK
from millstream_server.formats.format import Format, Span
from millstream_server.formats.key_values import KeyValues
from millstream_server.formats.markup import Markup
from millstream_server.formats.tagged import Tagged
from millstream_server.formats.written import NAME, Matching, Written

M2 = Format(
    name="minimax-m2",
    models="MiniMax M2, M2.1, M2.5",
    reasoning=THINK,
    section=Span("<minimax:tool_call>", "</minimax:tool_call>"),
    call_open=('<invoke name="',),
    call=Tagged(
        header_end=('">',),
        header=r'(?P<name>[^"<>]+)',
        arguments=KeyValues(
            key='<parameter name="',
            key_end=('">',),
            value_end=("</parameter>",),
            end=("</invoke>",),
            early_end=("</minimax:tool_call>",),
        ),
    ),
    written=Written(
        call=('<invoke name="', NAME, '">\n'),
        call_end="</invoke>\n",
        begin="<minimax:tool_call>\n",
        end="</minimax:tool_call>",
        gap="\n",
        lead=Matching(r"\n{0,3}"),
        after_reasoning="",
    ),
)

_NS = "]<]minimax[>["

M3 = Format(
    name="minimax-m3",
    models="MiniMax M3",
    reasoning=(Span("<mm:think>", "</mm:think>"),),
    section=Span(f"{_NS}<tool_call>", f"{_NS}</tool_call>"),
    call_open=(f'{_NS}<invoke name="',),
    call=Tagged(header_end=('">',), header=r'(?P<name>[^"<>]+)', arguments=Markup(before=_NS)),
    written=Written(
        call=(f'{_NS}<invoke name="', NAME, '">'),
        call_end=f"{_NS}</invoke>\n",
        begin=f"{_NS}<tool_call>\n",
        end=f"{_NS}</tool_call>",
    ),
)
