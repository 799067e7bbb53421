"""vLLM's KV events as ours. Payloads are made as vLLM 0.32 makes them; vLLM isn't needed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from millstream_server.engines.kv_translation import UnreadableBatchError
from millstream_server.engines.vllm.kv_translation import Translation
from millstream_server.kv_cache.events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent
from millstream_server.kv_cache.hashing import Namespace, block_hashes

BLOCK = 4
IDS = [*range(100, 112)]


def _stored(hashes: list[int], ids: list[int], **fields: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None,
        "token_ids": ids,
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        **fields,
    }


def _removed(*hashes: int, **fields: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", **fields}


def _batch(translation: Translation, *events: dict[str, Any]) -> list[KvEvent]:
    return translation.batch(msgspec.msgpack.encode([1.5, list(events), 0]))


def test_blocks_have_the_hashes_that_a_router_computes() -> None:
    first, second, third = block_hashes(IDS, BLOCK)
    translation = Translation()
    assert _batch(translation, _stored([1, 2], IDS[:8])) == [BlocksStored([first, second])]
    more = _stored([3], IDS[8:], parent_block_hash=2)
    assert _batch(translation, more) == [BlocksStored([third], second)]
    assert _batch(translation, _removed(3, 99)) == [BlocksRemoved([third])]


def test_a_salt_and_an_adapter_separate_blocks() -> None:
    translation = Translation()
    salted = _stored([1], IDS[:4], extra_keys=[["s"]])
    (told,) = _batch(translation, salted)
    assert told == BlocksStored(block_hashes(IDS[:4], BLOCK, Namespace(salt="s")))
    ours = block_hashes(IDS[:4], BLOCK, Namespace("ada", "s"))
    for number in (1, 2):  # loaded twice under one name
        name = f"ada#{number}"
        event = _stored([10 + number], IDS[:4], lora_name=name, extra_keys=[[name, "s"]])
        assert _batch(translation, event) == [BlocksStored(ours, adapter="ada")]
    assert _batch(translation, _removed(11)) == []
    assert translation.without("ada") == [BlocksRemoved(ours)]
    assert translation.without("ada") == []


def test_blocks_with_media_and_those_after_them_are_not_told() -> None:
    translation = Translation()
    first, *_ = block_hashes(IDS, BLOCK)
    event = _stored([1, 2, 3], IDS, extra_keys=[None, [["picture", 0]], None])
    assert _batch(translation, event) == [BlocksStored([first])]
    assert _batch(translation, _stored([4], IDS[:4], parent_block_hash=3)) == []
    assert _batch(translation, _removed(2, 3, 4)) == []


def test_other_kinds_of_attention_are_passed_over() -> None:
    translation = Translation()
    assert _batch(translation, _stored([1], IDS[:4], group_idx=1)) == []
    assert _batch(translation, _stored([1], IDS[:4], group_idx=0)) != []


def test_a_cleared_cache_is_empty() -> None:
    translation = Translation()
    _batch(translation, _stored([1], IDS[:4]))
    assert _batch(translation, {"type": "AllBlocksCleared"}) == [CacheCleared()]
    assert _batch(translation, _removed(1)) == []


def test_what_is_no_batch_is_refused() -> None:
    with pytest.raises(UnreadableBatchError):
        Translation().batch(b"\xc1")
