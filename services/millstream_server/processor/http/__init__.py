"""The HTTP API on the public port: OpenAI's and Anthropic's endpoints over gRPC's pipeline."""
