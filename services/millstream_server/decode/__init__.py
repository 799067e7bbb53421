"""Decode service: KV cache, or a prompt, to a stream of tokens."""
