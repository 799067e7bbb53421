"""Cohere: a JSON array of calls with keys of their own.

<|START_THINKING|>I need the weather.<|END_THINKING|><|START_ACTION|>
[{"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Oslo"}}]<|END_ACTION|>
"""

from millstream_server.formats.envelope import Envelope
from millstream_server.formats.format import Format, Span

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
)
