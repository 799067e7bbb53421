"""`python -m millstream_server.embedding`: settings → engine → serve."""

from __future__ import annotations

# Processes that an engine spawns import this module too, by another name.
if __name__ == "__main__":
    from millstream_server.embedding.worker.app import EmbeddingSettings, run
    from millstream_server.runtime.lifecycle.main import main

    main(
        EmbeddingSettings,
        run,
        prog="millstream-embedding",
        description="The embedding worker of Millstream: texts to vectors and scores.",
    )
