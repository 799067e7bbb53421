"""`python -m millstream_server.diffusion`: settings → engine → serve."""

from __future__ import annotations

# Processes that an engine spawns import this module too, by another name.
if __name__ == "__main__":
    from millstream_server.diffusion.worker.launch import launch

    launch()
