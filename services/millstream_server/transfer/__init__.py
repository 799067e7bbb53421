"""How KV caches and embeddings move between workers, and the tickets that allow it."""
