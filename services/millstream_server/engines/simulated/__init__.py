"""The simulated engine: deterministic tokens, a timing model, KV blocks."""
