"""`python -m millstream_server.processor`: settings → core → serve."""

from __future__ import annotations

from millstream_server.processor.app import run
from millstream_server.processor.settings import ProcessorSettings
from millstream_server.runtime.lifecycle.main import main

if __name__ == "__main__":
    main(
        ProcessorSettings,
        run,
        prog="millstream-processor",
        description="The Processor of Millstream: serves clients, text in and text out.",
    )
