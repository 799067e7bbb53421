"""How the embedding of an image or a video moves from the worker that made it to another."""
