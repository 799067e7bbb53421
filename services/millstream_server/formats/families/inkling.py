"""Inkling: blocks that say what they are; before the kind of a block stands its author's name.

<|content_thinking|>I need the weather.<|end_message|><|message_model|>weather
<|content_invoke_tool_json|>{"name":"weather","args":{"city":"Oslo"}}<|end_message|>
"""

from millstream_server.formats.envelope import Envelope
from millstream_server.formats.format import Format, Span
from millstream_server.formats.written import NAME, Written

FORMAT = Format(
    name="inkling",
    models="Inkling",
    reasoning=(Span("<|content_thinking|>", "<|end_message|>"),),
    call_open=("<|content_invoke_tool_json|>",),
    call=Envelope(arguments=("args", "arguments")),
    headers=("<|message_model|>",),
    text_open=("<|content_text|>",),
    drop=("<|content_model_end_sampling|>",),
    begun=("<|message_model|>",),
    newlines=0,
    written=Written(
        call=(NAME, '<|content_invoke_tool_json|>{"name":"', NAME, '","args":'),
        call_end="}<|end_message|>",
        between="<|message_model|>",
        answer_open="<|content_text|>",
        answer_close="<|end_message|>",
        apart=True,
        after_reasoning=r"<\|message_model\|>",
    ),
)
