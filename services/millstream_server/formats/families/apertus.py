"""Apertus: a JSON array of objects with one key each, the name.

<|inner_prefix|>I need the weather.<|tools_prefix|>[{"weather": {"city": "Oslo"}}]<|tools_suffix|>
"""

from millstream_server.formats.envelope import Envelope
from millstream_server.formats.format import Format, Span
from millstream_server.formats.written import NAME, Written

FORMAT = Format(
    name="apertus",
    models="Apertus",
    reasoning=(Span("<|inner_prefix|>", "<|inner_suffix|>"),),
    call_open=("<|tools_prefix|>",),
    call=Envelope(keyed=True),
    call_drop=("<|tools_suffix|>",),
    written=Written(
        call=('{"', NAME, '": '),
        call_end="}",
        between=", ",
        begin="<|tools_prefix|>[",
        end="]<|tools_suffix|>",
        after_reasoning="",
    ),
)
