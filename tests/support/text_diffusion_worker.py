"""A diffusion worker that makes text, as a process."""

from __future__ import annotations

from millstream_server.diffusion.text import run
from millstream_server.diffusion.text_settings import TextDiffusionSettings
from millstream_server.runtime.lifecycle.main import main

if __name__ == "__main__":
    main(TextDiffusionSettings, run, prog="millstream-diffusion", description="Makes text.")
