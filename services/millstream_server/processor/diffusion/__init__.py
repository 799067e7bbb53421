"""DiffusionService at the Processor: images and videos, forwarded to their workers."""
