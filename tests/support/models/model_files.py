"""`python -m millstream_server.model_files` as a process, as containers run it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

CONFIG = b'{"model_type": "tiny"}'
WEIGHTS = bytes(range(256)) * 8192
MODEL = {
    ".gitattributes": b"*.safetensors filter=lfs",
    "config.json": CONFIG,
    "tokenizer.json": b"{}",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"the same once more",
}


@dataclass(frozen=True)
class Ended:
    """A process that has ended."""

    code: int
    log: str


async def start(*args: object, env: Mapping[str, str]) -> asyncio.subprocess.Process:
    """Start it."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "AWS_", "HTTP"))}
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "millstream_server.model_files",
        *map(str, args),
        env={**clean, "NO_PROXY": "*", **env},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )


async def ended(process: asyncio.subprocess.Process) -> Ended:
    """Wait for its end."""
    out, _ = await process.communicate()
    assert process.returncode is not None
    return Ended(process.returncode, out.decode())


async def run(*args: object, env: Mapping[str, str]) -> Ended:
    """Run it to its end."""
    return await ended(await start(*args, env=env))
