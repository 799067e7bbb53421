"""What all requests that are forwarded whole share: admission, memory, telemetry."""
