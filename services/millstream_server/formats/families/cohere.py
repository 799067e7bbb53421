"""Cohere: a JSON array of calls with keys of their own.

<|START_THINKING|>I need the weather.<|END_THINKING|><|START_ACTION|>
[{"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Oslo"}}]<|END_ACTION|>
"""

from millstream_server.formats.envelope import Envelope
from millstream_server.formats.format import Format, Span
from millstream_server.formats.written import NAME, NUMBER, Written

FORMAT = Format(
    name="cohere",
    models="Command A, Command 4",
    reasoning=(Span("<|START_THINKING|>", "<|END_THINKING|>"),),
    call_open=("<|START_ACTION|>",),
    call=Envelope(
        name=("tool_name", "name"), arguments=("parameters", "arguments"), id=("tool_call_id",)
    ),
    drop=(
        "<|END_ACTION|>",
        "<|START_RESPONSE|>",
        "<|END_RESPONSE|>",
        "<|START_TEXT|>",
        "<|END_TEXT|>",
    ),
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
