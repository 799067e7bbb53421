"""A model's tokenizer and chat template, from a local directory.

Neither torch nor an engine is imported: a Processor's container has none. Nor is transformers,
which takes much memory (`model_files`).
"""

from __future__ import annotations

import contextlib
import threading
from array import array
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from millstream_server.embedding.model_files import (
    NOTHING_SAID,
    ModelUse,
    UnusableModulesError,
    read_use,
)
from millstream_server.media.families import load as load_family
from millstream_server.media.families.family import Family, UnusableFamilyError
from millstream_server.processor.text.detokenizer import PieceTable, build_piece_table, detokenizer
from millstream_server.processor.text.long_texts import (
    NO_FLOOR,
    PART_CHARS,
    Floor,
    Frame,
    floor_of,
    frame_of,
    parts_of,
)
from millstream_server.processor.text.model_files import (
    GenerationDefaults,
    TokenizerFiles,
    UnusableModelError,
    read_model_facts,
    read_tokenizers,
)
from millstream_server.processor.text.template import ChatTemplate
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.work.pool import stop_if_gone

log = get_log(__name__)

SECONDS_PER_CHAR = 0.5e-6
"""About what tokenizing takes; long texts of one kind of character up to twice as much."""
_DECODED_AT_ONCE = 1 << 14
_UNCUT_CHARS = 2 * PART_CHARS
"""A text or part that can't be cut and is longer is tokenized alone: it takes 300 bytes for each of
its characters, 1.2 GB for 4 MiB."""
_ALONE = threading.Lock()
_SHORT_CHARS = 1024
"""Up to this length tokenizing takes half a millisecond, as long as a thread may keep the GIL."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextModel:
    """A model directory's text handling. Immutable; shared by all requests."""

    tokenizer: Tokenizer
    pieces: PieceTable | None
    chat_template: ChatTemplate
    vocab_size: int
    """The tokenizer's highest id plus 1; the model's own vocabulary may be padded beyond."""
    eos_token_ids: tuple[int, ...]
    """Token ids that end a generation. Empty if the directory has none."""
    bos_token_id: int | None
    context_length: int | None
    """The model's context length in tokens; an engine's may be set lower."""
    generation_defaults: GenerationDefaults
    tokenizer_source: str = ""
    """The kind and the file of its tokenizer, for people."""
    template_source: str = ""
    """Whose its chat template is, and why, for people; empty: it has none."""
    answers: str = ""
    """The format in which it answers, where the chat template is one of ours."""
    frame: Frame | None = None
    """What the tokenizer sets around each text; None: long texts can't be tokenized in parts."""
    floor: Floor = NO_FLOOR
    """What is known of the least number of tokens of a text."""
    use: ModelUse = NOTHING_SAID
    """What its files say of embedding and ranking."""
    response_template: str = ""
    """The checkpoint's own description of what the model writes, as JSON text."""
    family: Family | None = None
    """How the model places images and videos in its prompts; None: it takes text only."""

    def has_token(self, text: str) -> bool:
        """Whether one token of the vocabulary is written so."""
        return self.tokenizer.token_to_id(text) is not None

    @property
    def special_tokens(self) -> list[tuple[int, str]]:
        """The tokens that texts don't show, unless asked to."""
        added = self.tokenizer.get_added_tokens_decoder()
        return [(token_id, token.content) for token_id, token in added.items() if token.special]

    @property
    def soft_tokens(self) -> frozenset[int]:
        """Ids of the placeholders in whose place the model reads embeddings."""
        family = self.family
        return frozenset(family.soft_token(m) for m in family.modalities) if family else frozenset()

    @classmethod
    def load(cls, path: Path) -> TextModel:
        """Read one directory, as `load_all` does."""
        return cls.load_all([path])[0]

    @classmethod
    def load_all(cls, paths: Sequence[Path]) -> list[TextModel]:
        """Read directories; takes about a second for a large vocabulary.

        Raises:
            UnusableModelError: a file is missing or wrong.
        """
        return list(map(cls._load, paths, read_tokenizers(paths)))

    @classmethod
    def _load(cls, path: Path, files: TokenizerFiles) -> TextModel:
        facts = read_model_facts(path)
        tokenizer = Tokenizer.from_str(files.tokenizer)
        # A tokenizer.json may contain truncation from training, which would silently cut prompts.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        eos, bos = files.eos_token_id, files.bos_token_id
        pieces, frame = build_piece_table(tokenizer), frame_of(tokenizer)
        return cls(
            tokenizer=tokenizer,
            pieces=pieces,
            chat_template=ChatTemplate(files.templates, files.special_tokens),
            vocab_size=max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1,
            eos_token_ids=facts.eos_token_ids or (() if eos is None else (eos,)),
            bos_token_id=bos if facts.bos_token_id is None else facts.bos_token_id,
            context_length=facts.context_length,
            generation_defaults=facts.generation_defaults,
            tokenizer_source=files.tokenizer_source,
            template_source=files.template_source,
            answers=files.answers,
            frame=frame,
            floor=floor_of(tokenizer, frame, pieces),
            use=_read_use(path),
            response_template=files.response_template,
            family=_load_family(path),
        )

    def encode(self, text: str, *, add_special_tokens: bool) -> MutableSequence[int]:
        """Tokenize; ``add_special_tokens`` for raw prompts, not for rendered templates.

        Takes about 0.5 us per character: tokenize long texts in a thread. A long text's ids are an
        array: a list takes ten times the memory, and what it leaves keeps the process large.
        """
        if len(text) < _SHORT_CHARS:
            # Faster than releasing the GIL and waiting for it while the event loop is busy.
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        if len(text) <= PART_CHARS or self.frame is None:
            return self._encode(text, add_special_tokens=add_special_tokens)
        ids = array("I", self.frame.before if add_special_tokens else ())
        for part in parts_of(text):
            stop_if_gone()
            ids += array("I", self._encode(part, add_special_tokens=False))
        if add_special_tokens:
            ids.extend(self.frame.behind)
        return ids

    def _encode(self, text: str | tuple[str, str], *, add_special_tokens: bool) -> list[int]:
        # The library's `encode` keeps the GIL, its batch calls release it.
        chars = len(text) if isinstance(text, str) else sum(map(len, text))
        with _ALONE if chars > _UNCUT_CHARS else contextlib.nullcontext():
            stop_if_gone()
            batch = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return batch[0].ids

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Tokenize two texts as one input, with the special tokens that the tokenizer adds.

        It releases the GIL: tokenize long texts in a thread.
        """
        return self._encode((first, second), add_special_tokens=True)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of all ids, as `detokenizer` returns it in parts."""
        text = detokenizer(self, skip_special_tokens=skip_special_tokens)
        parts = []
        for start in range(0, len(ids), _DECODED_AT_ONCE):
            stop_if_gone()
            parts.append(text.push(ids[start : start + _DECODED_AT_ONCE]))
        return "".join(parts) + text.flush()

    def decode_seconds(self, count: int) -> float:
        return count * (3e-6 if self.pieces is None else 0.1e-6)

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes inside a text, a special token's name; b"" if unknown.

        They may be part of a character. For byte-level and SentencePiece tokenizers the tokens'
        bytes joined are the text's bytes.
        """
        if not 0 <= token_id < self.vocab_size:
            return b""
        if self.pieces is None:
            return self.tokenizer.decode([token_id], skip_special_tokens=False).encode()
        return self.pieces.every[token_id]


def _read_use(path: Path) -> ModelUse:
    try:
        return read_use(path)
    except UnusableModulesError as error:
        raise UnusableModelError(f"{path}: {error}") from error


def _load_family(path: Path) -> Family | None:
    try:
        return load_family(path)
    except UnusableFamilyError as exc:
        log.warning("the model is served for text only", reason=str(exc))
        return None
