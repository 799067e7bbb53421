"""`python -m millstream_server.door`: settings → Processors → serve."""

from __future__ import annotations

from millstream_server.door.app import run
from millstream_server.door.settings import DoorSettings
from millstream_server.runtime.lifecycle.main import main

if __name__ == "__main__":
    main(
        DoorSettings,
        run,
        prog="millstream-door",
        description="The HTTP door of Millstream on its own: OpenAI's and Anthropic's APIs over "
        "Processors that it calls by gRPC.",
    )
