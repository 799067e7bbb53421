"""Decode service: generates tokens from a KV cache or a prompt."""
