"""A model's tokenizer and chat template, from a local directory, without loading the model.

Neither torch nor an engine is imported: a Processor runs in a container without them. That is why
the library's `AutoTokenizer` is not used here; it imports torch wherever that is installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from millstream_server.processor.text.detokenizer import IncrementalDetokenizer
from millstream_server.processor.text.model_files import (
    GenerationDefaults,
    UnusableModelError,
    read_model_facts,
)
from millstream_server.processor.text.pieces import PieceTable, build_piece_table
from millstream_server.processor.text.template import DEFAULT_MAX_PROMPT_CHARS, ChatTemplate

_SHORT_CHARS = 1024
"""Half a millisecond of work, the time a thread may hold the interpreter lock anyway."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextModel:
    """All that a model directory says about texts. Immutable; shared by all requests."""

    tokenizer: Tokenizer
    pieces: PieceTable | None
    chat_template: ChatTemplate
    vocab_size: int
    """One more than the tokenizer's highest id; the model's own vocabulary may be padded beyond."""
    eos_token_ids: tuple[int, ...]
    """Any of them ends a generation. Empty when the directory names none."""
    bos_token_id: int | None
    context_length: int | None
    """Prompt plus completion in tokens, as the model was trained; an engine may be set lower."""
    generation_defaults: GenerationDefaults

    @classmethod
    def load(cls, path: Path, *, max_prompt_chars: int = DEFAULT_MAX_PROMPT_CHARS) -> TextModel:
        """Read the directory; takes about a second for a large vocabulary.

        Raises:
            UnusableModelError: a file is missing or wrong.
        """
        facts = read_model_facts(path)
        fast = _load_fast_tokenizer(path)
        tokenizer = fast.backend_tokenizer
        # A tokenizer.json may carry its training's truncation, which would cut prompts silently.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        special_tokens = {
            name: str(token)
            for name, token in fast.special_tokens_map.items()
            if not isinstance(token, list)
        }
        eos = fast.eos_token_id
        return cls(
            tokenizer=tokenizer,
            pieces=build_piece_table(tokenizer),
            chat_template=ChatTemplate(
                _template_sources(fast), special_tokens, max_prompt_chars=max_prompt_chars
            ),
            vocab_size=max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1,
            eos_token_ids=facts.eos_token_ids or (() if eos is None else (eos,)),
            bos_token_id=fast.bos_token_id if facts.bos_token_id is None else facts.bos_token_id,
            context_length=facts.context_length,
            generation_defaults=facts.generation_defaults,
        )

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Tokenize; ``add_special_tokens`` for raw prompts, not for rendered templates.

        Takes about 0.5 us per character: long texts belong into a thread.
        """
        if len(text) < _SHORT_CHARS:
            # Quicker than to give the interpreter lock away and win it back from a busy event loop.
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        # The library's `encode` keeps the interpreter lock to its end, its batch calls do not.
        batch = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return batch[0].ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of all ids: what an `IncrementalDetokenizer` gives in parts."""
        detokenizer = IncrementalDetokenizer(self, skip_special_tokens=skip_special_tokens)
        return detokenizer.push(ids) + detokenizer.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """Return what a token stands for inside a text, special tokens by name; b"" if unknown.

        It may be part of a character. The bytes of a byte-level or SentencePiece tokenizer's tokens
        join to the text's bytes.
        """
        if not 0 <= token_id < self.vocab_size:
            return b""
        if self.pieces is None:
            return self.tokenizer.decode([token_id], skip_special_tokens=False).encode()
        return self.pieces.every[token_id]

    def token_text(self, token_id: int) -> str:
        """Return `token_bytes` as text, with U+FFFD for a part of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")


def _load_fast_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    if not (path / "tokenizer.json").is_file():
        # Said here because the library would take the path for the name of a model on a hub.
        raise UnusableModelError(f"{path} has no tokenizer.json")
    try:
        return PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
    except Exception as exc:
        # The tokenizers binding raises no narrower class.
        raise UnusableModelError(f"the tokenizer in {path} cannot be loaded: {exc}") from exc


def _template_sources(fast: PreTrainedTokenizerFast) -> dict[str, str]:
    """Return the templates by name; the library reads all the places where models keep them."""
    template = fast.chat_template
    if template is None:
        return {}
    return {"default": template} if isinstance(template, str) else dict(template)
