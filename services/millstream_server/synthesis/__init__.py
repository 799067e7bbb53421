"""Images and videos by diffusion, in plain types: requests, outputs, the engine's Protocol."""
