"""Calls as JSON objects between `<tool_call>` and `</tool_call>`.

<think>I need the weather.</think>
<tool_call>
{"name": "weather", "arguments": {"city": "Oslo"}}
</tool_call>
"""

from millstream_server.formats.envelope import Envelope
from millstream_server.formats.families.think import THINK
from millstream_server.formats.format import Format
from millstream_server.formats.written import NAME, Written

FORMAT = Format(
    name="hermes",
    models="Qwen2.5, Qwen3, Hermes, and many that were tuned from them",
    reasoning=THINK,
    call_open=("<tool_call>",),
    call=Envelope(),
    call_drop=("</tool_call>",),
    written=Written(
        call=('<tool_call>\n{"name": "', NAME, '", "arguments": '),
        call_end="}\n</tool_call>",
        between="\n",
    ),
)
