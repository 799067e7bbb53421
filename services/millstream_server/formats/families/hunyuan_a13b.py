"""Hunyuan A13B: a JSON array of calls.

<tool_calls>[{"name": "weather", "arguments": {"city": "Oslo"}}]</tool_calls>
"""

from millstream_server.formats.envelope import Envelope
from millstream_server.formats.families.think import THINK
from millstream_server.formats.format import Format
from millstream_server.formats.written import NAME, Written

FORMAT = Format(
    name="hunyuan-a13b",
    models="Hunyuan A13B",
    reasoning=THINK,
    call_open=("<tool_calls>",),
    call=Envelope(),
    text_open=("<answer>",),
    call_drop=("</tool_calls>",),
    drop=("</answer>",),
    written=Written(
        call=('{"name": "', NAME, '", "arguments": '),
        call_end="}",
        between=", ",
        begin="<tool_calls>[",
        end="]</tool_calls>",
    ),
)
