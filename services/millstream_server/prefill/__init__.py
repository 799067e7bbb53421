"""Prefill service: computes prompts' KV cache and transfers it to decode workers."""
