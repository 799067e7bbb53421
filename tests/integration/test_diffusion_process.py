"""Diffusion workers as processes: what `--kind` decides, files and URLs, starts that fail."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from PIL import Image

from millstream.v1 import diffusion_pb2, diffusion_pb2_grpc, worker_pb2, worker_pb2_grpc
from millstream_server.diffusion.request import Kind
from millstream_server.engines.simulated.diffuser import pixels_of
from tests.contract.diffusion.test_images import job_like
from tests.support.processes.suite import ServiceProcess
from tests.support.worker.diffusion_worker import Stream


def _process(folder: Path, **flags: object) -> ServiceProcess:
    flags = {"engine": "simulated", "model_name": "pretend", **flags}
    return ServiceProcess("millstream_server.diffusion", flags, folder / "log")


@pytest.mark.parametrize("kind", Kind)
async def test_a_worker_makes_its_kind_and_stops(kind: Kind, tmp_path: Path) -> None:
    storage = tmp_path / "files"
    flags = {"kind": kind.value, "storage_url": f"file://{storage}", "max_steps": 7}
    service = _process(tmp_path, **flags).start()
    try:
        await service.until_serving()
        async with grpc.aio.insecure_channel(service.address) as channel:
            about: Any = worker_pb2_grpc.WorkerServiceStub(channel)
            info = (await about.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest())).info
            model = info.diffusion_model
            assert (info.role, info.model) == (worker_pb2.WORKER_ROLE_DIFFUSION, "pretend")
            assert (model.images, model.videos) == (kind is Kind.IMAGE, kind is Kind.VIDEO)
            assert (model.urls, model.max_steps) == (True, 7)
            stream = Stream(diffusion_pb2_grpc.DiffusionServiceStub(channel), kind)
            stream.read_on()
            await stream.start(0, seed=7)
            await stream.start(
                1, seed=7, request_id="mine", delivery=diffusion_pb2.OUTPUT_DELIVERY_URL
            )
            sent, stored = await stream.finished(0), await stream.finished(1)
            assert stored.finished is not None
            url = stored.finished.outputs[0].url
            assert url.startswith(f"file://{storage}/mine/")
            assert _content(url) == sent.files[0]
            if kind is Kind.IMAGE:
                made = Image.open(io.BytesIO(sent.files[0]))
                assert made.tobytes() == bytes(pixels_of(job_like()).data)
            await stream.close()
    finally:
        assert service.stop() == 0
    assert "Traceback" not in service.log.read_text()


def _content(url: str) -> bytes:
    return Path(url.removeprefix("file://")).read_bytes()


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "millstream_server.diffusion", "--metrics-listen", "", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--kind", "films"], 2, "--kind: 'films' is not one of image, video, text"),
        (["--engine", "simulated", "--max-outputs", "0"], 2, "--max-outputs: must be at least 1"),
        (["--engine", "simulated", "--default-width", "64"], 2, "set both or neither"),
        (["--engine", "simulated", "--storage-url", "nosuch://x"], 2, "--storage-url nosuch://"),
        (["--engine", "simulated", "--storage-public-url", "https://x"], 2, "needs --storage-url"),
        (["--engine", "simulated", "--max-pixels", "100"], 1, "the default size, 64 x 64"),
    ],
)
def test_a_start_that_cannot_be_says_why(arguments: list[str], code: int, says: str) -> None:
    done = _run("--listen", "127.0.0.1:0", *arguments)
    assert (done.returncode, says in done.stderr + done.stdout) == (code, True), done.stderr


def test_help_is_that_of_the_kind() -> None:
    pictures, text = _run("--help"), _run("--kind", "text", "--help")
    assert (pictures.returncode, text.returncode) == (0, 0)
    assert "--storage-url" in pictures.stdout
    assert "--storage-url" not in text.stdout
    assert "--dllm-algorithm" in text.stdout
    assert "--kind" in text.stdout
