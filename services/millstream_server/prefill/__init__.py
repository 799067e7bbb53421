"""Prefill service: prompts to KV cache, handed to decode workers."""
