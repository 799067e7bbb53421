"""Embedding and ranking on a worker's host: batches across requests, one engine."""
