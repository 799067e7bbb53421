from __future__ import annotations
import asyncio, sys
from pathlib import Path
import pytest
from millstream_server.control.weights import *
from millstream_server.control.memory import MemoryTag
from millstream_server.control.pause import PauseMode
from tests.support.checkpoints import *
from tests.support.engine_process import EngineProcess
from tests.support.sglang_requests import *

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(420)]

async def test_explore(model, tmp_path):
    A = changed(model, 1)
    (tmp_path/"x").mkdir()
    a = save(model, tmp_path / "a", A)
    b = save(model, tmp_path / "b", changed(model, 2), shards=3)
    ad, merged = make_adapter(model, tmp_path / "ad", seed=3)
    m = save(model, tmp_path / "m", merged)
    plain = await EngineProcess.launch(tmp_path / "log", model_path=str(model))
    lora = await EngineProcess.launch(tmp_path / "log2", model_path=str(model), max_loras_per_batch=2)
    await plain.ready(); await lora.ready()
    async def ask(e, **k):
        from dataclasses import replace
        s = e.submit(replace(generation(prompt(20)), **k)); f = await result(s); return s.token_ids, f.weight_version
    print("start", await ask(plain), file=sys.stderr)
    for p, v in ((a,"A"),(b,"B"),(m,"M"),(model,"base")):
        print(await plain.control("weights","check_weights",DiskWeights(p)), file=sys.stderr)
        await plain.control("weights","update_weights",DiskWeights(p),v)
        print(v, await ask(plain), file=sys.stderr)
    print("lora none", await ask(lora), file=sys.stderr)
    print(await lora.control("adapters","load_adapter","ad",ad), file=sys.stderr)
    print("lora ad", await ask(lora, adapter="ad"), file=sys.stderr)
    print("mem", await plain.control("memory","memory_use"), file=sys.stderr)
    await plain.control("memory","release_memory",list(MemoryTag))
    print("mem", await plain.control("memory","memory_use"), file=sys.stderr)
    s = plain.submit(generation(prompt(20)))
    await asyncio.sleep(.3); print("while released", s.token_ids, file=sys.stderr)
    await plain.control("memory","resume_memory",list(MemoryTag))
    print("after", (await result(s)), s.token_ids, file=sys.stderr)
    # update with lora on
    print("upd lora", await lora.control("weights","update_weights",DiskWeights(a),"A"), file=sys.stderr)
    print("lora none after A", await ask(lora), file=sys.stderr)
    await plain.close(); await lora.close()
    print((tmp_path/"log2").read_text()[-1500:], file=sys.stderr)
