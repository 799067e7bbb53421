"""Inference engines behind one small Protocol: `sglang` (real) and `simulated` (by hand)."""
