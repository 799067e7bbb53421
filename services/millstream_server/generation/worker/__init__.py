"""Text generation on a worker's host: requests in slots of a stream, tokens in frames."""
