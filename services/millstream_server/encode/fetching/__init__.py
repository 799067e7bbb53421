"""The two ends of EncodeService.Fetch: a worker hands an embedding out, another one fetches it."""
