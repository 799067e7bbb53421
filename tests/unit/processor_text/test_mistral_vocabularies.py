"""Vocabularies that Mistral gives with its own package, against that package.

It is in vLLM's environment only: SGLang's pins exclude its numpy.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from millstream_server.processor.text.tokenizer import TextModel
from tests.support.models.odd_texts import odd_texts

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore:builtin type:DeprecationWarning"),
]
_TEXTS = 2_000
_SENTENCEPIECE = ("tokenizer.model.v1", "mistral_instruct_tokenizer_241114.model.v7")


@pytest.mark.parametrize("name", [*_SENTENCEPIECE, "tekken_240911.json"])
def test_ids_are_those_of_mistral_common(tmp_path: Path, name: str) -> None:
    mistral_common = pytest.importorskip("mistral_common")
    from mistral_common.tokens.tokenizers.sentencepiece import (  # noqa: PLC0415
        SentencePieceTokenizer,
    )
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer  # noqa: PLC0415

    file = Path(mistral_common.__file__).parent / "data" / name
    tekken = name.endswith(".json")
    shutil.copy(file, tmp_path / ("tekken.json" if tekken else "tokenizer.model"))
    maker = Tekkenizer.from_file(file) if tekken else SentencePieceTokenizer(file)
    model = TextModel.load(tmp_path)
    for text in odd_texts(_TEXTS):
        ours = list(model.encode(text, add_special_tokens=True))
        assert ours == maker.encode(text, bos=True, eos=False), text
