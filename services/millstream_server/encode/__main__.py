"""`python -m millstream_server.encode`: settings → encoder → serve."""

from __future__ import annotations

# Processes that an engine spawns import this module too, by another name.
if __name__ == "__main__":
    from millstream_server.encode.worker.app import EncodeSettings, run
    from millstream_server.runtime.lifecycle.main import main

    main(
        EncodeSettings,
        run,
        prog="millstream-encode",
        description="The encode worker of Millstream: images and videos to embeddings.",
    )
