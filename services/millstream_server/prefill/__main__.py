"""`python -m millstream_server.prefill`: settings → engine → serve."""

from __future__ import annotations

# Processes that an engine spawns import this module too, by another name.
if __name__ == "__main__":
    from millstream_server.control.engine import Role
    from millstream_server.generation.worker.app import run
    from millstream_server.generation.worker.servicer import PREFILL
    from millstream_server.generation.worker.settings import WorkerSettings
    from millstream_server.runtime.lifecycle.main import main

    main(
        WorkerSettings,
        lambda settings: run(settings, Role.PREFILL, PREFILL),
        prog="millstream-prefill",
        description="The prefill worker of Millstream: computes the KV cache of prompts.",
    )
