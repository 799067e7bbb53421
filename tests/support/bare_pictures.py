"""A bare diffusers pipeline in a process of its own, for comparison.

    python -m tests.support.bare_pictures MODEL WIDTH HEIGHT STEPS GUIDANCE

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
from typing import Any

from tests.support.processes import rss_mb

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
    from millstream_server.engines.sglang.cpu import activate  # noqa: PLC0415 - torchvision's stub

    activate()
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
        digests.append(hashlib.sha256(image.tobytes()).hexdigest())
    return digests


if __name__ == "__main__":
    main()
