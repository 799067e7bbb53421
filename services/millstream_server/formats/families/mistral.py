"""Mistral's two ways; the version of the tokenizer decides.

before v11:  [TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}], perhaps with an "id"
v11:         [TOOL_CALLS]weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Oslo"}
since v13:   [TOOL_CALLS]weather[ARGS]{"city": "Oslo"}
"""

import secrets
import string

from millstream_server.formats.envelope import Envelope
from millstream_server.formats.format import Format, Span
from millstream_server.formats.tagged import Json, Tagged
from millstream_server.formats.written import NAME, Matching, Written

_CHARS = string.ascii_letters + string.digits
_ID_CHARS = 9


def _id(_name: str, _index: int) -> str:
    """Make an id as the templates insist on: nine letters or digits."""
    return "".join(secrets.choice(_CHARS) for _ in range(_ID_CHARS))


OLD = Format(
    name="mistral",
    models="Mistral 7B v0.3, Nemo, and others with tokenizers before v11",
    call_open=("[TOOL_CALLS]",),
    call=Envelope(id=("id",)),
    new_id=_id,
    written=Written(
        call=('{"name": "', NAME, '", "arguments": '),
        call_end="}",
        between=", ",
        begin="[TOOL_CALLS][",
        end="]",
    ),
)

V11 = Format(
    name="mistral-v11",
    models="Small 3.2, Medium, Magistral, Devstral",
    reasoning=(Span("[THINK]", "[/THINK]"),),
    call_open=("[TOOL_CALLS]",),
    call=Tagged(
        header_end=("[ARGS]",),
        header=r"\s*(?P<name>[^\s\[\]{}\"]+)\s*(?:\[CALL_ID\]\s*(?P<id>[A-Za-z0-9]+)\s*)?",
        arguments=Json(),
    ),
    call_drop=("[CALL_ID]", "[ARGS]"),
    new_id=_id,
    written=Written(
        call=("[TOOL_CALLS]", NAME, Matching(r"(\[CALL_ID\][A-Za-z0-9]{9})?"), "[ARGS]"),
    ),
)
