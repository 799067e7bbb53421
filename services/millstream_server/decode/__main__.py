"""`python -m millstream_server.decode`: settings → engine → serve."""

from __future__ import annotations

# Processes that an engine spawns import this module too, by another name.
if __name__ == "__main__":
    from millstream_server.decode.app import DecodeSettings, media_of
    from millstream_server.generation.worker.app import run
    from millstream_server.generation.worker.servicer import DECODE
    from millstream_server.runtime.lifecycle.main import main

    main(
        DecodeSettings,
        lambda settings: run(settings, settings.role, DECODE, media_of(settings)),
        prog="millstream-decode",
        description="The decode worker of Millstream: generates tokens.",
    )
