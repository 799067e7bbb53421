"""Inference engines behind one Protocol: `sglang`, and `simulated` for tests and studies."""
