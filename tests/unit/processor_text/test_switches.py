"""One knob for reasoning, whatever a model's chat template calls it."""

from __future__ import annotations

import pytest

from millstream_server.processor.text.messages import ChatMessage, ChatRole
from millstream_server.processor.text.switches import reasoning
from millstream_server.processor.text.template import ChatTemplate
from millstream_server.runtime.errors import UnsupportedFeatureError

ASKED = [ChatMessage(ChatRole.USER, "hi")]
ENABLE_THINKING = "{% if enable_thinking is defined and enable_thinking is false %}off{% endif %}"
DEEPSEEK = (
    "{% if not thinking is defined %}{% set thinking = false %}{% endif %}"
    "{% if thinking %}on{% else %}off{% endif %}"
)
MINIMAX = (
    "{% if thinking_mode is defined %}{% if thinking_mode == 'enabled' %}on"
    "{% elif thinking_mode == 'disabled' %}off{% endif %}{% endif %}"
)
SEED = (
    "{% if thinking_budget is not defined %}{% set thinking_budget = -1 %}{% endif %}"
    "{% if thinking_budget == 0 %}off{% else %}on{% endif %}"
)
HUNYUAN = (
    '{% if reasoning_effort is not defined %}{% set reasoning_effort = "no_think" %}{% endif %}'
    '{% if reasoning_effort == "no_think" %}off{% else %}on {{ reasoning_effort }}{% endif %}'
)
MISTRAL = (
    "{% set effort = reasoning_effort if reasoning_effort is defined else 'none' %}"
    '[MODEL_SETTINGS]{"reasoning_effort": "{{ effort }}"}'
)
GPT_OSS = "{# thinking #}{{ reasoning_effort | default('medium') }}"
GLM_5_3 = "{% if reasoning_effort not in ('low', 'high') %}max{% endif %}{{ reasoning_effort }}"
KIMI_K3 = "{{ thinking_effort }}"
MUSE = "{% set how = reasoning_strength if reasoning_strength is defined else 'high' %}{{ how }}"
NEMOTRON = "{% set low_effort = low_effort if low_effort is defined else False %}{{ low_effort }}"
SPEAKS_OF_IT = "{{ 'thinking' }}{% for m in messages %}{{ m.thinking }}{% endfor %}"
NEVER = None


def rendered(source: str, *, on: bool | None = None, effort: str = "") -> str | None:
    template = ChatTemplate({"default": source}, {})
    try:
        variables = dict(
            template.variable(switches, field)
            for field, switches in reasoning(("enabled", on), ("effort", effort)).items()
        )
    except UnsupportedFeatureError:
        return NEVER
    return template.render(ASKED, variables=variables)


@pytest.mark.parametrize(
    ("source", "on", "off"),
    [
        (ENABLE_THINKING, "", "off"),
        (DEEPSEEK, "on", "off"),
        (MINIMAX, "on", "off"),
        (SEED, "on", "off"),
        (HUNYUAN, "on high", "off"),
        (
            MISTRAL,
            '[MODEL_SETTINGS]{"reasoning_effort": "high"}',
            '[MODEL_SETTINGS]{"reasoning_effort": "none"}',
        ),
        (GPT_OSS, NEVER, NEVER),
        (GLM_5_3, NEVER, NEVER),
        (SPEAKS_OF_IT, NEVER, NEVER),
    ],
)
def test_reasoning_is_turned_on_and_off(source: str, on: str | None, off: str | None) -> None:
    assert (rendered(source, on=True), rendered(source, on=False)) == (on, off)


@pytest.mark.parametrize(
    ("source", "prompt"),
    [
        (HUNYUAN, "on low"),
        (GPT_OSS, "low"),
        (GLM_5_3, "low"),
        (KIMI_K3, "low"),
        (MUSE, "low"),
        (NEMOTRON, "True"),
        (ENABLE_THINKING, NEVER),
        (SPEAKS_OF_IT, NEVER),
    ],
)
def test_an_effort_is_set(source: str, prompt: str | None) -> None:
    assert rendered(source, effort="low") == prompt


def test_off_wins_over_an_effort_and_an_effort_over_on() -> None:
    assert rendered(HUNYUAN, on=False, effort="low") == "off"
    assert rendered(HUNYUAN, on=True, effort="low") == "on low"


def test_a_refusal_names_what_the_template_could_have_had() -> None:
    template = ChatTemplate({"default": GPT_OSS}, {})
    switches = reasoning(("start.reasoning.enabled", False), ("", None))
    with pytest.raises(UnsupportedFeatureError, match="no variable enable_thinking or thinking"):
        template.variable(switches["start.reasoning.enabled"], "start.reasoning.enabled")
