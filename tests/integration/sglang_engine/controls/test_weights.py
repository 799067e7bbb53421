"""New weights in the real engine, and what would end it if it got there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millstream_server.control.operations import (
    BroadcastWeights,
    DiskWeights,
    IpcWeights,
    NamedTensor,
    TensorWeights,
    WeightSource,
)
from millstream_server.media.tensor import ElementType, TensorSpec
from millstream_server.runtime.errors import (
    EngineBusyError,
    EngineFailedError,
    InvalidWeightsError,
    UnsupportedFeatureError,
)
from tests.support.engines.engine_process import EngineProcess
from tests.support.engines.sglang_operations import (
    ASKED,
    ask,
    end_all,
    replace_weights,
    start_running,
)
from tests.support.engines.sglang_requests import (
    generation,
    result,
)
from tests.support.models.checkpoints import changed, save, weights_of
from tests.support.processes import forked
from tests.support.processes.ports import free_port
from tests.support.processes.preloads import PRELOAD_VARIABLE

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.asyncio(loop_scope="session"),
    # An engine takes 10 s to start on a quiet machine and over a minute on a busy one.
    pytest.mark.timeout(420),
]


_Q = "model.layers.0.self_attn.q_proj.weight"


def _broken(kind: str, folder: Path, model: Path) -> Path:
    weights: dict[str, Any] = changed(model, 1)
    if kind == "missing":
        return folder / "none"
    if kind == "other shape":
        weights[_Q] = weights[_Q][:32]
    elif kind == "other names":
        weights["model.other"] = weights.pop(_Q)
    path = save(model, folder / "broken", weights)
    file = path / "model.safetensors"
    if kind == "truncated":
        file.write_bytes(file.read_bytes()[:-100])
    elif kind == "bin":
        file.rename(path / "pytorch_model.bin")
    return path


def _named(weights: dict[str, Any], *names: str) -> TensorWeights:
    return TensorWeights([(_spec(weights, name), weights[name].tobytes()) for name in names])


def _spec(weights: dict[str, Any], name: str) -> NamedTensor:
    return NamedTensor(name, TensorSpec(ElementType.FLOAT32, weights[name].shape))


class TestWeights:
    """UpdateWeights."""

    async def test_each_answer_is_of_the_version_that_it_names(
        self, engine: EngineProcess, versions: dict[str, Path]
    ) -> None:
        seen = {}
        for version in ("A", "B", "base"):
            await replace_weights(engine, DiskWeights(versions[version]), version)
            seen[version] = await ask(engine)
            assert seen[version][1] == version
        assert len({tuple(tokens) for tokens, _ in seen.values()}) == 3
        # Under load, as a worker does it: requests of the new version wait at the engine.
        update = asyncio.create_task(
            engine.control("weights", "update_weights", DiskWeights(versions["A"]), "A")
        )
        await asyncio.sleep(0)  # it is sent first
        sinks = [engine.submit(generation(ASKED)) for _ in range(6)]
        await update
        for sink in sinks:
            finish = await result(sink)
            assert sink.token_ids == seen[finish.weight_version][0]
        assert await ask(engine) == seen["A"]

    async def test_it_is_refused_while_requests_run(
        self, engine: EngineProcess, versions: dict[str, Path]
    ) -> None:
        before = await ask(engine)
        sinks = await start_running(engine)
        with pytest.raises(EngineBusyError):
            await engine.control("weights", "update_weights", DiskWeights(versions["B"]), "B")
        await end_all(engine, sinks)
        assert await ask(engine) == before

    @pytest.mark.parametrize(
        ("kind", "why"),
        [
            ("missing", "no directory"),
            ("truncated", "cut off"),
            ("other shape", r"shape \[32, 64\]"),
            ("other names", "lacks 1 of"),
            ("bin", "save them as safetensors"),
        ],
    )
    async def test_a_broken_checkpoint_leaves_the_old_one(
        self, engine: EngineProcess, model: Path, tmp_path: Path, kind: str, why: str
    ) -> None:
        before = await ask(engine)
        broken = DiskWeights(_broken(kind, tmp_path, model))
        for call in (("check_weights", broken), ("update_weights", broken, "broken")):
            with pytest.raises(InvalidWeightsError, match=why):
                await engine.control("weights", *call)
            assert await ask(engine) == before

    async def test_tensors_replace_those_of_their_names(
        self, engine: EngineProcess, versions: dict[str, Path], tmp_path: Path
    ) -> None:
        base, other = weights_of(versions["base"]), weights_of(versions["B"])
        mixed = save(versions["base"], tmp_path / "mixed", {**base, _Q: other[_Q]})
        await replace_weights(engine, DiskWeights(mixed), "mixed")
        wanted, _ = await ask(engine)
        await replace_weights(engine, DiskWeights(versions["base"]), "base")
        assert (await ask(engine))[0] != wanted
        await replace_weights(engine, _named(other, _Q), "tensors")
        assert await ask(engine) == (wanted, "tensors")
        await replace_weights(engine, DiskWeights(versions["A"]), "A")

    @pytest.mark.parametrize(
        ("spoil", "why"),
        [
            (lambda tensor, data: [(tensor, data[:-4])], "needs 16,384"),
            (lambda tensor, data: [(tensor, data)] * 2, "twice"),
            (lambda *_: [], "no tensors"),
            (
                lambda _, data: [(NamedTensor("x", TensorSpec(ElementType.FLOAT32, (64,))), data)],
                "no tensor 'x'",
            ),
            (
                lambda t, data: [
                    (NamedTensor(t.name, TensorSpec(ElementType.FLOAT32, (4,))), data)
                ],
                r"shape \[4\]",
            ),
        ],
    )
    async def test_wrong_tensors_are_refused(
        self,
        engine: EngineProcess,
        versions: dict[str, Path],
        spoil: Callable[..., Any],
        why: str,
    ) -> None:
        ((tensor, data),) = _named(weights_of(versions["B"]), _Q).tensors
        with pytest.raises(InvalidWeightsError, match=why):
            await engine.control("weights", "check_weights", TensorWeights(spoil(tensor, data)))

    async def test_a_trainer_broadcasts(
        self, engine: EngineProcess, versions: dict[str, Path], tmp_path: Path
    ) -> None:
        names = sorted(weights_of(versions["base"]))
        await replace_weights(engine, DiskWeights(versions["B"]), "B")
        wanted, _ = await ask(engine)
        await replace_weights(engine, DiskWeights(versions["base"]), "base")
        whole = save(versions["base"], tmp_path / "whole", changed(versions["base"], 2))
        source, trainer = await _trainer(whole / "model.safetensors", names)
        await replace_weights(engine, source, "trained")
        assert (await trainer).returncode == 0
        assert await ask(engine) == (wanted, "trained")

    async def test_a_trainer_that_dies_leaves_the_old_weights(
        self, engine: EngineProcess, versions: dict[str, Path]
    ) -> None:
        before = await ask(engine)
        source, trainer = await _trainer(versions["A"] / "model.safetensors", [_Q], "die")
        with pytest.raises(InvalidWeightsError, match="the old ones are in place"):
            await replace_weights(engine, source, "trained")
        assert (await trainer).returncode == 3
        assert await ask(engine) == before

    async def test_sources_that_cannot_work_are_refused(self, engine: EngineProcess) -> None:
        one = [NamedTensor(_Q, TensorSpec(ElementType.FLOAT32, (64, 64)))]
        right = BroadcastWeights(
            master_address="127.0.0.1:1",
            rank_offset=1,
            world_size=2,
            group_name="g",
            backend="gloo",
            tensors=one,
        )
        refused: list[tuple[WeightSource, type[Exception], str]] = [
            (IpcWeights(), UnsupportedFeatureError, "runs on a CPU"),
            (
                replace(right, backend="nccl"),
                UnsupportedFeatureError,
                "must be 'gloo', not 'nccl'",
            ),
            (replace(right, world_size=1), InvalidWeightsError, "world_size is 1"),
            (replace(right, master_address="x"), InvalidWeightsError, "isn't HOST:PORT"),
            (right, InvalidWeightsError, "Nobody listens at 127.0.0.1:1"),
        ]
        for source, error, why in refused:
            with pytest.raises(error, match=why):
                await engine.control("weights", "check_weights", source)


async def _trainer(file: Path, names: list[str], *options: str) -> tuple[BroadcastWeights, Any]:
    """Start a trainer; return what to update from, and the future of its end."""
    port, weights = free_port(), weights_of(file.parent)
    arguments = (str(port), "trainer", str(file), ",".join(names), *options)
    loop = asyncio.get_running_loop()
    ended = loop.run_in_executor(
        None, lambda: forked.run("sglang", "tests.support.engines.trainer", *arguments)
    )
    source = BroadcastWeights(
        master_address=f"127.0.0.1:{port}",
        rank_offset=1,
        world_size=2,
        group_name="trainer",
        backend="gloo",
        tensors=[_spec(weights, name) for name in names],
    )
    async with asyncio.timeout(60):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.02)
            else:
                writer.close()
                return source, ended


async def test_an_update_that_fails_half_way_is_undone_or_ends_the_engine(
    model: Path, versions: dict[str, Path], tmp_path: Path
) -> None:
    engine = await EngineProcess.launch(
        tmp_path / "log",
        model_path=str(model),
        env={PRELOAD_VARIABLE: "tests.support.engines.half_loaded"},
    )
    await engine.ready()
    fails = DiskWeights(save(model, tmp_path / "fails", changed(model, 3)))
    await replace_weights(engine, DiskWeights(versions["A"]), "A")
    before = await ask(engine)
    with pytest.raises(InvalidWeightsError, match="the old ones are in place"):
        await replace_weights(engine, fails, "fails")
    assert await ask(engine) == before
    # Weights that came from a trainer are in no file: nothing can undo the failure.
    await replace_weights(engine, _named(weights_of(versions["B"]), _Q), "tensors")
    with pytest.raises(EngineFailedError, match="can't be restored"):
        await replace_weights(engine, fails, "fails")
    await engine.engine_failed.wait()
    with pytest.raises(EngineFailedError):
        await ask(engine)
    assert await engine.close() == 0
