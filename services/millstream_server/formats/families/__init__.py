"""The formats, by name: one file per family, with an example of each."""

from __future__ import annotations

from millstream_server.formats.families import (
    apertus,
    cohere,
    deepseek,
    gemma,
    glm,
    granite,
    harmony,
    hermes,
    hunyuan_a13b,
    inkling,
    kimi,
    llama,
    minimax,
    mistral,
    pythonic,
    qwen_xml,
    step,
    think,
)
from millstream_server.formats.format import Format

FORMATS: dict[str, Format] = {
    form.name: form
    for form in (
        hermes.FORMAT,
        think.FORMAT,
        qwen_xml.FORMAT,
        qwen_xml.SEED,
        deepseek.V3,
        deepseek.V31,
        deepseek.V32,
        deepseek.V4,
        deepseek.V41,
        glm.FORMAT,
        kimi.K2,
        minimax.M2,
        minimax.M3,
        mistral.OLD,
        mistral.V11,
        harmony.FORMAT,
        llama.FORMAT,
        pythonic.FORMAT,
        pythonic.LFM2,
        pythonic.OLMO3,
        gemma.GEMMA4,
        gemma.FUNCTION_GEMMA,
        cohere.FORMAT,
        glm.HUNYUAN,
        hunyuan_a13b.FORMAT,
        granite.FORMAT,
        kimi.K3,
        apertus.FORMAT,
        cohere.TAGS,
        inkling.FORMAT,
        step.STEP3,
    )
}
