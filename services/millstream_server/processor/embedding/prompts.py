"""What is put around texts for a model: prompts of embedders, and forms of rerankers' pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from millstream_server.embedding.request import MAX_INSTRUCTION_BYTES
from millstream_server.runtime.errors import InvalidRequestError, UnsupportedFeatureError

if TYPE_CHECKING:
    from millstream_server.embedding.model_files import ModelUse
    from millstream_server.processor.text.tokenizer import TextModel

Join = Callable[[str, str], Sequence[int]]
"""Makes token ids of a query and a document."""

# What Qwen3-Reranker was trained with; its first files have no template for it.
_TURN = "<|im_start|>"
_FORM = (
    "<|im_start|>system\n"
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {}\n<Query>: {}\n<Document>: {}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


def prompt_named(use: ModelUse, name: str | None) -> str:
    """Return what is put in front of a text; ``name`` None: the model's default, if any.

    Raises:
        InvalidRequestError: the model has no such prompt, or it can't be used as it was trained.
    """
    name = use.default_prompt if name is None else name
    if not name:
        return ""
    if (prompt := use.prompts.get(name)) is None:
        has = f"it has {', '.join(use.prompts)}" if use.prompts else "its files name none"
        raise InvalidRequestError.of("prompt_name", f"this model has no prompt {name!r}; {has}")
    if prompt and not use.pools_prompt:
        raise UnsupportedFeatureError.of(
            "prompt_name",
            "this model leaves the tokens of its prompts out of pooling, which can't be done here",
        )
    return prompt


def pair_form(text: TextModel, instruction: str | None, *, answers: bool) -> Join:
    """Return how a model reads pairs; ``answers``: it is a generative one that answers.

    Raises:
        InvalidRequestError: it takes no instruction, or a shorter one.
        UnsupportedFeatureError: its form isn't known.
    """
    if instruction and len(instruction.encode()) > MAX_INSTRUCTION_BYTES:
        raise InvalidRequestError.of("instruction", f"has more than {MAX_INSTRUCTION_BYTES} bytes")
    default = text.use.prompts.get(text.use.default_prompt, "")
    chosen = default if instruction is None else instruction
    if text.chat_template.takes_pairs:
        return partial(_by_template, text, chosen)
    if not answers:
        if instruction:
            raise UnsupportedFeatureError.of(
                "instruction", "this model reads query and document alone; leave it out"
            )
        return text.encode_pair
    if text.tokenizer.token_to_id(_TURN) is None:
        raise UnsupportedFeatureError.of(
            "documents",
            "how this model reads a query and a document isn't known: it has no chat template for "
            "the roles query and document, and isn't Qwen3-Reranker",
        )
    return partial(_by_form, text, chosen or _INSTRUCTION)


def _by_template(text: TextModel, instruction: str, query: str, document: str) -> Sequence[int]:
    rendered = text.chat_template.render_pair(query, document, instruction, "documents")
    return text.encode(rendered, add_special_tokens=False)


def _by_form(text: TextModel, instruction: str, query: str, document: str) -> Sequence[int]:
    return text.encode(_FORM.format(instruction, query, document), add_special_tokens=False)
