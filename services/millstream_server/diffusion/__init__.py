"""The Diffusion service: text, images and videos by diffusion models."""
