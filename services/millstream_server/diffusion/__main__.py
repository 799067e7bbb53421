"""`python -m millstream_server.diffusion`: settings → engine → serve."""

from __future__ import annotations

from millstream_server.diffusion.worker.launch import launch

if __name__ == "__main__":
    launch()
