"""The English that a simulated engine says in the tokens of a model, each token worked out here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from millstream_server.engines.adapter import EngineContext, TextEngineSettings
from millstream_server.engines.simulated.adapter import SimulatedSettings, engine_config
from millstream_server.engines.simulated.speech import Speech
from millstream_server.engines.simulated.state import adapter_shift
from millstream_server.generation.output import FinishReason
from millstream_server.runtime.settings import SettingsError
from tests.support.worker.simulated_engine import CONFIG, asked, running, stored, submitted

DEMO = Path("demo/model")
END = 5
PROMPT = (4, 700, 701)
SAID = (
    "I am a simulated engine and have no model. I read {} tokens, thought of nothing and say this "
    "to everyone."
)


def speech() -> Speech:
    made = Speech.load(DEMO)
    assert made is not None
    return made


def ids(text: str) -> list[int]:
    tokenizer: Any = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    return [*tokenizer.encode(text, add_special_tokens=False).ids, END]


async def test_an_answer_ends_by_itself_and_goes_on_elsewhere_where_it_was_left() -> None:
    config = replace(CONFIG, vocab_size=2048, speech=speech(), eos_token_id=END)
    whole = ids(SAID.format(len(PROMPT)))
    assert 20 <= len(whole) <= 60
    async with running(config) as (engine, followed):
        sink = submitted(engine, asked(PROMPT, 90))
        finish = await sink.result()
        assert (finish.reason, sink.token_ids) == (FinishReason.STOP, whole)
        assert finish.matched_token_id == END
        full = (len(PROMPT) + len(whole) - 1) // 4 * 4  # the last token has no KV
        assert followed.told == [(0, stored([*PROMPT, *whole][:full]))]
        for said in (1, 7, len(whole) - 1):
            rest = submitted(engine, asked([*PROMPT, *whole[:said]], 90))
            await rest.result()
            assert rest.token_ids == whole[said:]


async def test_who_ignores_the_end_is_answered_anew() -> None:
    made = speech().tokens(PROMPT, 0)
    first = ids(SAID.format(len(PROMPT)))
    again = ids(SAID.format(len(PROMPT) + len(first)))
    assert [next(made) for _ in [*first, *again]] == first + again


def test_the_shift_of_adapters_and_media_is_said() -> None:
    shift = adapter_shift("law")
    whole = ids(SAID.format(3) + f" Media, weights and adapters add up to {shift}.")
    assert speech().answer(3, shift) == whole
    rest = speech().tokens([*PROMPT, *whole[:30]], shift)
    assert [next(rest) for _ in whole[30:]] == whole[30:]
    other = speech().tokens([*PROMPT, *whole[:-1]], shift + 1)  # not its own answer
    assert next(other) == whole[0]


@pytest.mark.parametrize(("vocab_size", "speaks"), [(0, True), (2048, False)])
def test_it_speaks_unless_told_to_count(vocab_size: int, *, speaks: bool) -> None:
    context = EngineContext(common=TextEngineSettings(), model_path=DEMO, model_name="demo")
    config = engine_config(SimulatedSettings(vocab_size=vocab_size), context)
    assert (config.speech is not None, config.eos_token_id == END) == (speaks, speaks)


def test_a_model_without_a_tokenizer_is_counted_in(tmp_path: Path) -> None:
    assert Speech.load(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(SettingsError, match="give -- --vocab-size N"):
        Speech.load(tmp_path)
