"""A model without weights whose chats a simulated engine answers with the alphabet."""

from __future__ import annotations

import itertools
import json
import string
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}@{% endif %}"
)
_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 440


def alphabet_model(folder: Path) -> Path:
    """Write the model's files into ``folder``, which may not exist yet; return it.

    A byte is a token: ids 3 to 96 are the ASCII characters from "!" to "~" in their order. A
    rendered conversation ends with "@", and a simulated engine counts on from there: "ABCDEFG…".
    Ids from 259 on are pairs of letters; no text is encoded to them.
    """
    pairs = map("".join, itertools.product(string.ascii_lowercase, repeat=2))
    tokens = [*_SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *pairs][:VOCAB_SIZE]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL_TOKENS))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    files = {
        "tokenizer_config": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": _TEMPLATE,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
        },
        "config": {"model_type": "llama", "max_position_embeddings": 4096},
        "generation_config": {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
    }
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder
