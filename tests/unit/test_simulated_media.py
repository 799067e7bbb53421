"""The simulated engine's output with images and videos can be worked out by hand."""

from __future__ import annotations

import asyncio
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from millstream_server.control.engine import Role
from millstream_server.engines.adapter import EngineContext, TextEngineSettings
from millstream_server.engines.simulated.adapter import SimulatedSettings, engine_config
from millstream_server.engines.simulated.engine import SimulatedConfig, SimulatedEngine
from millstream_server.generation.output import CollectingSink, Finish
from millstream_server.generation.request import GenerationRequest, Prompt
from millstream_server.generation.ticket import Ticket
from millstream_server.media.items import Modality
from millstream_server.runtime.errors import KvTransferError
from millstream_server.runtime.settings import SettingsError
from tests.support.media.media_requests import MODEL, fetched, geometry_only, item, request, tensor
from tests.support.models.vision_models import make_vision_model

CONFIG = SimulatedConfig(vocab_size=100, context_length=64, media=MODEL)
TWO = fetched(request(item("a", 2), item("b", 8)))


def by_hand(asked: GenerationRequest) -> list[int]:
    """Work out the tokens, from the rule in `engines.simulated.state`."""
    step = 1
    for place, one in enumerate(asked.prompt.media, 1):
        assert one.tensor is not None
        step += place * (zlib.crc32(one.digest) + zlib.crc32(one.tensor.data))
    # The sums are modulo 2**32, of which 100 is no divisor.
    digests = sum(p * zlib.crc32(o.digest) for p, o in enumerate(asked.prompt.media, 1))
    tensors = step - 1 - digests
    step = 1 + digests % 2**32 + tensors % 2**32
    last = asked.token_ids[-1]
    return [(last + n * step) % 100 for n in range(1, asked.sampling.max_new_tokens + 1)]


async def generated(
    asked: GenerationRequest, config: SimulatedConfig = CONFIG
) -> tuple[list[int], Finish]:
    engine = SimulatedEngine(config)
    await engine.start(lambda _: None)
    sink = CollectingSink()
    try:
        engine.submit(asked, sink)
        finish = await sink.result()
    finally:
        await engine.close()
    return sink.token_ids, finish


async def test_the_rule() -> None:
    tokens, finish = await generated(TWO)
    assert tokens == by_hand(TWO)
    assert (finish.prompt_tokens, finish.media_tokens) == (20, 4)


async def test_items_order_and_bytes_all_count() -> None:
    swapped = fetched(request(item("b", 2), item("a", 8)))
    other_bytes = fetched(request(item("a", 2), item("b", 8)), {"b": tensor("c", (2, 8))})
    seen = {tuple((await generated(asked))[0]) for asked in (TWO, swapped, other_bytes)}
    assert len(seen) == 3


async def test_a_request_continued_with_its_tokens_goes_on_the_same() -> None:
    longer = replace(TWO, sampling=replace(TWO.sampling, max_new_tokens=6))
    tokens, _ = await generated(longer)
    prompt = Prompt([*TWO.token_ids, *tokens[:2]], TWO.prompt.media)
    assert (await generated(replace(TWO, prompt=prompt)))[0] == tokens[2:]


async def test_a_pair_says_the_same_and_decode_needs_geometry_alone() -> None:
    prefill = SimulatedEngine(replace(CONFIG, role=Role.PREFILL))
    decode = SimulatedEngine(replace(CONFIG, role=Role.DECODE))
    info = await prefill.start(lambda _: None)
    await decode.start(lambda _: None)
    try:
        for room, (asked, at_decode) in enumerate(
            [(TWO, TWO), (TWO, request(item("b", 2), item("a", 8)))]
        ):
            ticket = Ticket(info.bootstrap_host, info.bootstrap_port, room)
            first, second = CollectingSink(), CollectingSink()
            prefill.submit(replace(asked, ticket=ticket, engine_id="p"), first)
            decode.submit(replace(geometry_only(at_decode), ticket=ticket, engine_id="d"), second)
            if at_decode is asked:
                assert (await second.result()).media_tokens == 4
                assert second.token_ids == by_hand(asked)
            else:
                with pytest.raises(KvTransferError, match="different prompts"):
                    await second.result()
            await asyncio.wait_for(first.result(), 5)
    finally:
        await decode.close()
        await prefill.close()


@pytest.mark.parametrize("family", ["qwen3_vl", None])
def test_a_models_files_say_what_it_takes(tmp_path: Path, family: str | None) -> None:
    if family == "qwen3_vl":
        make_vision_model(tmp_path, "qwen3_vl")
    context = EngineContext(
        role=Role.AGGREGATED,
        model_path=tmp_path,
        model_name="m",
        common=TextEngineSettings(),
    )
    config = engine_config(SimulatedSettings(), context)
    media = config.media
    if family is None:
        assert media is None
        assert config.vocab_size == 32000
        (tmp_path / "config.json").write_text('{"vocab_size": 321}')
        assert engine_config(SimulatedSettings(), context).vocab_size == 321
        assert engine_config(SimulatedSettings(vocab_size=5), context).vocab_size == 5
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(SettingsError, match="has no usable vocab_size; give -- --vocab-size"):
            engine_config(SimulatedSettings(), context)
    else:
        assert media is not None
        assert (media.family, media.embedding_width, media.pixel_shape) == (family, 256, (1536,))
        assert set(media.soft_tokens) == set(Modality)
