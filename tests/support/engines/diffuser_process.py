"""SGLang's engine for images in a process of its own: prints its scheduler's id, and stays."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from millstream_server.engines.sglang.diffuser import SglangDiffuser, SglangDiffuserConfig


async def main(folder: Path) -> None:
    engine = SglangDiffuser(SglangDiffuserConfig(model_path=folder, device="cpu"))
    await engine.start(lambda _: None)
    (process,) = engine._scheduler.generator.local_scheduler_process
    print(process.pid, flush=True)  # noqa: T201 - for the test
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
