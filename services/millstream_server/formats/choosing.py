"""Which format a model has: as it is set, as its worker says, or as its files look."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from millstream_server.formats.families import FORMATS
from millstream_server.formats.format import Format
from millstream_server.formats.patterns import UnmappedTemplateError
from millstream_server.formats.response_template import format_of

_PARSERS = {
    "apertus2509": "apertus", "coherecommand3": "cohere", "coherecommand4": "cohere",
    "deepseekv3": "deepseek-v3", "deepseekv31": "deepseek-v3.1", "deepseekv32": "deepseek-v3.2",
    "deepseekv4": "deepseek-v4", "deepseekv41": "deepseek-v4.1", "functiongemma": "functiongemma",
    "gemma4": "gemma4", "glm": "glm-kv", "glm45": "glm-kv", "glm47": "glm-kv", "gptoss": "harmony",
    "granite": "granite3", "hermes": "hermes", "hunyuan": "hunyuan", "hunyuana13b": "hunyuan-a13b",
    "hyv3": "hunyuan", "hyv4": "hunyuan", "inkling": "inkling",
    "kimik2": "kimi-k2", "kimik3": "kimi-k3", "lfm2": "lfm2",
    "ling3": "glm-kv", "llama3": "llama-json", "llama3json": "llama-json",
    "llama4pythonic": "pythonic", "mimo": "qwen-xml", "minimaxm2": "minimax-m2",
    "minimaxm3": "minimax-m3",
    "nanbeige": "qwen-xml", "olmo3": "olmo3", "openai": "harmony",
    "poolsidev1": "glm-kv", "pythonic": "pythonic", "qwen": "hermes", "qwen25": "hermes",
    "qwen3coder": "qwen-xml", "qwen3json": "hermes", "qwen3xml": "qwen-xml", "seedoss": "seed",
    "spark25": "glm-kv", "step3": "step3", "step3p5": "qwen-xml", "step5": "qwen-xml",
}  # fmt: skip
"""Names of SGLang's and vLLM's parsers of tool calls, without `_`, `-` and `.`."""
_MISTRAL = "mistral"  # the vocabulary tells which of the two
_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("kimi-k3", ("<|open|>", "<|sep|>", "<|close|>")),
    ("kimi-k2", ("<|tool_calls_section_begin|>",)),
    ("deepseek-v4.1", ("｜DSML｜", "｜DSML｜ calls")),
    ("deepseek-v3.2", ("｜DSML｜", "function_calls")),
    ("deepseek-v4", ("｜DSML｜",)),
    ("deepseek-v3", ("<｜tool▁sep｜>", "```json")),
    ("deepseek-v3.1", ("<｜tool▁sep｜>",)),
    ("functiongemma", ("<start_function_call>",)),
    ("gemma4", ("<|tool_call>", '<|"|>')),
    ("mistral-v11", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("cohere-tags", ("<cofl:value",)),
    ("cohere", ("<|START_ACTION|>",)),
    ("inkling", ("<|content_invoke_tool_json|>",)),
    ("step3", ("steptml:",)),
    ("minimax-m3", ("]<]minimax[>[",)),
    ("minimax-m2", ("<minimax:tool_call>",)),
    ("seed", ("<seed:tool_call>",)),
    ("hunyuan", ("<tool_sep>", "<arg_key>")),
    ("glm-kv", ("<arg_key>",)),
    ("qwen-xml", ("<function=", "<tool_call>")),
    ("apertus", ("<|tools_prefix|>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("olmo3", ("<function_calls>",)),
    ("granite3", ("<|tool_call|>",)),
    ("hunyuan-a13b", ("<tool_calls>",)),
    ("hermes", ("<tool_call>",)),
    ("pythonic", ("<|python_start|>",)),
    ("llama-json", ("<|python_tag|>",)),
    ("think", ("<think>",)),
)
"""What a model's template or vocabulary has that writes so; the first that fits."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AnswerFormat:
    """A model's format, and why it is this one."""

    form: Format
    reason: str
    hidden: Mapping[int, str]
    """See `Format.hidden`."""


def choose(
    *,
    given: str,
    response_template: str = "",
    encoded: str = "",
    told_calls: str,
    told_reasoning: str,
    template: str,
    has_token: Callable[[str], bool],
    special_tokens: Iterable[tuple[int, str]],
) -> AnswerFormat | None:
    """Return a model's format; None if nothing tells it.

    ``given`` was set for it; ``response_template`` is the checkpoint's, as JSON text; ``encoded``
    goes with the chat encoding that Processors have for it; ``told_calls`` and ``told_reasoning``
    are parsers as SGLang or vLLM names them; ``template`` is its chat template, ``has_token`` looks
    into its vocabulary.
    """

    def seen(marker: str) -> bool:
        return marker in template or has_token(marker)

    if given:
        return _named(given, "set by --formats", special_tokens)
    refused = ""
    if response_template:
        try:
            form = format_of(response_template)
        except UnmappedTemplateError as error:
            refused = f"; its response_template isn't used, since it has {error}"
        else:
            reason = "its checkpoint has a response_template"
            return AnswerFormat(form=form, reason=reason, hidden=form.hidden(special_tokens))
    if encoded:
        return _named(encoded, f"its chat encoding has it{refused}", special_tokens)
    name, reason = _told(told_calls, seen), f"the worker's parser is {told_calls}"
    if not name and _plain_name(told_reasoning) == "gptoss":
        name, reason = "harmony", f"the worker's parser of reasoning is {told_reasoning}"
    if not name:
        name = next((name for name, signs in _SIGNS if all(map(seen, signs))), "")
        reason = "its chat template or vocabulary has the markers"
    if not name and told_reasoning:
        name, reason = "think", f"the worker's parser of reasoning is {told_reasoning}"
    return _named(name, reason + refused, special_tokens)


def _named(
    name: str, reason: str, special_tokens: Iterable[tuple[int, str]]
) -> AnswerFormat | None:
    form = FORMATS.get(name)
    if form is None:
        return None
    return AnswerFormat(form=form, reason=reason, hidden=form.hidden(special_tokens))


def _told(parser: str, seen: Callable[[str], bool]) -> str:
    plain = _plain_name(parser)
    if plain == _MISTRAL:
        return "mistral-v11" if seen("[ARGS]") else "mistral"
    return _PARSERS.get(plain, "")


def _plain_name(parser: str) -> str:
    return re.sub(r"[-_.]", "", parser.lower())
