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
"""

from millstream_server.formats.families.think import THINK
from millstream_server.formats.format import Format, Span
from millstream_server.formats.key_values import KeyValues
from millstream_server.formats.tagged import Json, Tagged

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
    drop=("```" + _CLOSE, _CLOSE, "<｜tool▁sep｜>"),
)

V31 = Format(
    name="deepseek-v3.1",
    models="DeepSeek V3.1",
    reasoning=THINK,
    section=_SECTION,
    call_open=_OPEN,
    call=Tagged(header_end=("<｜tool▁sep｜>",), arguments=Json()),
    drop=(_CLOSE,),
)


def _dsml(name: str, models: str, calls: str) -> Format:
    return Format(
        name=name,
        models=models,
        reasoning=THINK,
        section=Span(f"<｜DSML｜{calls}>", f"</｜DSML｜{calls}>"),
        call_open=('<｜DSML｜invoke name="',),
        call=Tagged(
            header_end=('">',),
            header=r'(?P<name>[^"<>]+)',
            arguments=KeyValues(
                key='<｜DSML｜parameter name="',
                key_end=('" string="true">', '" string="false">', '">'),
                types=("string", "json", "any"),
                value_end=("</｜DSML｜parameter>",),
                end=("</｜DSML｜invoke>",),
                early_end=(f"</｜DSML｜{calls}>",),
            ),
        ),
    )


V32 = _dsml("deepseek-v3.2", "DeepSeek V3.2", "function_calls")
V4 = _dsml("deepseek-v4", "DeepSeek V4", "tool_calls")
V41 = _dsml("deepseek-v4.1", "DeepSeek V4.1", " calls")
