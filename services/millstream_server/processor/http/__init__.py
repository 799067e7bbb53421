"""The HTTP API on the public port: OpenAI's endpoints over the same pipeline as gRPC's Chat."""
