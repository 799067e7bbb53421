"""Which models SGLang embeds or ranks with, and which it would get wrong; no SGLang is needed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millstream_server.embedding.model_files import Answers
from millstream_server.engines.adapter import EngineContext, VectorEngineSettings
from millstream_server.engines.sglang.adapter import ADAPTER, embedder_config
from millstream_server.engines.sglang.config import engine_arguments
from millstream_server.engines.sglang.vector_model import read_model, with_ability
from millstream_server.runtime.errors import EngineFailedError
from millstream_server.runtime.settings import SettingsError
from tests.support.engines.engine_arguments import read_as
from tests.support.models.vector_models import write_modules

Write = Callable[..., Path]

_ONE_LABEL = {"id2label": {"0": "LABEL_0"}}
_RANKER = {
    "architectures": ["XLMRobertaForSequenceClassification"],
    "max_position_embeddings": 514,
    "pad_token_id": 1,
    **_ONE_LABEL,
}


_SERVER_ARGUMENTS = {
    "attention_backend",
    "chunked_prefill_size",
    "context_length",
    "device",
    "disable_cuda_graph",
    "disable_radix_cache",
    "disaggregation_mode",
    "dp_size",
    "dtype",
    "enable_metrics",
    "enable_multimodal",
    "incremental_streaming_output",
    "is_embedding",
    "json_model_override_args",
    "log_level",
    "max_running_requests",
    "max_total_tokens",
    "mem_fraction_static",
    "model_path",
    "page_size",
    "sampling_backend",
    "served_model_name",
    "skip_tokenizer_init",
    "sleep_on_idle",
}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def config(file: str = "config.json", /, **fields: Any) -> Path:
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"hidden_size": 64, **fields}))
        return tmp_path

    return config


def refused(path: Path) -> str:
    with pytest.raises(EngineFailedError) as caught:
        read_model(path)
    return caught.value.message


def test_a_decoder(write: Write) -> None:
    model = read_model(write(architectures=["Qwen3ForCausalLM"], matryoshka_dimensions=[32, 16]))
    assert (model.embeds, model.encoder_only, model.width) == (True, False, 64)
    assert (model.dimensions, model.positions, model.overrides) == ((16, 32), None, {})


def test_an_encoder(write: Write) -> None:
    model = read_model(write(architectures=["BertModel"], max_position_embeddings=512))
    assert (model.embeds, model.encoder_only, model.positions) == (True, True, 512)
    assert model.overrides == {"position_embedding_type": "absolute"}
    assert model.dimensions == ()


def test_a_ranker_has_no_width_and_scores_are_plain_logits(write: Write) -> None:
    activation = "torch.nn.modules.activation.Sigmoid"
    model = read_model(
        write(**_RANKER, sbert_ce_default_activation_function=activation, is_matryoshka=True)
    )
    assert (model.embeds, model.width, model.dimensions, model.positions) == (False, 0, (), 512)
    assert model.overrides["sbert_ce_default_activation_function"] is None


def test_dimensions_follow_the_files_unless_the_operator_names_others(write: Write) -> None:
    path = write(architectures=["Qwen3ForCausalLM"], is_matryoshka=True)
    assert read_model(path).dimensions == tuple(range(1, 65))
    assert read_model(path, [32, 8]).dimensions == (8, 32)
    with pytest.raises(EngineFailedError, match="name numbers from 1 to 64"):
        read_model(path, [65])


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "adds a bias to the heads"),
        ({"architectures": ["Qwen2ForSequenceClassification"]}, "adds a bias to the heads"),
        ({"architectures": ["T5EncoderModel"]}, "The model is a T5EncoderModel. Classes that"),
        ({}, "without architectures"),
        ({**_RANKER, "id2label": {"0": "a", "1": "b"}}, "has 2 labels: it classifies"),
        ({"architectures": _RANKER["architectures"]}, "has 2 labels"),
        (
            {"architectures": ["BertForSequenceClassification"], "type_vocab_size": 2} | _ONE_LABEL,
            "by segment types",
        ),
        (
            {
                "architectures": ["BertModel"],
                "max_position_embeddings": 9,
                "position_embedding_type": "relative_key",
            },
            "positions of the type 'relative_key'",
        ),
    ],
)
def test_what_would_be_wrong_is_refused(
    write: Write, fields: dict[str, Any], sentence: str
) -> None:
    assert sentence in refused(write(**fields))


@pytest.mark.parametrize(
    ("pooling", "refuses"),
    [
        ({"pooling_mode_cls_token": True}, ""),
        ({"pooling_mode": "cls"}, ""),
        ({}, ""),
        ({"pooling_mode_mean_tokens": True}, "'mean'"),
        ({"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True}, "'cls+max'"),
    ],
)
def test_pooling_that_sglang_ignores_is_refused(
    write: Write, pooling: dict[str, Any], refuses: str
) -> None:
    write("1_Pooling/config.json", **pooling)
    path = write(architectures=["BertModel"], max_position_embeddings=9)
    if refuses:
        assert refuses in refused(path)
    else:
        assert read_model(path).embeds


def test_a_layer_after_pooling_is_refused(write: Write, tmp_path: Path) -> None:
    path = write(architectures=["Qwen3ForCausalLM"])
    names = ["Transformer", "Pooling", "Normalize"]
    kinds = [{"type": f"sentence_transformers.models.{name}"} for name in names]
    (tmp_path / "modules.json").write_text(json.dumps(kinds))
    assert read_model(path).embeds
    kinds.append({"type": "sentence_transformers.models.Dense"})
    (tmp_path / "modules.json").write_text(json.dumps(kinds))
    assert "layer Dense after pooling" in refused(path)


def test_a_model_that_answers_generates(write: Write, tmp_path: Path) -> None:
    path = write(architectures=["Qwen3ForCausalLM"])
    write_modules(tmp_path, LogitScore={"true_token_id": 5, "false_token_id": 6})
    model = read_model(path)
    assert (model.embeds, model.answers) == (False, Answers(5, 6))
    assert not arguments(path)["is_embedding"]
    vocabulary = {"yes": 7, "no": 8}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    assert read_model(path, answers=("yes", "no")).answers == Answers(7, 8)
    for words in (("yes", "never"), ("yes",), ("no", "no")):
        with pytest.raises(EngineFailedError, match="--rank-answers"):
            read_model(path, answers=words)
    (tmp_path / "1_LogitScore" / "config.json").write_text('{"true_token_id": 5}')
    assert "the logit of one token" in refused(path)
    assert "generates text" in refused(write(**_RANKER))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "can't be read" in refused(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert "is not a JSON object" in refused(tmp_path)


def test_settings_that_are_wrong_are_named(write: Write) -> None:
    path = write(architectures=["BertModel"], max_position_embeddings=9)
    offer = ADAPTER.embedder
    assert offer is not None
    with pytest.raises(SettingsError, match="--dimensions: 'x' is not a whole number"):
        offer.make(None, context(path, dimensions=("8", "x")))
    with pytest.raises(SettingsError, match="--model-path is required"):
        offer.make(None, context(None))


def context(path: Path | None, **common: Any) -> EngineContext:
    common_settings = VectorEngineSettings(**common)
    return EngineContext(common=common_settings, model_path=path, model_name="m")


def arguments(path: Path, **settings: Any) -> dict[str, object]:
    """Return what SGLang is started with."""
    config = embedder_config(context(path, device="cpu", **settings))
    config = with_ability(config, read_model(path))
    return engine_arguments(config, _SERVER_ARGUMENTS)


def test_settings_reach_the_engine(write: Write) -> None:
    path = write(architectures=["Qwen3ForCausalLM"])
    made = arguments(
        path,
        max_running_requests=5,
        max_total_tokens=6,
        context_length=7,
        engine_args=read_as(page_size=2, dtype="bfloat16", log_level="error"),
    )
    assert made["is_embedding"]
    assert (made["dtype"], made["max_running_requests"]) == ("bfloat16", 5)
    assert (made["max_total_tokens"], made["context_length"]) == (6, 7)
    assert (made["page_size"], made["log_level"], made["served_model_name"]) == (2, "error", "m")
    assert "disable_radix_cache" not in made
    assert arguments(path)["max_running_requests"] == 64


def test_an_encoder_is_started_without_cache_and_chunks(write: Write) -> None:
    made = arguments(write(architectures=["BertModel"], max_position_embeddings=9))
    assert (made["disable_radix_cache"], made["chunked_prefill_size"]) == (True, -1)
    assert made["mem_fraction_static"] == 0.3
    assert json.loads(str(made["json_model_override_args"])) == {
        "position_embedding_type": "absolute"
    }


@pytest.mark.parametrize(
    ("engine_args", "sentence"),
    [({"is_embedding": False}, "'is_embedding' follows"), ({"dp_size": 2}, "dp_size is 1")],
)
def test_arguments_that_embedding_needs_cannot_be_changed(
    write: Write, engine_args: dict[str, object], sentence: str
) -> None:
    path = write(architectures=["Qwen3ForCausalLM"])
    with pytest.raises(EngineFailedError, match=sentence):
        arguments(path, engine_args=read_as(**engine_args))
