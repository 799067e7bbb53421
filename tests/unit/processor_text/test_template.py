"""Chat templates: what they are given, what they may do, and what comes of their errors."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from millstream_server.media.items import Modality
from millstream_server.processor.text import template as template_module
from millstream_server.processor.text.messages import (
    ChatMessage,
    ChatRole,
    MediaPart,
    Tool,
    ToolCall,
)
from millstream_server.processor.text.model_files import UnusableModelError
from millstream_server.processor.text.sandbox import compile_template
from millstream_server.processor.text.template import ChatTemplate
from millstream_server.runtime.errors import InvalidRequestError, UnsupportedFeatureError
from tests.support.models.models import CHATML

HELLO = ChatMessage(ChatRole.USER, "Hello")
WEATHER = Tool("weather", "Look it up", '{"type": "object", "properties": {"city": {}}}')


def template(source: str, **options: int) -> ChatTemplate:
    return ChatTemplate({"default": source}, {"bos_token": "<s>"}, **options)


def refusal(source: str, message: ChatMessage = HELLO) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        template(source).render([message])
    (violation,) = caught.value.violations
    assert violation.field == "messages"
    return violation.description


def test_renders_a_conversation() -> None:
    messages = [ChatMessage(ChatRole.SYSTEM, "Be brief."), HELLO]
    assert template(CHATML).render(messages) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert template(CHATML).render([HELLO], add_generation_prompt=False).endswith("<|im_end|>\n")


THINKING = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content and (m.content or loop.last) %}"
    "<think>{{ m.reasoning_content | trim }}</think>{% endif %}{{ m.content | trim }}"
    "</{{ m.role }}>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize(
    ("text", "reasoning", "prompt"),
    [
        ("Let me s", "", "Let me s"),
        (" So, ", "", "So, "),
        ("Let me s", "hm", "<think>hm</think>Let me s"),
        ("", "hm", "<think>hm"),
        ("", "", ""),
    ],
)
def test_a_prompt_that_is_continued_ends_inside_of_the_last_message(
    text: str, reasoning: str, prompt: str
) -> None:
    said = ChatMessage(ChatRole.ASSISTANT, text, reasoning=reasoning)
    rendered = template(THINKING).render([HELLO, said], continues="x")
    assert rendered == f"<user>Hello</user><assistant>{prompt}"


_OF_USERS = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}"
    "{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "prompt"),
    [
        (THINKING, "<user>Hello</user><assistant>So.</assistant><assistant>"),
        (_OF_USERS, "[INST]Hello[/INST]So.</s>[INST][/INST]"),
    ],
)
def test_behind_the_models_message_another_answer_begins(source: str, prompt: str) -> None:
    ours = ChatTemplate({"default": source}, {"eos_token": "</s>"})
    said = [HELLO, ChatMessage(ChatRole.ASSISTANT, "So.")]
    assert ours.render(said) == prompt
    assert prompt.startswith(ours.render(said, add_generation_prompt=False))
    assert ours.render(said, continues="x") == prompt[: prompt.index("So.") + 3]


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
        "{{ messages[0].content }}",
        "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content | reverse }}{% endfor %}",
    ],
)
def test_a_template_that_shows_another_text_can_not_be_continued(source: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match="the last message as it is") as caught:
        template(source).render([HELLO, ChatMessage(ChatRole.ASSISTANT, "So")], continues="x")
    assert [violation.field for violation in caught.value.violations] == ["x"]


def test_tool_calls_and_tools_reach_the_template_as_objects() -> None:
    call = ToolCall("call-1", "weather", '{"city": "Zürich"}')
    messages = [
        HELLO,
        ChatMessage(ChatRole.ASSISTANT, "", tool_calls=(call,)),
        ChatMessage(ChatRole.TOOL, "rain", tool_call_id="call-1", name="weather"),
    ]
    text = template(CHATML).render(messages, [WEATHER, Tool("now", "", "")])
    assert '<tool_call>weather {"city": "Zürich"}</tool_call>' in text
    shown = [json.loads(line) for line in text.splitlines() if line.startswith('{"type"')]
    assert [tool["function"]["name"] for tool in shown] == ["weather", "now"]
    assert shown[0]["function"]["parameters"]["properties"] == {"city": {}}
    assert shown[1]["function"]["parameters"] == {"type": "object", "properties": {}}


def test_absent_values_are_undefined() -> None:
    source = (
        "{% for m in messages %}{{ m.tool_calls is defined }}{{ m.name is defined }}"
        "{{ m.tool_call_id is defined }}{% endfor %}{{ tools is none }}{{ bos_token }}"
    )
    assert template(source).render([HELLO]) == "FalseFalseFalseTrue<s>"


def test_developer_is_system_to_templates_that_do_not_know_it() -> None:
    developer = ChatMessage(ChatRole.DEVELOPER, "Be brief.")
    assert "<|im_start|>system" in template(CHATML).render([developer])
    knowing = "{% for m in messages %}{% if m.role == 'developer' %}D{% endif %}{% endfor %}"
    assert template(knowing).render([developer]) == "D"


_ROLE = "{{ m.role[0] }}:{{ m.content }}|{% endfor %}"
FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system must be first') }}{% endif %}" + _ROLE
)
DROPPING = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}"
    "{{ m.role[0] }}:{{ m.content }}|{% endif %}{% endfor %}"
)
ALTERNATING = (
    "{% set rest = messages %}{% if messages[0].role == 'system' %}s:{{ messages[0].content }}|"
    "{% set rest = messages[1:] %}{% endif %}"
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}" + _ROLE
)


def said(messages: str) -> list[ChatMessage]:
    """Make messages of ``ROLE:TEXT``, the role by its first letter."""
    roles = {role.value[0]: role for role in ChatRole}
    return [ChatMessage(roles[message[0]], message[2:]) for message in messages.split()]


@pytest.mark.parametrize(
    ("messages", "first", "alternating"),
    [
        ("s:A d:B u:C", "s:A+B|u:C|", "s:A+B|u:C|"),
        ("u:A s:B", "u:A|u:B|", "u:A+B|"),
        ("u:A s:B u:C a:D u:E", "u:A|u:B|u:C|a:D|u:E|", "u:A+B+C|a:D|u:E|"),
        ("s:A u:B u:C a:D s:E u:F", "s:A|u:B|u:C|a:D|u:E|u:F|", "s:A|u:B+C|a:D|u:E+F|"),
    ],
)
def test_instructions_in_the_middle_and_users_in_a_row_reach_every_template(
    messages: str, first: str, alternating: str
) -> None:
    for source, prompt in ((FIRST, first), (DROPPING, first), (ALTERNATING, alternating)):
        found = template(source)
        for _ in range(2):  # what the template takes is kept
            assert found.render(said(messages)).replace("\n\n", "+") == prompt


def test_they_stay_where_the_template_takes_them() -> None:
    prompt = template(CHATML).render(said("s:A u:B u:C s:D d:E"))
    assert prompt.count("<|im_start|>system") == 3
    assert prompt.count("<|im_start|>user") == 2
    knowing = "{% for m in messages %}{% if m.role in ('user', 'developer', 'assistant') %}"
    source = knowing + "{{ m.role[0] }}:{{ m.content }}|{% endif %}{% endfor %}"
    assert template(source).render(said("u:A d:B s:C u:D")) == "u:A|d:B\n\nC|u:D|"


def test_pictures_keep_their_places_beside_instructions() -> None:
    image = MediaPart(Modality.IMAGE, "messages[0]")
    message = ChatMessage(ChatRole.USER, "A", parts=(image, "A"))
    shown = "{{ m.content if m.content is string else m.content | tojson }}"
    source = ALTERNATING.replace("{{ m.content }}", shown)
    assert template(source).render([message, *said("s:B")]) == (
        'u:[{"type": "image"}, {"type": "text", "text": "A"}, '
        '{"type": "text", "text": "\\n\\n"}, {"type": "text", "text": "B"}]|'
    )


def test_the_tool_use_template_is_taken_when_there_are_tools() -> None:
    both = ChatTemplate({"default": "plain", "tool_use": "with tools"}, {})
    assert both.render([HELLO]) == "plain"
    assert both.render([HELLO], [WEATHER]) == "with tools"


def test_without_a_template_complete_is_the_way() -> None:
    with pytest.raises(UnsupportedFeatureError, match="use Complete"):
        ChatTemplate({}, {}).render([HELLO])


def test_the_templates_own_sentence_is_passed_on() -> None:
    assert refusal("{{ raise_exception('roles must alternate') }}") == (
        "the chat template says: roles must alternate"
    )
    assert len(refusal("{{ raise_exception('x' * 5000) }}")) < 250
    tool = ChatMessage(ChatRole.TOOL, "rain", tool_call_id="call-1")
    assert refusal(CHATML, tool).endswith("a tool message cannot come first")


@pytest.mark.parametrize(
    "source",
    [
        "{{ missing.attribute }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[9].content }}",
        "{{ 1 / 0 }}",
        "{{ messages | map('no such filter') | list }}",
        "{{ raise_exception('') }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{% include 'other' %}",
    ],
)
def test_a_template_that_fails_says_nothing_of_the_interpreter(source: str) -> None:
    assert refusal(source) == "this model's chat template cannot render these messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__ }}",
        "{{ raise_exception.__globals__['jinja2'] }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ messages.clear() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ range(10000000) | list }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    assert refusal(source) == "this model's chat template cannot render these messages"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(9999) %}{% for j in range(9999) %}xx{% endfor %}{% endfor %}",
        "{% for i in range(2000) %}{{ messages[0].content }}{% endfor %}",
    ],
)
def test_the_output_is_capped_while_it_grows(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="would exceed 1000 characters"):
        template(source, max_prompt_chars=1000).render([HELLO])


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10 ** 10 }}",
        "{{ 10 ** 10 * 'a' }}",
        "{{ [1] * 10 ** 10 }}",
        "{{ ['a' * 16000000] * 1000000 }}",
        "{{ ['a' * 16000000] * 1000000 ~ 'a' }}",
        "{{ (['a' * 16000000] * 1000000) | string | length }}",
        "{{ (['a' * 16000000] * 1000000) | tojson | length }}",
        "{{ (['a' * 16000000] * 1000000) | join | length }}",
        "{{ ''.join(['a' * 16000000] * 1000000) | length }}",
        "{{ ('a' * 16000000).join(range(99999) | map('string')) | length }}",
        "{{ range(99999) | join('a' * 16000000) | length }}",
        "{{ ('a' * 9000000 + 'a' * 9000000) | length }}",
        "{{ ('a' * 9000000 ~ 'a' * 9000000) | length }}",
        "{{ ('a' * 99999).replace('a', 'b' * 99999) | length }}",
        "{{ ('a' * 99999) | replace('a', 'b' * 99999) | length }}",
        "{% set n = namespace(s=9) %}{% for _ in 'a' * 64 %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{% set s = 'a' * 9000000 %}{% set x %}{{ s }}{{ s }}{% endset %}",
        "{% macro x() %}{{ 'a' * 9000000 }}{{ 'a' * 9000000 }}{% endmacro %}{{ x() | length }}",
        (
            "{% set n = namespace(x=1) %}{% for i in 'a' * 64 %}{% set n.x = [n.x] * 2 %}"
            "{% endfor %}{{ n.x | string | length }}"
        ),
        "{{ 9 ** 9999999999 }}",
        "{% set n = namespace(i=9) %}{% for i in 'a' * 99 %}{% set n.i = n.i * n.i %}{% endfor %}",
        "{{ 'a'.ljust(10 ** 10) | length }}",
        "{{ 'a'.center(10 ** 10) | length }}",
        "{{ 'a'.zfill(10 ** 10) | length }}",
        "{{ '\t'.expandtabs(10 ** 10) | length }}",
        "{{ 'a'.encode().ljust(10 ** 10) | length }}",
        "{{ (1).to_bytes(10 ** 10, 'big') | length }}",
        "{{ 'a' | center(10 ** 10) | length }}",
        "{{ 'a' | center(width=10 ** 10) | length }}",
        "{{ 'a\na' | indent(10 ** 10) | length }}",
        "{{ [1] | batch(10 ** 10, 1) | list | length }}",
        "{{ ('a' * 99999) | wordwrap(1, true, 'b' * 99999) | length }}",
        "{{ [1] | tojson(indent=10 ** 10) | length }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '%*d' % (10 ** 10, 1) }}",
        "{{ ('%s' * 9999) % (('a' * 16000000,) * 9999) | length }}",
        "{{ ('%(a)s' * 9999) % {'a': 'a' * 16000000} | length }}",
        "{{ ('%(a)s' * 9999) | format(a='a' * 16000000) | length }}",
        "{{ '%10000000000d' | format(1) | length }}",
        "{{ '{:10000000000}'.format(1) | length }}",
        "{{ '{:{}}'.format(1, 10 ** 10) | length }}",
        "{{ ('{0}' * 9999).format('a' * 16000000) | length }}",
        "{{ ('{a}' * 9999).format_map({'a': 'a' * 16000000}) | length }}",
        "{{ lipsum(n=10 ** 6) }}",
    ],
)
def test_no_operation_makes_a_large_value(source: str) -> None:
    assert refusal(source) == "this model's chat template cannot render these messages"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("a" * (256 * 1024 + 1), "it has 262145 characters; 262144 can be used"),
        ("{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}", "it can't be compiled: RecursionError"),
        ("{% for i in [] %}" * 99 + "{% endfor %}" * 99, "it can't be compiled: IndentationError"),
    ],
    ids=["long", "deep", "loops"],
)
def test_a_template_that_takes_too_long_to_compile_stops_the_start(source: str, why: str) -> None:
    with pytest.raises(UnusableModelError) as refused:
        template(source)
    assert str(refused.value).endswith(why)


def test_a_prompt_of_exactly_the_cap_passes_and_one_more_does_not() -> None:
    assert template("{{ messages[0].content }}", max_prompt_chars=5).render([HELLO]) == "Hello"
    with pytest.raises(InvalidRequestError, match="would exceed 4 characters"):
        template("{{ messages[0].content }}", max_prompt_chars=4).render([HELLO])


def test_a_broken_template_stops_the_start() -> None:
    with pytest.raises(UnusableModelError, match="'default' is not valid Jinja"):
        template("{% for %}")


def test_unchecked_messages_are_our_fault_not_the_templates() -> None:
    with pytest.raises(ValueError, match="not checked"):
        template(CHATML).render([ChatMessage(None, "Hello")])


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}\n {% if loop.first %}{% continue %}{% endif %}{{ m }}{% endfor %}",
        "{{ {'ä<': [1, true, none]} | tojson }}|{{ {'b': 1, 'a': 2} | tojson(indent=2) }}",
        "{{ {'b': 1, 'a': 'ä'} | tojson(true, none, (',', ':'), true) }}",
        "a {% generation %}\n{% set x = 1 %}{{ messages }}{% endgeneration %}\n{{ x is defined }}",
        "{{ 'a' ~ 1 ~ [none] }}{{ 'a' + 'b' * 3 }}{{ [1] + [2] }}{{ 7 % 3 }}{{ 2 ** 9 * 3 + 1 }}",
        "{{ '%s %5.2f%%' % ('a', 1) }}{{ '%(a)s' % {'a': 1} }}{{ '%s' | format('ä') }}",
        "{{ '{:>4}{}{a}'.format(1, [2], a='b') }}{{ '{a}'.format_map({'a': 'b'}) }}",
        "{{ 'a b'.replace(' ', '') }}{{ 'a b' | replace(' ', '-', 1) }}{{ 'a\tb'.expandtabs(4) }}",
        "{{ ', '.join(['a', 'b']) }}{{ messages | map(attribute='role') | join('|') }}",
        "{{ [1, 2] | join(', ') }}{{ [{'a': 1}] | join('', attribute='a') }}{{ 'a'.rjust(3) }}",
        "{{ 'a\nb' | indent(2, true) }}{{ 'a' | center(5) }}{{ 'a bc' | wordwrap(2) }}{{ [1] }}",
        "{% set x %}{{ 1 }}{{ messages[0].content }}{% endset %}{{ x | string | length }}",
        "{{ [1, 2, 3] | batch(2, 'x') | list }}{{ [1, 2, 3] | slice(2) | list | pprint }}",
        "{{ strftime_now('%Y') }} {{ messages.append(1) if messages is mapping }}",
    ],
)
def test_templates_are_rendered_as_by_the_reference(source: str) -> None:
    from transformers.utils.chat_template_utils import _compile_jinja_template  # noqa: PLC0415

    values = {"messages": ["one", "two"]}
    assert compile_template(source).render(values) == _compile_jinja_template(source).render(values)


def test_many_messages_that_become_one_are_joined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0

    def counted(message: ChatMessage, **changes: Any) -> ChatMessage:
        nonlocal made
        made += len(changes.get("text", ""))
        return replace(message, **changes)

    monkeypatch.setattr(template_module, "replace", counted)
    source = (
        "{% for m in messages %}{% if loop.previtem and m.role == loop.previtem.role %}"
        "{{ raise_exception('twice') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    said = [ChatMessage(ChatRole.USER, "x" * 100) for _ in range(200)]
    prompt = template(source).render(said)
    assert prompt == "\n\n".join(message.text for message in said)
    assert made == len(prompt)
