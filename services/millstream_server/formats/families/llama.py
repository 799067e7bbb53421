"""Llama 3: JSON objects, often without any marker; several are divided by semicolons.

<|python_tag|>{"name": "weather", "parameters": {"city": "Oslo"}}
"""

from millstream_server.formats.envelope import Envelope
from millstream_server.formats.format import Format
from millstream_server.formats.written import NAME, Written

FORMAT = Format(
    name="llama-json",
    models="Llama 3.1, 3.2, 3.3",
    call_open=("<|python_tag|>",),
    call=Envelope(bare=True),
    written=Written(
        call=('{"name": "', NAME, '", "parameters": '),
        call_end="}",
        between="; ",
        apart=True,
    ),
)
