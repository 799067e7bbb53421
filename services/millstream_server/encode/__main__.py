"""`python -m millstream_server.encode`: settings → encoder → serve."""

from __future__ import annotations

from millstream_server.encode.worker.app import EncodeSettings, run
from millstream_server.runtime.lifecycle.main import main

if __name__ == "__main__":
    main(
        EncodeSettings,
        run,
        prog="millstream-encode",
        description="The encode worker of Millstream: images and videos to embeddings.",
    )
