"""`python -m millstream_server.prefill`: settings → engine → serve."""

from __future__ import annotations

from millstream_server.engines.base import Role
from millstream_server.runtime.lifecycle.main import main
from millstream_server.worker.generation.app import run
from millstream_server.worker.generation.servicer import PREFILL
from millstream_server.worker.settings import WorkerSettings

if __name__ == "__main__":
    main(
        WorkerSettings,
        lambda settings: run(settings, Role.PREFILL, PREFILL),
        prog="millstream-prefill",
        description="The prefill worker of Millstream: computes the KV cache of prompts.",
    )
