"""Mistral's tekken.json: tokens in base64 by rank, behind a number of special tokens."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from millstream_server.processor.text.vocabularies.byte_pairs import byte_pair_tokenizer
from millstream_server.processor.text.vocabularies.vocabulary import (
    BrokenVocabularyError,
    Vocabulary,
    put_bos_first,
)

_OLD_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "[TOOL_CONTENT]",
)
"""Those of files up to version 7, which don't list them."""
_BOS, _EOS = "<s>", "</s>"


def read_tekken(file: Path) -> Vocabulary:
    """Read a file.

    Raises:
        BrokenVocabularyError: it is broken.
    """
    try:
        found = json.loads(file.read_bytes())
        return _vocabulary(found)
    except BrokenVocabularyError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BrokenVocabularyError(f"it can't be read: {error!r}") from error


def _vocabulary(found: dict[str, Any]) -> Vocabulary:
    config = found["config"]
    count = int(config["default_num_special_tokens"])
    inner = int(config["default_vocab_size"]) - count
    ranks = {base64.b64decode(t["token_bytes"]): t["rank"] for t in found["vocab"][:inner]}
    if len(ranks) != inner:
        raise BrokenVocabularyError(f"it has {len(ranks)} tokens, and says {inner}")
    listed = found.get("special_tokens")
    texts = [t["token_str"] for t in listed] if listed is not None else list(_OLD_SPECIAL)
    texts += [f"<SPECIAL_{place}>" for place in range(len(texts), count)]
    special = {text: place for place, text in enumerate(texts)}
    tokenizer = byte_pair_tokenizer(ranks, config["pattern"], special, first_id=count)
    put_bos_first(tokenizer, _BOS)
    return Vocabulary(
        tokenizer=tokenizer,
        special_tokens={"bos_token": _BOS, "eos_token": _EOS},
        version=str(config["version"]),
        efforts=_efforts(found),
    )


def _efforts(found: dict[str, Any]) -> tuple[str, ...]:
    told = (found.get("model_settings_builder") or {}).get("reasoning_effort")
    if not told:
        return ()
    default = str(told["default"])
    return default, *(str(each) for each in told["values"] if each != default)
