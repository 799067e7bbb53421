"""`python -m millstream_server.embedding`: settings → engine → serve."""

from __future__ import annotations

from millstream_server.embedding.worker.app import EmbeddingSettings, run
from millstream_server.runtime.lifecycle.main import main

if __name__ == "__main__":
    main(
        EmbeddingSettings,
        run,
        prog="millstream-embedding",
        description="The embedding worker of Millstream: texts to vectors and scores.",
    )
