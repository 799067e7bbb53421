"""Loading a model directory's text side."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from millstream_server.processor.text.messages import ChatMessage, ChatRole
from millstream_server.processor.text.model_files import GenerationDefaults, UnusableModelError
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.runtime.errors import UnsupportedFeatureError
from tests.support.models.models import (
    byte_level_model,
    sample_texts,
    sentencepiece_model,
    token_id,
    unigram_model,
    wordpiece_model,
)

HELLO = [ChatMessage(ChatRole.USER, "Hello")]

LOAD_IN_A_BARE_PROCESS = """
import pathlib, socket, subprocess, sys
if sys.argv[2] == "without torch":
    sys.modules["torch"] = None
socket.socket.connect = None
import millstream_server.processor.text.detokenizer
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.processor.text.messages import ChatMessage, ChatRole
run, started = subprocess.run, []
subprocess.run = lambda command, **how: started.append(command) or run(command, **how)
_, model = TextModel.load_all([pathlib.Path(sys.argv[1])] * 2)
assert len(started) == 1, "one process reads all models"
prompt = model.chat_template.render([ChatMessage(ChatRole.USER, "Hello")])
assert model.decode(model.encode(prompt, add_special_tokens=False)).startswith("user")
loaded = [n for n in ("torch", "sglang", "transformers") if sys.modules.get(n) is not None]
assert not loaded, loaded
"""


@pytest.mark.parametrize("install", ["with torch", "without torch"])
def test_neither_torch_nor_transformers_nor_sglang_nor_the_network_is_touched(
    tmp_path: Path, install: str
) -> None:
    command = [
        sys.executable,
        "-c",
        LOAD_IN_A_BARE_PROCESS,
        str(byte_level_model(tmp_path)),
        install,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def test_what_a_directory_says(tmp_path: Path) -> None:
    model = TextModel.load(byte_level_model(tmp_path))
    assert model.vocab_size == 440
    assert model.context_length == 4096
    assert model.eos_token_ids == (model.tokenizer.token_to_id("<|im_end|>"),)
    assert model.bos_token_id is None
    assert model.generation_defaults == GenerationDefaults(temperature=0.7, top_p=0.8, top_k=20)
    assert model.chat_template.render(HELLO).startswith("<|im_start|>user\nHello")


def test_end_tokens_come_from_generation_config_first(tmp_path: Path) -> None:
    path = byte_level_model(
        tmp_path, config={"eos_token_id": 0}, generation_config={"eos_token_id": [2, 0]}
    )
    assert TextModel.load(path).eos_token_ids == (2, 0)
    path = byte_level_model(tmp_path, config={"eos_token_id": 0})
    assert TextModel.load(path).eos_token_ids == (0,)


def test_multimodal_configs_hold_the_text_models_values_one_level_down(tmp_path: Path) -> None:
    text = {"max_position_embeddings": 77, "eos_token_id": 1, "bos_token_id": 0}
    model = TextModel.load(
        byte_level_model(tmp_path, config={"max_position_embeddings": None, "text_config": text})
    )
    assert (model.context_length, model.eos_token_ids, model.bos_token_id) == (77, (1,), 0)


@pytest.mark.parametrize(
    ("generation_config", "temperature"),
    [
        ({"temperature": None}, None),
        ({"temperature": 0.7}, 0.7),
        ({"do_sample": None, "temperature": 0.7}, 0.7),
        ({"do_sample": True, "temperature": 0.7}, 0.7),
        ({"do_sample": True, "temperature": None}, None),
        ({"do_sample": False, "temperature": None}, 0.0),
        ({"do_sample": False, "temperature": 0.7}, 0.0),
    ],
)
def test_a_model_that_says_do_sample_false_is_greedy_by_default(
    tmp_path: Path, generation_config: dict[str, object], temperature: float | None
) -> None:
    model = TextModel.load(byte_level_model(tmp_path, generation_config=generation_config))
    assert model.generation_defaults.temperature == temperature


def test_the_demo_model_is_greedy_by_default() -> None:
    demo = Path(__file__).parents[3] / "demo" / "model"
    assert TextModel.load(demo).generation_defaults == GenerationDefaults(temperature=0.0)


def test_a_bare_tokenizer_is_enough(tmp_path: Path) -> None:
    byte_level_model(tmp_path)
    for name in ("config", "generation_config", "tokenizer_config"):
        (tmp_path / f"{name}.json").unlink()
    model = TextModel.load(tmp_path)
    assert (model.context_length, model.eos_token_ids) == (None, ())
    assert model.generation_defaults == GenerationDefaults()
    with pytest.raises(UnsupportedFeatureError, match="no chat template"):
        model.chat_template.render(HELLO)


def test_templates_are_found_in_their_own_files(tmp_path: Path) -> None:
    byte_level_model(tmp_path, tokenizer_config={"chat_template": None})
    (tmp_path / "chat_template.jinja").write_text("from a file")
    assert TextModel.load(tmp_path).chat_template.render(HELLO) == "from a file"
    named = [{"name": "default", "template": "named"}, {"name": "tool_use", "template": "tools"}]
    (tmp_path / "chat_template.jinja").unlink()
    byte_level_model(tmp_path, tokenizer_config={"chat_template": named})
    assert TextModel.load(tmp_path).chat_template.render(HELLO) == "named"


def test_special_tokens_are_added_only_when_asked_for(tmp_path: Path) -> None:
    model = TextModel.load(sentencepiece_model(tmp_path))
    plain = model.encode("hello", add_special_tokens=False)
    assert model.encode("hello", add_special_tokens=True) == [1, *plain]
    assert model.bos_token_id == 1
    assert model.decode([1, *plain]) == "hello"
    assert model.decode([1, *plain], skip_special_tokens=False) == "<s> hello"


def test_encoding_in_a_thread_leaves_the_event_loop_running(tmp_path: Path) -> None:
    model = TextModel.load(byte_level_model(tmp_path))
    text = " ".join(sample_texts(12_000))
    thread = threading.Thread(target=lambda: model.encode(text, add_special_tokens=False))
    thread.start()
    ticks = 0
    while thread.is_alive():
        ticks += 1
        time.sleep(0.0005)
    # Some 300; with the interpreter lock held, one or two.
    assert ticks > 10


def test_a_baked_in_truncation_is_taken_out(tmp_path: Path) -> None:
    path = byte_level_model(tmp_path)
    content = json.loads((path / "tokenizer.json").read_text())
    content["truncation"] = {
        "direction": "Right",
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    content["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    (path / "tokenizer.json").write_text(json.dumps(content))
    model = TextModel.load(path)
    text = "the quick brown fox jumps over a lazy dog"
    assert model.tokenizer.decode(model.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize("make", [byte_level_model, sentencepiece_model])
def test_token_bytes_join_to_the_text(make: Callable[[Path], Path], tmp_path: Path) -> None:
    model = TextModel.load(make(tmp_path))
    for text in sample_texts(100):
        ids = model.encode(text, add_special_tokens=False)
        joined = b"".join(model.token_bytes(token_id) for token_id in ids).decode()
        assert joined.removeprefix(" ") == text


def test_token_bytes_of_single_tokens(tmp_path: Path) -> None:
    model = TextModel.load(sentencepiece_model(tmp_path))
    assert model.token_bytes(token_id(model, "<0xE4>")) == b"\xe4"
    assert model.token_bytes(token_id(model, "<0xE4>")).decode("utf-8", "replace") == "\ufffd"
    assert model.token_bytes(token_id(model, "▁")).decode("utf-8", "replace") == " "
    assert model.token_bytes(token_id(model, "</s>")).decode("utf-8", "replace") == "</s>"
    assert model.token_bytes(model.vocab_size) == model.token_bytes(-1) == b""
    words = TextModel.load(wordpiece_model(tmp_path / "wordpiece"))
    assert words.token_bytes(token_id(words, "[SEP]")).decode("utf-8", "replace") == "[SEP]"
    letters = TextModel.load(unigram_model(tmp_path / "unigram"))
    assert letters.token_bytes(token_id(letters, "▁")).decode("utf-8", "replace") == " "


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        ("config.json", "{", "cannot be read as JSON"),
        ("config.json", "[]", "must hold a JSON object"),
        ("config.json", '{"max_position_embeddings": "many"}', "max_position_embeddings"),
        ("generation_config.json", '{"temperature": "hot"}', "temperature must be a number"),
        ("generation_config.json", '{"do_sample": "no"}', "do_sample must be true or false"),
        ("generation_config.json", '{"eos_token_id": [1, true]}', "eos_token_id"),
        ("tokenizer.json", "{", r"cannot be loaded: tokenizer\.json: "),
        ("tokenizer_config.json", '{"chat_template": "{% for %}"}', "not valid Jinja"),
    ],
)
def test_wrong_files_stop_the_start_with_a_sentence(
    tmp_path: Path, file: str, content: str, sentence: str
) -> None:
    byte_level_model(tmp_path)
    (tmp_path / file).write_text(content)
    with pytest.raises(UnusableModelError, match=sentence):
        TextModel.load(tmp_path)


def test_a_directory_without_tokenizer_is_no_name_on_a_hub(tmp_path: Path) -> None:
    with pytest.raises(UnusableModelError, match=r"has no tokenizer\.json"):
        TextModel.load(tmp_path / "gpt2")
