"""Benchmarks: CPU per token and latency, by command, never inside a timed test."""
