"""Images and videos with pipelines of diffusers."""
