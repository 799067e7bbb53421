"""gpt-oss' messages, each with a header that says what it is.

    <|channel|>analysis<|message|>I need the weather.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>
    {"city": "Oslo"}<|call|>

The recipient may also stand before the channel, as in `to=functions.weather<|channel|>commentary`.
"""

from millstream_server.formats.format import Format, Span
from millstream_server.formats.tagged import Json, Tagged
from millstream_server.formats.written import NAME, Written

_START = "<|start|>assistant"
_CHANNELS = ("commentary", "analysis", "final")

FORMAT = Format(
    name="harmony",
    models="gpt-oss",
    reasoning=(Span("<|channel|>analysis<|message|>", "<|end|>"),),
    call_open=(f"{_START} to=", *[f"<|channel|>{each} to=" for each in _CHANNELS]),
    call=Tagged(
        header_end=("<|message|>",),
        header=r"(?:functions\.)?(?P<name>[^\s<>]+)[^\n]*",
        arguments=Json(),
    ),
    headers=("<|start|>", "<|channel|>", "<|constrain|>"),
    text_open=(_START, "<|channel|>commentary<|message|>", "<|channel|>final<|message|>"),
    call_drop=("<|call|>",),
    drop=("<|message|>", "<|return|>"),
    begun=(_START,),
    written=Written(
        # Engines end at <|call|> and <|return|>: what is behind them can't be asked for.
        call=("<|channel|>commentary to=functions.", NAME, " <|constrain|>json<|message|>"),
        between="<|call|>" + _START,
        answer_open="<|channel|>final<|message|>",
        apart=True,
        after_reasoning=r"<\|start\|>assistant",
    ),
)
