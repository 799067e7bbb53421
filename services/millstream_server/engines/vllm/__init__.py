"""vLLM 0.32 as an engine, by the client of its core process."""
