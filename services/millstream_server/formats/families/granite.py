"""Granite 3: a JSON array of calls behind a marker, without one at its end.

<|tool_call|>[{"name": "weather", "arguments": {"city": "Oslo"}}]
"""

from millstream_server.formats.envelope import Envelope
from millstream_server.formats.families.think import THINK
from millstream_server.formats.format import Format
from millstream_server.formats.written import NAME, Written

FORMAT = Format(
    name="granite3",
    models="Granite 3",
    reasoning=THINK,
    call_open=("<|tool_call|>", "<tool_call>"),
    call=Envelope(),
    written=Written(
        call=('{"name": "', NAME, '", "arguments": '),
        call_end="}",
        between=", ",
        begin="<|tool_call|>[",
        end="]",
    ),
)
