"""DeepSeek's three ways. `▁` is U+2581, `｜` U+FF5C.

V3 and R1:   <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather
             ```json
             {"city": "Oslo"}
             ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
V3.1:        <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Oslo"}
             <｜tool▁call▁end｜><｜tool▁calls▁end｜>
DSML:        <｜DSML｜function_calls>
             <｜DSML｜invoke name="weather">
             <｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>
             </｜DSML｜invoke>
             </｜DSML｜function_calls>
             (V4: tool_calls; V4.1: calls, and a space behind each mark)
"""

from millstream_server.formats.families.think import THINK
from millstream_server.formats.format import Format, Span
from millstream_server.formats.key_values import KeyValues
from millstream_server.formats.tagged import Json, Tagged
from millstream_server.formats.written import NAME, Written

_SECTION = Span("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_OPEN = ("<｜tool▁call▁begin｜>",)
_CLOSE = "<｜tool▁call▁end｜>"

V3 = Format(
    name="deepseek-v3",
    models="DeepSeek V3, V3-0324, R1, R1-0528",
    reasoning=THINK,
    section=_SECTION,
    call_open=_OPEN,
    call=Tagged(
        header_end=("```json\n", "```json"),
        header=r"\s*\w*<｜tool▁sep｜>\s*(?P<name>[^\s<>`]+)\s*",
        arguments=Json(),
    ),
    call_drop=("```" + _CLOSE, _CLOSE, "<｜tool▁sep｜>"),
    written=Written(
        call=(*_OPEN, "function<｜tool▁sep｜>", NAME, "\n```json\n"),
        call_end="\n```" + _CLOSE,
        between="\n",
        begin=_SECTION.open,
        end=_SECTION.close,
    ),
)

V31 = Format(
    name="deepseek-v3.1",
    models="DeepSeek V3.1",
    reasoning=THINK,
    section=_SECTION,
    call_open=_OPEN,
    call=Tagged(header_end=("<｜tool▁sep｜>",), arguments=Json()),
    call_drop=(_CLOSE, "<｜tool▁sep｜>"),
    written=Written(
        call=(*_OPEN, NAME, "<｜tool▁sep｜>"),
        call_end=_CLOSE,
        begin=_SECTION.open,
        end=_SECTION.close,
    ),
)


def _dsml(name: str, models: str, calls: str, mark: str = "｜DSML｜") -> Format:
    return Format(
        name=name,
        models=models,
        reasoning=THINK,
        section=Span(f"<{mark}{calls}>", f"</{mark}{calls}>"),
        call_open=(f'<{mark}invoke name="',),
        call=Tagged(
            header_end=('">',),
            header=r'(?P<name>[^"<>]+)',
            arguments=KeyValues(
                key=f'<{mark}parameter name="',
                key_end=('" string="true">', '" string="false">', '">'),
                types=("string", "json", "any"),
                value_end=(f"</{mark}parameter>",),
                end=(f"</{mark}invoke>",),
                early_end=(f"</{mark}{calls}>",),
            ),
        ),
        written=Written(
            call=(f'<{mark}invoke name="', NAME, '">\n'),
            call_end=f"</{mark}invoke>\n",
            begin=f"<{mark}{calls}>\n",
            end=f"</{mark}{calls}>",
            lead="\n\n",
            gap="\n",
            after_reasoning="",
        ),
    )


V32 = _dsml("deepseek-v3.2", "DeepSeek V3.2", "function_calls")
V4 = _dsml("deepseek-v4", "DeepSeek V4", "tool_calls")
V41 = _dsml("deepseek-v4.1", "DeepSeek V4.1", "calls", mark="｜DSML｜ ")
