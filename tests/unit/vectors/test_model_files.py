"""What a model's files say of its use, and what can't be done of it; no engine is needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millstream_server.embedding.model_files import (
    NOTHING_SAID,
    Answers,
    UnusableModulesError,
    lacks_answers,
    read_use,
    separator_of,
)
from tests.support.models.vector_models import write_modules


def test_a_folder_without_files_says_nothing(tmp_path: Path) -> None:
    assert read_use(tmp_path) == NOTHING_SAID.__class__(modules=[])


def test_modules_pooling_answers_and_prompts_are_read(tmp_path: Path) -> None:
    pooling = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}
    write_modules(
        tmp_path,
        Pooling=pooling | {"include_prompt": False},
        Dense={},
        Normalize={},
        LogitScore={"true_token_id": 3, "false_token_id": None},
    )
    # The pooling's file counts by the folder that modules.json names.
    said = {"prompts": {"query": "find: ", "document": ""}, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(said))
    use = read_use(tmp_path)
    assert (use.pooling, use.pools_prompt) == ("cls+mean", False)
    assert [module.kind for module in use.further] == ["Dense"]
    assert use.answers == Answers(3, None)
    assert (dict(use.prompts), use.default_prompt) == (said["prompts"], "query")


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        ("modules.json", "{", "modules.json can't be read"),
        ("modules.json", "{}", "modules.json must hold a list"),
        ("modules.json", '[{"type": "a.Dense", "path": "../other"}]', "a folder inside"),
        ("modules.json", '[{"type": "a.LogitScore", "path": ""}]', "true_token_id"),
        ("config_sentence_transformers.json", '{"prompts": []}', ""),
        ("config_sentence_transformers.json", '{"default_prompt_name": "q"}', "'q' is no prompt"),
    ],
)
def test_files_that_are_wrong_are_named(
    tmp_path: Path, file: str, content: str, sentence: str
) -> None:
    (tmp_path / file).write_text(content)
    if not sentence:
        assert not read_use(tmp_path).prompts
        return
    with pytest.raises(UnusableModulesError, match=sentence):
        read_use(tmp_path)


@pytest.mark.parametrize(
    "vocabulary",
    [{"[SEP]": 4, "yes": 5, "no": 6}, [["a", 0.0], ["yes", -1.0], ["no", -2.0]]],
)
def test_tokens_are_found_in_any_vocabulary(tmp_path: Path, vocabulary: Any) -> None:
    content = {"model": {"vocab": vocabulary}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    assert lacks_answers(tmp_path)
    if isinstance(vocabulary, dict):
        assert separator_of(tmp_path) == 4
    else:
        with pytest.raises(UnusableModulesError, match="no token"):
            separator_of(tmp_path)
