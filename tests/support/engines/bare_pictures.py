"""A bare diffusers pipeline in a process of its own, for comparison.

    python -m tests.support.engines.bare_pictures MODEL WIDTH HEIGHT STEPS GUIDANCE

Loads the pipeline, prints a line when it is ready, then for each line N that it reads makes N
images of the seeds 0 to N-1, one after another, and prints a line of JSON: seconds per image, CPU
seconds per image, resident memory in MB, and the SHA-256 of each image's pixels.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tests.support.processes import forked
from tests.support.processes.processes import rss_mb

PROMPT = "a red circle on a white background"


def main() -> None:
    """Load, then measure when asked to."""
    model, width, height, steps, guidance = sys.argv[1:]
    pipeline = _load(model)
    arguments = {
        "prompt": PROMPT,
        "width": int(width),
        "height": int(height),
        "num_inference_steps": int(steps),
        "guidance_scale": float(guidance),
        "output_type": "pil",
    }
    _make(pipeline, 1, arguments)
    print("ready", flush=True)  # noqa: T201
    for line in sys.stdin:
        count = int(line)
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        digests = _make(pipeline, count, arguments)
        took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        found = {
            "s": took_s / count,
            "cpu_s": cpu_s / count,
            "rss_mb": rss_mb(os.getpid()),
            "sha256": digests,
        }
        print(json.dumps(found), flush=True)  # noqa: T201


def _load(model: str) -> Any:
    from millstream_server.engines.torch_on_cpu import prepare  # noqa: PLC0415 - torchvision

    prepare()
    from diffusers import DiffusionPipeline  # noqa: PLC0415

    pipeline = DiffusionPipeline.from_pretrained(model, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _make(pipeline: Any, count: int, arguments: dict[str, Any]) -> list[str]:
    import torch  # noqa: PLC0415

    digests = []
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        image = pipeline(**arguments, generator=generator).images[0]
        digests.append(pixels_digest(image.tobytes()))
    return digests


# ---- the test's side -----------------------------------------------------------------------------


class BarePipeline:
    """The test's handle of a bare pipeline in another process; its calls block."""

    def __init__(
        self, model: Path, *, width: int, height: int, steps: int, guidance_scale: float
    ) -> None:
        stdin, to_pipeline = os.pipe()
        from_pipeline, stdout = os.pipe()
        with open(os.devnull, "wb") as nothing:  # noqa: PTH123 - as a stream
            self._process = forked.start(
                "sglang",
                "tests.support.engines.bare_pictures",
                [str(value) for value in (model, width, height, steps, guidance_scale)],
                (stdin, stdout, nothing),
                {"OMP_NUM_THREADS": "1", **os.environ},
            )
        os.close(stdin)
        os.close(stdout)
        self._counts = os.fdopen(to_pipeline, "w")
        self._lines = os.fdopen(from_pipeline)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> None:
        """Wait until the pipeline is loaded and warm."""
        assert self._line() == "ready\n"

    def make(self, count: int) -> dict[str, Any]:
        """Make images of the seeds 0 to ``count`` - 1; return the figures."""
        self._counts.write(f"{count}\n")
        self._counts.flush()
        found: dict[str, Any] = json.loads(self._line())
        return found

    def close(self) -> None:
        """End the process."""
        self._counts.close()
        self._process.wait(60)
        self._lines.close()

    def _line(self) -> str:
        line = self._lines.readline()
        assert line, "the bare pipeline's process ended"
        return line


def pixels_digest(pixels: bytes) -> str:
    """Return what the process prints of an image with these RGB pixels."""
    return hashlib.sha256(pixels).hexdigest()


if __name__ == "__main__":
    main()
