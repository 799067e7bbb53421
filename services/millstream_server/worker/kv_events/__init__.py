"""The worker's record of what its engine's prefix caches hold, and its readers."""
