"""SGLang's engine for images and videos, in a pytest of its own."""

from __future__ import annotations

import asyncio
import os
import re
import signal

import psutil
import pytest

from millstream_testing.waiting import until
from tests.support.engines.diffuser_engines import SGLANG_VARIABLE
from tests.support.models.tiny_pipelines import TinyPipelines
from tests.support.processes import forked
from tests.support.processes.preloads import PRELOAD_VARIABLE

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]

_CONFORMANCE = "tests/contract/diffusion/test_diffuser_conformance.py"
_CASES = "tests/contract/diffusion/sglang_diffuser_cases.py"
_RUNTIME = "sglang.multimodal_gen.runtime"
_PRELOADED = (
    f"{_RUNTIME}.entrypoints.diffusion_generator",
    f"{_RUNTIME}.launch_server",
    f"{_RUNTIME}.managers.scheduler",
    f"{_RUNTIME}.pipelines.wan_pipeline",
    f"{_RUNTIME}.pipelines.zimage_pipeline",
)


def _environment() -> dict[str, str]:
    return {**os.environ, PRELOAD_VARIABLE: " ".join(_PRELOADED), "OMP_NUM_THREADS": "1"}


async def test_sglang_passes_the_conformance_suite_and_cases_of_its_own() -> None:
    done = await asyncio.to_thread(
        forked.run,
        "sglang",
        "pytest",
        *("-q", "-rs", "-p", "no:cacheprovider", _CONFORMANCE, _CASES),
        *("-o", "filterwarnings=default", "-W", "default"),  # SGLang's imports warn
        environment={**_environment(), SGLANG_VARIABLE: "1"},
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, done.stdout[-6000:]  # ends with the names of what failed
    (passed,) = re.findall(r"^(\d+) passed", output, re.MULTILINE)
    assert int(passed) >= 55, output
    skipped = re.findall(r"^SKIPPED.*: (.*)$", output, re.MULTILINE)
    assert set(skipped) <= {"the engine starts from prompts only"}, output


async def test_sglangs_process_ends_with_a_killed_worker(tiny_pipelines: TinyPipelines) -> None:
    folder = str(tiny_pipelines.image)
    read, write = os.pipe()
    with open(os.devnull, "r+b") as nothing:  # noqa: ASYNC230, PTH123 - no file
        worker = forked.start(
            "sglang",
            "tests.support.engines.diffuser_process",
            [folder],
            (nothing, write, nothing),
            _environment(),
        )
    os.close(write)
    with os.fdopen(read) as lines:
        scheduler = psutil.Process(int(await asyncio.to_thread(lines.readline)))
    worker.send_signal(signal.SIGKILL)
    await until(lambda: not _runs(scheduler))
    assert worker.wait() == -signal.SIGKILL


def _runs(process: psutil.Process) -> bool:
    return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
