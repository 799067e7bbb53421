"""Tokenizers made of tiktoken's, tekken and sentencepiece files: names, what is refused."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millstream_server.processor.text.messages import ChatMessage, ChatRole
from millstream_server.processor.text.model_files import UnusableModelError
from millstream_server.processor.text.tokenizer import TextModel

_WORDS = ("hello", " the", "don't", "世界", "é")


def some_ranks() -> dict[bytes, int]:
    """Make a small vocabulary: all bytes, and joined neighbours of words in any order."""
    drawn, tokens = random.Random(28), [bytes([byte]) for byte in range(256)]
    pieces = [word.encode() for word in (*_WORDS, " ", "\n", "aa")]
    for piece in pieces:
        joined = sorted(
            {piece[i:j] for i in range(len(piece)) for j in range(i + 2, i + 5)}, key=len
        )
        tokens += [token for token in joined if token not in tokens and drawn.random() < 0.7]
    return {token: rank for rank, token in enumerate(tokens)}


def tiktoken_model(path: Path, model_type: str, **names: Any) -> None:
    ranks = some_ranks()
    lines = [b"%s %d" % (base64.b64encode(token), rank) for token, rank in ranks.items()]
    (path / "tiktoken.model").write_bytes(b"\n".join(lines))
    (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (path / "tokenizer_config.json").write_text(json.dumps(names))


def tekken_model(path: Path) -> None:
    ranks, pattern = some_ranks(), r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for token, rank in ranks.items()
    ]
    config = {
        "pattern": pattern,
        "default_vocab_size": len(ranks) + 30,
        "default_num_special_tokens": 30,
        "version": "v7",
    }
    (path / "tekken.json").write_text(json.dumps({"config": config, "vocab": vocabulary}))


def test_what_the_files_say_of_special_tokens(tmp_path: Path) -> None:
    first = len(some_ranks())
    named = {
        str(first): {"content": "[BOS]", "special": True},
        str(first + 2): {"content": "<|im_end|>", "special": True},
    }
    tiktoken_model(
        tmp_path,
        "kimi_k2",
        added_tokens_decoder=named,
        eos_token="<|im_end|>",  # noqa: S106 - a token of text
        bos_token="[BOS]",  # noqa: S106 - likewise
        auto_map={"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    )
    model = TextModel.load(tmp_path)
    assert model.vocab_size == first + 256
    assert (model.bos_token_id, model.eos_token_ids) == (first, (first + 2,))
    reserved = f"<|reserved_token_{first + 1}|>"
    ids = list(model.encode(f"[BOS]a{reserved}<|im_end|>", add_special_tokens=True))
    assert ids == [first, ord("a"), first + 1, first + 2]
    assert model.decode(ids) == "a"
    assert model.decode(ids, skip_special_tokens=False) == f"[BOS]a{reserved}<|im_end|>"
    assert model.tokenizer_source == "tiktoken: tiktoken.model"


def test_raw_prompts_begin_as_the_makers_do(tmp_path: Path) -> None:
    tekken_model(tmp_path)
    model = TextModel.load(tmp_path)
    assert list(model.encode("a", add_special_tokens=True)) == [1, 30 + ord("a")]
    assert model.eos_token_ids == (2,)
    assert model.template_source == "ours, mistral-v7: its tekken file has the version v7"


def test_a_tekken_file_names_the_efforts_of_reasoning(tmp_path: Path) -> None:
    tekken_model(tmp_path)
    found = json.loads((tmp_path / "tekken.json").read_text("utf-8"))
    found["config"]["version"] = "v15"
    efforts = {"type": "enum", "accepts_none": True, "default": "none", "values": ["high", "none"]}
    found["model_settings_builder"] = {"reasoning_effort": efforts}
    (tmp_path / "tekken.json").write_text(json.dumps(found))
    model = TextModel.load(tmp_path)
    assert model.template_source == "ours, mistral-v15: its tekken file has the version v15"
    prompt = model.chat_template.render([ChatMessage(ChatRole.USER, "hi")])
    assert prompt == (
        '<s>[MODEL_SETTINGS]{"reasoning_effort": "none"}[/MODEL_SETTINGS][INST]hi[/INST]'
    )


def _first_line(line: bytes) -> Callable[[Path], Any]:
    def write(path: Path) -> None:
        tiktoken_model(path, "kimi_k2")
        file = path / "tiktoken.model"
        rest = file.read_bytes().partition(b"\n")[2]
        (path / "tiktoken.model").write_bytes(rest + b"\n" + line)

    return write


def _without_config(path: Path) -> None:
    tiktoken_model(path, "qwen")
    (path / "config.json").unlink()


def _without_a_byte(path: Path) -> None:
    tiktoken_model(path, "kimi_k2")
    tokens = [token for token in some_ranks() if token != b"\x07"]
    lines = [b"%s %d" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)]
    (path / "tiktoken.model").write_bytes(b"\n".join(lines))


def _with_an_id_twice(path: Path) -> None:
    tiktoken_model(path, "kimi_k2", added_tokens_decoder={"7": {"content": "[BOS]"}})


def _with_another_count(path: Path) -> None:
    tekken_model(path)
    found = json.loads((path / "tekken.json").read_text("utf-8"))
    found["config"]["default_vocab_size"] += 1
    (path / "tekken.json").write_text(json.dumps(found))


@pytest.mark.parametrize(
    ("write", "sentence"),
    [
        (_without_a_byte, r"tiktoken\.model: it has no token for the byte 0x07"),
        (_with_an_id_twice, r"tiktoken\.model: the id of \[BOS\] is another token's"),
        (_with_another_count, r"tekken\.json: it has \d+ tokens, and says \d+"),
        (_first_line(b"AA== x"), r"tiktoken\.model: line \d+ is no token in base64 with its rank"),
        (_first_line(b""), r"tiktoken\.model: .* have gaps or repeat"),
        (
            _without_config,
            r"tiktoken\.model: it needs the pattern of its model.*model_type None",
        ),
        (
            lambda path: (path / "tokenizer.model").write_bytes(b"\x00\xff" * 40),
            r"tokenizer\.model: it is no sentencepiece model",
        ),
        (lambda path: (path / "tekken.json").write_text("{}"), r"tekken\.json: it can't be read"),
        (
            lambda path: (path / "tokenization_new.py").write_text("raise SystemExit"),
            r"tokenization_new\.py is code of the checkpoint, which isn't run",
        ),
        (lambda _: None, r"has no tokenizer\.json and none of tekken\.json"),
    ],
)
def test_what_cannot_be_read_is_refused_by_file(
    write: Callable[[Path], Any], sentence: str, tmp_path: Path
) -> None:
    write(tmp_path)
    with pytest.raises(UnusableModelError, match=sentence):
        TextModel.load(tmp_path)
