"""The English that a simulated engine says in the tokens of a model, each token worked out here."""

from __future__ import annotations

import json
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


CALL = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'


def prompt_of(text: str) -> list[int]:
    return ids(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n<think>\n")[:-1]


@pytest.mark.parametrize("said", [CALL, "Hm.\n</think>\n\nYes.", 'a "quoted" é\\'])
def test_it_says_what_it_is_told_also_from_the_middle(said: str) -> None:
    prompt, whole = prompt_of(f"Please say {json.dumps(said)}."), ids(said)
    for done in (0, 1, len(whole) - 1):
        made = speech().tokens([*prompt, *whole[:done]], 0)
        assert [next(made) for _ in whole[done:]] == whole[done:]


def test_only_the_last_message_tells_it_what_to_say() -> None:
    first = prompt_of(f"say {json.dumps(CALL)}")
    result = [*first, *ids(CALL), *prompt_of("14:05 or so, says the clock")]
    assert next(speech().tokens(result, 0)) == ids(SAID.format(len(result)))[0]
    scripted = [*first, *ids(CALL), *prompt_of('14:05 say "It is late." ')]
    made = speech().tokens(scripted, 0)
    assert [next(made) for _ in ids("It is late.")] == ids("It is late.")


@pytest.mark.parametrize("text", ['say "', "say it", 'say "\\x"', 'say ""'])
def test_what_is_no_text_to_say_is_answered(text: str) -> None:
    prompt = prompt_of(text)
    made = speech().tokens(prompt, 0)
    assert [next(made) for _ in range(9)] == ids(SAID.format(len(prompt)))[:9]


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
