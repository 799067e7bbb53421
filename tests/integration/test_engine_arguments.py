"""Real services read a settings file, and real SGLang gets its own arguments."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from millstream.v1 import worker_pb2, worker_pb2_grpc
from tests.support.models.models import make_random_model
from tests.support.processes import forked
from tests.support.processes.suite import ServiceProcess

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(240)]


async def test_a_worker_runs_with_settings_of_a_file_and_arguments_behind_it(
    tmp_path: Path,
) -> None:
    model = make_random_model(tmp_path / "model")
    file = tmp_path / "config.yaml"
    file.write_text(
        "model: {name: filed}\n"
        "max_open_requests: 3\n"
        "engine_args: {page_size: 4, chunked_prefill_size: 64}\n"
    )
    flags = {"config": file, "model_path": model, "engine_args": "--page-size 8"}
    worker = ServiceProcess("millstream_server.decode", flags, tmp_path / "log").start()
    try:
        await worker.until_serving()
        async with grpc.aio.insecure_channel(worker.address) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            request = worker_pb2.GetWorkerInfoRequest()
            info = (await stub.GetWorkerInfo(request)).info
            assert (info.model, info.block_size) == ("filed", 8), "SGLang's own page size is 1"
    finally:
        worker.terminate()
        assert await worker.until_gone() == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["decode", "--", "--mem-fraction-sttaic", "0.8"],
            "there is no --mem-fraction-sttaic; did you mean --mem-fraction-static?",
        ),
        (["prefill", "--", "--context-length", "9"], "set: use --context-length"),
        (["embedding", "--", "--tp-size", "x"], "--tp-size/--tensor-parallel-size: invalid int"),
        (
            ["diffusion", "--engine", "sglang", "--", "--num-gpus", "2"],
            "SGLang's diffusion engine's arguments behind --: --num-gpus is not yours to set",
        ),
        (
            ["diffusion", "--engine", "sglang", "--", "--vae-tiling"],
            "--vae-tiling is not yours to set: SGLang takes it on its own command line only",
        ),
    ],
)
def test_the_list_is_that_of_the_engine(arguments: list[str], sentence: str) -> None:
    role, *words = arguments
    done = forked.run("sglang", f"millstream_server.{role}", *words)
    assert done.returncode == 2
    assert sentence in done.stderr


def test_sglangs_diffusion_engine_has_a_list_of_its_own() -> None:
    words = ("--engine", "sglang", "--print-config", "--", "--dit-cpu-offload", "--tp-size=2")
    done = forked.run("sglang", "millstream_server.diffusion", *words)
    assert done.returncode == 0, done.stderr
    assert "engine_args:\n  dit_cpu_offload: true  # flag\n  tp_size: 2  # flag\n" in done.stdout
