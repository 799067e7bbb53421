"""Tokenizers made of tiktoken's, tekken and sentencepiece files: ids, streams, what is refused."""

from __future__ import annotations

import base64
import json
import random
import subprocess
import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import regex  # type: ignore[import-untyped]  # it has no types

from millstream_server.processor.text.detokenizer import detokenizer
from millstream_server.processor.text.model_files import UnusableModelError
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.processor.text.vocabularies.tiktoken_file import FAMILIES

TEXTS = 10_000
_WORDS = (
    *("hello", "World", " the", "don't", "I'LL", "12345", "\n\n", "  ", "\t", "世界", "ÿ", "é"),
    *(
        "e\u0301",
        "😀",
        "👨\u200d👩",
        "мир",
        "عربى",
        "한국어",
        "カナ",
        "->",
        "\u00a0",
        "\r\n",
        "aaaa",
    ),
)
Encode = Callable[[str], Sequence[int]]


def random_texts(count: int, *, assigned: bool = False) -> Iterator[str]:
    """Make texts of words and of any characters; ``assigned``: of words alone."""
    drawn = random.Random(28)
    for number in range(count):
        if assigned or number % 2:
            yield "".join(drawn.choices(_WORDS, k=drawn.randint(0, 12)))
        else:
            codes = [drawn.choice((0x80, 0x3000, 0x11_0000)) for _ in range(drawn.randint(0, 12))]
            points = [drawn.randrange(most) for most in codes]
            # Not sentencepiece's own sign for a space, which it reads as one.
            yield "".join(chr(p) for p in points if not 0xD800 <= p < 0xE000 and p != ord("▁"))


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


def by_rank(ranks: dict[bytes, int], pattern: str) -> Encode:
    """Tokenize as tiktoken says it does: join the leftmost neighbours of the lowest rank."""
    found = regex.compile(pattern, regex.V1)

    def join(piece: bytes) -> list[int]:
        if piece in ranks:
            return [ranks[piece]]
        parts = [piece[i : i + 1] for i in range(len(piece))]
        while len(parts) > 1:
            pairs = [
                (ranks.get(parts[i] + parts[i + 1], 1 << 30), i) for i in range(len(parts) - 1)
            ]
            rank, at = min(pairs)
            if rank == 1 << 30:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return [ranks[part] for part in parts]

    return lambda text: [i for piece in found.findall(text) for i in join(piece.encode())]


def tiktoken_model(path: Path, model_type: str, **names: Any) -> Encode:
    ranks = some_ranks()
    lines = [b"%s %d" % (base64.b64encode(token), rank) for token, rank in ranks.items()]
    (path / "tiktoken.model").write_bytes(b"\n".join(lines))
    (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (path / "tokenizer_config.json").write_text(json.dumps(names))
    return by_rank(ranks, FAMILIES[model_type].pattern)


def tekken_model(path: Path) -> Encode:
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
    plain = by_rank(ranks, pattern)
    return lambda text: [token_id + 30 for token_id in plain(text)]


def sentencepiece_model(path: Path, kind: str) -> Encode:
    """Train a model, and encode `random_texts` with it, in a process of its own.

    In one that has used the tokenizers library, sentencepiece's constructor crashes.
    """
    texts = list(random_texts(TEXTS))
    work = [kind, str(path / "tokenizer"), list(random_texts(2000, assigned=True)), texts]
    done = subprocess.run(
        [sys.executable, "-c", _WITH_SENTENCEPIECE],
        input=json.dumps(work),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=100,
    )
    ids: dict[str, list[int]] = dict(zip(texts, json.loads(done.stdout), strict=True))
    return ids.__getitem__


_WITH_SENTENCEPIECE = """
import json, sys, sentencepiece
kind, prefix, lines, texts = json.load(sys.stdin)
sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(lines), model_prefix=prefix, model_type=kind, vocab_size=480,
    byte_fallback=True, character_coverage=0.99, minloglevel=2,
    normalization_rule_name="identity", remove_extra_whitespaces=False,
)
encode = sentencepiece.SentencePieceProcessor(model_file=prefix + ".model").encode
json.dump([encode(text) for text in texts], sys.stdout)
"""


KINDS: dict[str, Callable[[Path], Encode]] = {
    "kimi": lambda path: tiktoken_model(path, "kimi_k2"),
    "qwen": lambda path: tiktoken_model(path, "qwen"),
    "llama3": lambda path: tiktoken_model(path, "llama"),
    "tekken": tekken_model,
    "bpe": lambda path: sentencepiece_model(path, "bpe"),
    "unigram": lambda path: sentencepiece_model(path, "unigram"),
}


def _is_assigned(char: str) -> bool:
    return unicodedata.category(char) not in ("Cn", "Co")


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_the_makers_and_a_stream_is_the_whole(kind: str, tmp_path: Path) -> None:
    wanted = KINDS[kind](tmp_path)
    model = TextModel.load(tmp_path)
    of_pieces = kind in ("bpe", "unigram")
    drawn, compared = random.Random(1), 0
    for text in random_texts(TEXTS):
        ids = list(model.encode(text, add_special_tokens=False))
        # Libraries differ in what they take unassigned characters for.
        if of_pieces or all(map(_is_assigned, text)):
            assert ids == list(wanted(text)), text
            compared += 1
        stream, left, said = detokenizer(model), list(ids), []
        while left:
            size = drawn.randint(1, 3)
            said.append(stream.push(left[:size]))
            del left[:size]
        whole = "".join(said) + stream.flush()
        assert whole == model.decode(ids)
        assert whole == text
        joined = b"".join(map(model.token_bytes, ids)).decode()
        assert (joined.removeprefix(" ") if of_pieces else joined) == text
    assert compared > TEXTS // 2


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
    assert model.template_source == "ours, mistral-v7: tekken.json has the version v7"


def _first_line(line: bytes) -> Callable[[Path], Any]:
    def write(path: Path) -> None:
        tiktoken_model(path, "kimi_k2")
        file = path / "tiktoken.model"
        rest = file.read_bytes().partition(b"\n")[2]
        (path / "tiktoken.model").write_bytes(rest + b"\n" + line)

    return write


@pytest.mark.parametrize(
    ("write", "sentence"),
    [
        (_first_line(b"AA== x"), r"tiktoken\.model, line \d+: is no token in base64 with its rank"),
        (_first_line(b""), "have gaps or repeat"),
        (
            lambda path: (tiktoken_model(path, "qwen"), (path / "config.json").unlink()),
            r"tiktoken\.model needs the pattern of its model.*model_type None",
        ),
        (
            lambda path: (path / "tokenizer.model").write_bytes(b"\x00\xff" * 40),
            r"tokenizer\.model is no sentencepiece model",
        ),
        (lambda path: (path / "tekken.json").write_text("{}"), r"tekken\.json can't be read"),
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
