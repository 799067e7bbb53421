"""KV events: SGLang's schedulers publish them over ZeroMQ, this process reads and translates."""
