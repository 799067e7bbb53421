"""`millstream check` against deployments that work, and against each way in which one may not."""

from __future__ import annotations

import asyncio
import io
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from millstream_client import NO_RETRY, Client
from millstream_server.cli.check.deployment import Wanted, check
from millstream_server.cli.entry import run_plain
from millstream_server.cli.flags import KEY_VARIABLE, Destination
from millstream_server.control.engine import Role
from millstream_server.processor.app import SERVICE
from millstream_server.processor.text.tokenizer import TextModel
from millstream_testing.in_process import ALPHABET, MODEL, processor, worker
from tests.support.media.media_suite import media_suite
from tests.support.models.vision_models import make_vision_model
from tests.support.processes.ports import free_port
from tests.support.processes.secured_front import KEY, secured_front
from tests.support.worker import embedding_worker
from tests.support.worker.diffusion_worker import MODEL as PICTURES
from tests.support.worker.diffusion_worker import VIDEOS, diffusion_worker

PREFILL = replace(ALPHABET, role=Role.PREFILL)
DECODE = replace(ALPHABET, role=Role.DECODE)


class Checked:
    """What a check printed and returned."""

    def __init__(self, code: int, out: str) -> None:
        self.code = code
        self.out = out

    def line(self, name: str) -> str:
        """Return the line of a step; there is one."""
        (line,) = [ln for ln in self.out.splitlines() if ln[2:].startswith(f"{name}:")]
        return line


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> type[Runner]:
    Runner.capsys = capsys
    return Runner


class Runner:
    """Runs a check beside the servers, in their loop."""

    capsys: pytest.CaptureFixture[str]

    @classmethod
    async def check(cls, address: str, **wanted: object) -> Checked:
        async with Client(address, retry=NO_RETRY) as client:
            of_server = Wanted(server=Destination(address), **wanted)  # type: ignore[arg-type]
            code = await check(client, of_server)
        return Checked(code, cls.capsys.readouterr().out)


# ---- what works


async def test_a_pair_is_answered_through_prefill_and_decode(
    text_model: TextModel, run: type[Runner]
) -> None:
    async with (
        worker(PREFILL) as one,
        worker(DECODE) as two,
        processor({MODEL: text_model}, [one.address, two.address]) as front,
    ):
        found = await run.check(front.address, disaggregated=frozenset({MODEL}))
    assert found.code == 0, found.out
    assert f"✓ connection: {front.address} (" in found.out
    assert f"✓ health: {SERVICE} is SERVING (" in found.out
    assert "✓ reflection: " in found.out
    assert f"✓ models: {MODEL} (1 prefill, 1 decode) (" in found.out
    assert f"✓ model {MODEL}: chat: 8 tokens, through prefill and decode (" in found.out
    assert found.out.endswith("all 5 steps passed\n")


async def test_with_an_aggregated_worker_the_way_is_not_certain(
    text_model: TextModel, run: type[Runner]
) -> None:
    async with (
        worker(PREFILL) as one,
        worker(DECODE) as two,
        worker() as three,
        processor({MODEL: text_model}, [one.address, two.address, three.address]) as front,
    ):
        mixed = await run.check(front.address)
        strict = await run.check(front.address, disaggregated=frozenset({MODEL}))
    assert mixed.code == 0
    assert "or through an aggregated worker" in mixed.line(f"model {MODEL}")
    assert strict.code == 1
    assert "it isn't certain that prefill workers took part" in strict.line(f"model {MODEL}")


async def test_every_kind_of_model_gets_its_smallest_request(
    text_model: TextModel, run: type[Runner]
) -> None:
    models = {MODEL: text_model, PICTURES: None, embedding_worker.MODEL: text_model}
    async with (
        worker() as one,
        diffusion_worker() as two,
        embedding_worker.embedding_worker() as three,
        processor(models, [one.address, two.settings.listen, three.settings.listen]) as front,
    ):
        found = await run.check(front.address)
        one_model = await run.check(front.address, models=frozenset({PICTURES}))
    assert found.code == 0, found.out
    assert "chat: 8 tokens (" in found.line(f"model {MODEL}")
    assert "image: " in found.line(f"model {PICTURES}")
    of_vectors = [ln for ln in found.out.splitlines() if embedding_worker.MODEL + ":" in ln]
    assert [ln.split(": ")[1] for ln in of_vectors] == ["embed", "rerank"]
    assert one_model.code == 0
    assert f"model {MODEL}:" not in one_model.out


async def test_a_model_for_videos_makes_one(run: type[Runner]) -> None:
    async with (
        diffusion_worker(VIDEOS) as one,
        processor({PICTURES: None}, [one.settings.listen]) as front,
    ):
        found = await run.check(front.address)
    assert found.code == 0, found.out
    assert "video: " in found.line(f"model {PICTURES}")


async def test_a_model_that_takes_images_is_asked_about_one(
    tmp_path: Path, run: type[Runner]
) -> None:
    directory = make_vision_model(tmp_path / "qwen", "qwen2_5_vl")
    async with media_suite(directory) as suite:
        found = await run.check(suite.front.address)
    assert found.code == 0, found.out
    assert "chat with an image: 8 tokens (" in found.out


async def test_it_waits_for_models_and_says_for_what(
    text_model: TextModel, run: type[Runner]
) -> None:
    async with (
        worker(loaded=False) as one,
        processor({MODEL: text_model}, [one.address], wait=False) as front,
    ):
        checked = asyncio.ensure_future(run.check(front.address, wait_s=30.0))
        while "… health: waiting: " not in (said := run.capsys.readouterr().out):
            await asyncio.sleep(0.01)
        assert f"{SERVICE} is NOT_SERVING" in said
        await one.load()
        assert (await checked).code == 0


# ---- what doesn't


async def test_nobody_there(run: type[Runner]) -> None:
    found = await run.check(f"127.0.0.1:{free_port()}")
    assert found.code == 1
    assert "✗ connection: " in found.out
    assert "can't be reached" in found.out
    assert "-> is it running, and are address and port right?" in found.out
    assert found.out.endswith("1 of 1 steps failed\n")


async def test_a_worker_is_no_processor(run: type[Runner]) -> None:
    async with worker() as one:
        found = await run.check(one.address)
    assert found.code == 1
    assert f"✗ health: the server has no {SERVICE}" in found.out
    assert "-> give the Processor's address" in found.out
    assert "DiffusionService, millstream.v1.EmbeddingService not listed" in found.line("reflection")
    assert found.line("models").startswith("✗")


async def test_a_model_without_workers(text_model: TextModel, run: type[Runner]) -> None:
    async with processor({MODEL: text_model}, []) as front:
        found = await run.check(front.address)
    assert found.code == 1
    assert f"✗ health: {SERVICE} is NOT_SERVING" in found.out
    assert "not ready, it lacks workers (connected: no workers)" in found.line(f"model {MODEL}")
    assert "does --workers of the Processor name them" in found.out


async def test_a_model_that_lacks_prefill(text_model: TextModel, run: type[Runner]) -> None:
    async with worker(DECODE) as one, processor({MODEL: text_model}, [one.address]) as front:
        found = await run.check(front.address)
    assert found.code == 1
    assert "it lacks prefill workers (connected: 1 decode)" in found.line(f"model {MODEL}")


async def test_a_model_that_is_aggregated_and_should_not_be(
    text_model: TextModel, run: type[Runner]
) -> None:
    async with worker() as one, processor({MODEL: text_model}, [one.address]) as front:
        found = await run.check(front.address, disaggregated=frozenset({MODEL}))
    assert found.code == 1
    line = found.line(f"model {MODEL}")
    assert "(aggregated workers are connected)" in line


async def test_a_model_that_is_not_served(text_model: TextModel, run: type[Runner]) -> None:
    async with worker() as one, processor({MODEL: text_model}, [one.address]) as front:
        found = await run.check(front.address, models=frozenset({"other"}))
    assert found.code == 1
    assert f"✗ models: other not served; served are: {MODEL}" in found.out


async def test_an_engine_that_gives_no_answer(text_model: TextModel, run: type[Runner]) -> None:
    stuck = replace(ALPHABET, prefill_s_per_token=60.0)
    async with worker(stuck) as one, processor({MODEL: text_model}, [one.address]) as front:
        found = await run.check(front.address, timeout_s=0.3)
    assert found.code == 1
    assert found.line(f"model {MODEL}").startswith(f"✗ model {MODEL}: DEADLINE_EXCEEDED")
    assert found.out.endswith("1 of 5 steps failed\n")


async def test_an_output_without_the_signs_gets_words(
    run: type[Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    await run.check(f"127.0.0.1:{free_port()}")
    sys.stdout.flush()
    assert written.getvalue().startswith(b"FAILED connection: ")


# ---- TLS and keys, through the flags


async def test_a_key_and_tls_are_taken_from_flags_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with secured_front(tmp_path) as front:
        tls, only = front.tls, ("--model", "fake")

        async def run(*flags: str) -> tuple[int, str]:
            code = await asyncio.to_thread(run_plain, ["check", front.address, *only, *flags])
            return code, capsys.readouterr().out

        monkeypatch.delenv(KEY_VARIABLE, raising=False)
        code, out = await run(*tls, *front.key)
        assert (code, "✓ models: fake" in out) == (0, True), out
        assert "- model fake: not asked" in out
        code, out = await run(*tls)
        assert code == 1
        assert "✗ models: UNAUTHENTICATED" in out
        assert f"-> give the key by --api-key-file, or in {KEY_VARIABLE}" in out
        monkeypatch.setenv(KEY_VARIABLE, KEY)
        assert (await run(*tls))[0] == 0
        code, out = await run()
        assert code == 1
        assert "closes connections at once; if it serves TLS, give --tls-ca-file" in out


def test_wrong_usage_has_an_exit_code_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_plain(["check", "processor"]) == 2
    assert "'processor' is not HOST:PORT" in capsys.readouterr().err
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    assert run_plain(["check", "processor.example:1"]) == 2
    assert "--allow-plaintext-key" in capsys.readouterr().err
    assert run_plain(["check", "--api-key-file", "/no/such"]) == 2
    assert "/no/such" in capsys.readouterr().err
